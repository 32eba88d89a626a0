"""The bodies a stub engine answers with, shaped as vLLM's. Never does I/O and never looks at a clock except for `created`.

Shapes: vLLM 0.32 `entrypoints/*/protocol.py`. Every streamed chunk carries two members no engine sends: `seq` (0, 1, 2 …) and `ns`
(CLOCK_MONOTONIC when it was built, nanoseconds), so that a client on the same host can measure order and latency.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from typing import Any

# One token each; an answer of n tokens repeats them.
TOKENS = ("The", " capital", " of", " France", " is", " Paris", ".")
_TOKENS = tuple(json.dumps(token)[1:-1].encode() for token in TOKENS)
# Ends with the brace, so that a number cut in two by a read does not match.
STAMP = re.compile(rb'"seq":(\d+),"ns":(\d+)\}')
DONE = b"data: [DONE]\n\n"
MAX_MODEL_LEN = 4096
_STAMP_PLACE = "@stamp@"
_ID_PLACE = "@id@"
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def text(tokens: int) -> str:
    """The answer of `tokens` tokens; a stream's deltas concatenate to the same."""
    whole, rest = divmod(tokens, len(TOKENS))
    return " ".join(["".join(TOKENS)] * whole + (["".join(TOKENS[:rest])] if rest else []))


def token(position: int) -> bytes:
    """JSON-escaped text of one token."""
    if position and position % len(TOKENS) == 0:
        return b" " + _TOKENS[0]
    return _TOKENS[position % len(TOKENS)]


