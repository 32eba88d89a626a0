"""End to end: clients of agents with tools, through the gateway to real vLLM. sparkd chose the parser: the entry names none.

So small a model calls a tool only when it must. A call is therefore asked for by name or as required, with a strict schema, to which vLLM
holds it; with `auto` the parser reads an answer that may have no call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.e2e.conftest import NAME, engine_metric
from tests.support.daemon_process import DaemonProcess

if TYPE_CHECKING:
    import openai


QUESTION = "What is the weather in Paris?"
CITIES = ("Paris", "Rome")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "The weather of a city now", "parameters": SCHEMA, "strict": True}
TOOL: Any = {"type": "function", "function": FUNCTION}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
ASKED: Any = [{"role": "user", "content": QUESTION}]
# The limit of a call; an answer in words may take less.
TOKENS = 96
# How often the engine's parser has read an answer.
PARSED = "vllm:tool_call_parser_invocations_total"


class Weather(BaseModel):
    """The weather of a city now."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]


@pytest.fixture
def client(served: DaemonProcess) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def check(name: str | None, arguments: str | dict[str, Any] | None) -> None:
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "get_weather"
    assert isinstance(found, dict) and list(found) == ["city"] and found["city"] in CITIES


def test_the_first_chat_at_the_defaults_says_paris_twenty_times_of_twenty(served: DaemonProcess) -> None:
    def ask(_: int) -> str:
        body = {"model": NAME, "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16}
        return str(served.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, range(20)))

    assert [answer for answer in answers if "Paris" not in answer] == []


def test_the_parser_was_chosen_and_is_told(served: DaemonProcess) -> None:
    assert served.model(NAME)["parsers"] == {"tool": "hermes", "reasoning": None, "nearest": None}


def test_openai_calls_a_tool(client: openai.OpenAI) -> None:
    """By its name: test_openai_calls_a_tool_in_a_stream."""
    answer = client.chat.completions.create(
        model=NAME, messages=ASKED, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=TOKENS
    )
    (call,) = answer.choices[0].message.tool_calls or []

    assert call.type == "function"
    check(call.function.name, call.function.arguments)


def test_openai_calls_a_tool_in_a_stream(client: openai.OpenAI) -> None:
    names, pieces, ends = [], [], []
    stream = client.chat.completions.create(model=NAME, messages=ASKED, tools=[TOOL], tool_choice=NAMED, max_tokens=TOKENS, stream=True)
    for chunk in stream:
        for choice in chunk.choices:
            ends += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or []:
                names += [call.function.name] if call.function and call.function.name else []
                pieces.append((call.function.arguments if call.function else None) or "")

    check("".join(names), "".join(pieces))
    assert len(ends) == 1


def test_an_agent_goes_on_with_a_tools_result(served: DaemonProcess, client: openai.OpenAI) -> None:
    """With `auto`, as agents ask: the parser reads the answer, in which there may be no call."""
    before = engine_metric(served, PARSED)
    call = {"id": "call-1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    turns = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "sunny"},
    ]
    whole = client.chat.completions.create(model=NAME, messages=turns, tools=[TOOL], tool_choice="auto", max_tokens=24, temperature=0)
    stream = client.chat.completions.create(model=NAME, messages=turns, tools=[TOOL], max_tokens=24, temperature=0, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    assert whole.choices[0].message.content == streamed != ""
    assert engine_metric(served, PARSED) > before


def test_openais_responses_call_a_tool(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **FUNCTION}
    asked: dict[str, Any] = {"model": NAME, "input": QUESTION, "tools": [tool], "max_output_tokens": TOKENS}
    answer = client.responses.create(**asked, tool_choice={"type": "function", "name": "get_weather"})
    (call,) = answer.output
    with client.responses.stream(**asked, tool_choice={"type": "function", "name": "get_weather"}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()

    assert call.type == "function_call"
    check(call.name, call.arguments)
    assert "response.function_call_arguments.done" in kinds
    assert [(one.type, one.name) for one in final.output if one.type == "function_call"] == [("function_call", "get_weather")]


def test_anthropic_calls_a_tool(served: DaemonProcess) -> None:
    import anthropic

    tool: Any = {"name": "get_weather", "description": "The weather of a city now", "input_schema": SCHEMA, "strict": True}
    asked: dict[str, Any] = {"model": "claude-sonnet", "max_tokens": TOKENS, "tools": [tool]}
    must: Any = {"type": "tool", "name": "get_weather"}
    with anthropic.Anthropic(base_url=served.url, api_key="unused", max_retries=0) as client:
        answer = client.messages.create(**asked, messages=ASKED, tool_choice=must)
        with client.messages.stream(**asked, messages=ASKED, tool_choice=must) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_message()
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}
        turns: Any = [*ASKED, {"role": "assistant", "content": [call.model_dump(include={"type", "id", "name", "input"})]}, result]
        said = client.messages.create(**asked, messages=turns)

    check(call.name, call.input)
    assert answer.stop_reason == "tool_use"
    assert {"message_start", "content_block_start", "content_block_delta", "message_stop"} <= kinds
    (again,) = [block for block in streamed.content if block.type == "tool_use"]
    check(again.name, again.input)
    assert said.content and said.stop_reason


@pytest.mark.rest
def test_langchain_binds_and_calls_a_tool(served: DaemonProcess) -> None:
    import openai
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    with openai.DefaultHttpxClient() as http:
        model = ChatOpenAI(
            model=NAME, base_url=f"{served.url}/v1", api_key="unused", max_retries=0, max_completion_tokens=TOKENS, http_client=http
        )
        forced = model.bind_tools([FUNCTION], tool_choice="get_weather", strict=True)
        answer = forced.invoke(QUESTION)
        pieces = list(forced.stream(QUESTION))
        streamed = pieces[0]
        for piece in pieces[1:]:
            streamed = streamed + piece
        (call,) = answer.tool_calls
        said = model.bind_tools([FUNCTION]).invoke([HumanMessage(QUESTION), answer, ToolMessage("sunny", tool_call_id=call["id"])])

    check(call["name"], call["args"])
    (again,) = streamed.tool_calls
    check(again["name"], again["args"])
    assert said.content or said.tool_calls


@pytest.mark.rest
async def test_pydantic_ai_gets_its_output_by_a_tool(served: DaemonProcess) -> None:
    import openai
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    before = engine_metric(served, PARSED)
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as client:
        model = OpenAIChatModel(NAME, provider=OpenAIProvider(openai_client=client))
        agent = Agent(model, output_type=ToolOutput(Weather, name="get_weather", strict=True), model_settings={"max_tokens": TOKENS})
        plain = Agent(model, model_settings={"max_tokens": 24, "temperature": 0})

        @plain.tool_plain
        def get_weather(city: str) -> str:
            return f"sunny in {city}"

        found = await agent.run(QUESTION)
        async with agent.run_stream(QUESTION) as stream:
            streamed = await stream.get_output()
        said = await plain.run(QUESTION)

    assert {found.output.city, streamed.city} <= set(CITIES)
    assert said.output
    assert engine_metric(served, PARSED) > before


@pytest.mark.rest
def test_instructor_gets_its_model_by_a_tool(client: openai.OpenAI) -> None:
    import instructor

    def strictly(*_: Any, **request: Any) -> None:
        request["tools"][0]["function"]["strict"] = True

    wrapped = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    wrapped.on("completion:kwargs", strictly)
    asked: dict[str, Any] = {"model": NAME, "messages": ASKED, "response_model": Weather, "max_retries": 0, "max_tokens": TOKENS}
    found = wrapped.chat.completions.create(**asked)
    pieces = list(wrapped.chat.completions.create_partial(**asked))

    assert found.city in CITIES
    assert pieces[-1].city in CITIES