def error(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    """vLLM's ErrorResponse."""
    return dump({"error": {"message": message, "type": kind, "param": param, "code": status}})


def dump(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


def usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + tokens, "completion_tokens": tokens}


class Stream:
    """One streamed answer: `head`, then `chunk(seq, ns)` once per token, then `tail`. All are whole SSE events.

    `number` is the Responses API's sequence_number of the first chunk.
    """

    __slots__ = ("_after", "_before", "_number", "head", "tail")

    def __init__(self, head: bytes, before: bytes, after: bytes, tail: bytes, number: int | None = None) -> None:
        self.head = head
        self.tail = tail
        self._before = before
        self._after = after
        self._number = number

    def chunk(self, seq: int, ns: int) -> bytes:
        if self._number is not None:
            after = b'%s"sequence_number":%d,' % (self._after, self._number + seq)
            return b'%s%s%s"seq":%d,"ns":%d}\n\n' % (self._before, token(seq), after, seq, ns)
        return b'%s%s%s"seq":%d,"ns":%d}\n\n' % (self._before, token(seq), self._after, seq, ns)


def chat_stream(model: str, prompt_tokens: int, tokens: int, reason: str, *, with_usage: bool) -> Stream:
    parts = _chat_parts(model, prompt_tokens, tokens, reason, int(time.time()), with_usage)
    place, name = _ID_PLACE.encode(), _unique().encode()
    head, before, after, tail = (part.replace(place, name) for part in parts)
    return Stream(head, before, after, tail)


def completion_stream(model: str, prompt_tokens: int, tokens: int, reason: str, *, with_usage: bool) -> Stream:
    base = {"id": f"cmpl-{_unique()}", "object": "text_completion", "created": int(time.time()), "model": model}

    def choice(content: str, finish: str | None) -> list[dict[str, Any]]:
        return [{"index": 0, "text": content, "logprobs": None, "finish_reason": finish, "stop_reason": None}]

    before, after = _around({**base, "choices": choice(_STAMP_PLACE, None)})
    tail = _event({**base, "choices": choice("", reason)})
    if with_usage:
        tail += _event({**base, "choices": [], "usage": usage(prompt_tokens, tokens)})
    return Stream(b"", before, after, tail + DONE)


def speech_stream(kind: str, model: str) -> Stream:
    """`kind` is transcription or translation."""
    base = {"id": f"{kind[:4]}-{_unique()}", "object": f"{kind}.chunk", "created": int(time.time()), "model": model}
    before, after = _around({**base, "choices": [{"delta": {"content": _STAMP_PLACE}, "finish_reason": None}]})
    return Stream(b"", before, after, _event({**base, "choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}) + DONE)


def message_stream(model: str, prompt_tokens: int, tokens: int, reason: str) -> Stream:
    """The Anthropic event order: message_start, content_block_*, message_delta, message_stop."""
    start = _message(model, prompt_tokens, 0, reason)
    start.update(content=[], stop_reason=None)
    head = _typed({"type": "message_start", "message": start})
    head += _typed({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": _STAMP_PLACE}}
    before, after = _around(delta, typed=True)
    tail = _typed({"type": "content_block_stop", "index": 0})
    stop = {"stop_reason": _stop_reason(reason), "stop_sequence": None}
    tail += _typed({"type": "message_delta", "delta": stop, "usage": {"input_tokens": prompt_tokens, "output_tokens": tokens}})
    return Stream(head, before, after, tail + _typed({"type": "message_stop"}))


def response_stream(final: dict[str, Any], tokens: int) -> Stream:
    """The Responses event order; `final` is the finished response object."""
    item, answer = final["output"][0], final["output"][0]["content"][0]
    begun = {**final, "status": "in_progress", "output": [], "usage": None}
    place = {"item_id": item["id"], "output_index": 0}
    empty = {**answer, "text": ""}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "status": "in_progress", "content": []}},
        {"type": "response.content_part.added", **place, "content_index": 0, "part": empty},
    ]
    head = b"".join(_typed({**event, "sequence_number": number}) for number, event in enumerate(events))
    delta = {"type": "response.output_text.delta", **place, "content_index": 0, "logprobs": []}
    before, after = _around({**delta, "delta": _STAMP_PLACE}, typed=True)
    events = [
        {"type": "response.output_text.done", **place, "content_index": 0, "logprobs": [], "text": answer["text"]},
        {"type": "response.content_part.done", **place, "content_index": 0, "part": answer},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": final},
    ]
    tail = b"".join(_typed({**event, "sequence_number": number}) for number, event in enumerate(events, start=4 + tokens))
    return Stream(head, before, after, tail, number=4)


def chat(model: str, prompt_tokens: int, tokens: int, reason: str) -> bytes:
    return _chat_body(model, prompt_tokens, tokens, reason, int(time.time())).replace(_ID_PLACE.encode(), _unique().encode())


def completion(model: str, prompt_tokens: int, tokens: int, reason: str) -> bytes:
    choice = {"index": 0, "text": text(tokens), "logprobs": None, "finish_reason": reason, "stop_reason": None}
    base = {"id": f"cmpl-{_unique()}", "object": "text_completion", "created": int(time.time()), "model": model}
    return dump({**base, "choices": [choice], "usage": usage(prompt_tokens, tokens)})


def scored_completion(body: dict[str, Any], model: str, tokens: int, reason: str) -> bytes:
    """A completion with token ids, one choice for each prompt, and log-probabilities of the prompt where they are asked for.

    A prompt has a token for each word, with the id of its place; the most likely ids follow it, each half as likely as the one before.
    """
    prompt, wide = body.get("prompt") or "", body.get("prompt_logprobs")
    texts = prompt if isinstance(prompt, list) else [prompt]
    choices = []
    for index, one in enumerate(texts):
        ids = list(range(len(one.split())))
        likely = [None, *({id_ + n: {"logprob": -0.7 * (n + 1), "rank": n + 1} for n in range(wide)} for id_ in ids[1:])] if wide else None
        choice = {"index": index, "text": text(tokens), "logprobs": None, "finish_reason": reason, "stop_reason": None}
        choices.append(choice | {"token_ids": list(range(tokens)), "prompt_logprobs": likely, "prompt_token_ids": ids})
    base = {"id": f"cmpl-{_unique()}", "object": "text_completion", "created": int(time.time()), "model": model}
    return dump({**base, "choices": choices, "usage": usage(sum(len(one.split()) for one in texts), tokens * len(texts))})


def message(model: str, prompt_tokens: int, tokens: int, reason: str) -> bytes:
    return dump(_message(model, prompt_tokens, tokens, reason))


def _message(model: str, prompt_tokens: int, tokens: int, reason: str) -> dict[str, Any]:
    return {
        "id": f"msg_{_unique()}",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": text(tokens)}],
        "model": model,
        "stop_reason": _stop_reason(reason),
        "stop_sequence": None,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": tokens},
    }


def response(model: str, prompt_tokens: int, tokens: int, *, status: str, background: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"type": "output_text", "text": text(tokens), "annotations": [], "logprobs": None}
    item = {"id": f"msg_{_unique()}", "type": "message", "role": "assistant", "status": "completed", "content": [content]}
    counts = {"input_tokens": prompt_tokens, "output_tokens": tokens, "total_tokens": prompt_tokens + tokens}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": f"resp_{_unique()}",
        "created_at": int(time.time()),
        "model": model,
        "object": "response",
        "output": [item],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "background": background,
        "max_output_tokens": MAX_MODEL_LEN,
        "service_tier": "auto",
        "status": status,
        "truncation": "disabled",
        "usage": {**counts, **details},
    }


# The two bodies that load tests ask for by the thousand: built once a second, then only their id changes.


@functools.lru_cache(maxsize=64)
def _chat_body(model: str, prompt_tokens: int, tokens: int, reason: str, created: int) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": text(tokens), "refusal": None, "tool_calls": [], "reasoning": None}
    return dump(
        {
            "id": f"chatcmpl-{_ID_PLACE}",
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": None}],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {**usage(prompt_tokens, tokens), "prompt_tokens_details": None},
            "prompt_logprobs": None,
        }
    )


@functools.lru_cache(maxsize=64)
def _chat_parts(
    model: str, prompt_tokens: int, tokens: int, reason: str, created: int, with_usage: bool
) -> tuple[bytes, bytes, bytes, bytes]:
    """A Stream's head, before, after and tail."""
    base = {"id": f"chatcmpl-{_ID_PLACE}", "object": "chat.completion.chunk", "created": created, "model": model}

    def choice(delta: dict[str, str], finish: str | None) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]

    head = _event({**base, "choices": choice({"role": "assistant", "content": ""}, None)})
    before, after = _around({**base, "choices": choice({"content": _STAMP_PLACE}, None)})
    tail = _event({**base, "choices": choice({}, reason)})
    if with_usage:
        tail += _event({**base, "choices": [], "usage": usage(prompt_tokens, tokens)})
    return head, before, after, tail + DONE


def _unique() -> str:
    return os.urandom(8).hex()


def _stop_reason(reason: str) -> str:
    return "max_tokens" if reason == "length" else "end_turn"


def _event(value: Any) -> bytes:
    return b"data: " + dump(value) + b"\n\n"


def _typed(value: dict[str, Any]) -> bytes:
    return b"event: " + value["type"].encode() + b"\n" + _event(value)


def _around(value: dict[str, Any], *, typed: bool = False) -> tuple[bytes, bytes]:
    """The bytes of an event before and after the token's place, the closing brace left to the stamp."""
    before, after = (_typed if typed else _event)(value).split(_STAMP_PLACE.encode())
    return before, after.removesuffix(b"}\n\n") + b","
