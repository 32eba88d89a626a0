"""`sparkd run`: brings a model in if need be, loads it and talks to it, once or in a loop."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from sparkd.admin.client import Client, model_path
from sparkd.checkpoint.model_folder import refuse_unusable
from sparkd.checkpoint.source import source_of
from sparkd.cli.options import argument, option
from sparkd.cli.session import Session, verb
from sparkd.errors import ConfigError, SparkdError
from sparkd.render import models as show

PROMPT = ">>> "
GREETING = "Hello!"
Message = dict[str, str]


def register(app: typer.Typer) -> None:
    app.command("run")(verb(run))


def run(
    session: Session,
    model: Annotated[str, argument(metavar="MODEL", help="A known name, a recipe, a folder, or a hub id (owner/name).")],
    vllm_args: Annotated[list[str] | None, argument(metavar="VLLM_ARGS", help="Flags of vLLM after `--`, as in extra_args.")] = None,
    name: Annotated[str | None, option("--name", metavar="NAME", help="Name for a model that is not known yet.")] = None,
    prompt: Annotated[str | None, option("-p", "--prompt", metavar="TEXT", help="Ask this question, print the answer and exit.")] = None,
) -> None:
    """Load a model, adding it if it is not known, and chat with it.

    With --prompt or text on stdin, prints the answer. On a terminal, starts a chat. Otherwise, prints how to call the model.
    """
    extra = list(vllm_args or [])
    if extra and not extra[0].startswith("-"):
        raise ConfigError(f"{extra[0]!r} is not a flag of vLLM. Put flags after `--`; ask a question with -p.")
    if model.endswith((".yaml", ".yml")):
        from sparkd.recipes.file import refuse_as_model

        refuse_as_model(model)
    settings = {"extra_args": extra} if extra else {}
    meant = session.client.get("/entry", source=source_of(model), model=model, name=name, changes=bool(settings))
    existing = meant.get("known")
    operation = session.client.post(f"{model_path(existing)}/load") if existing else _bring_in(session.client, name, meant, settings)
    operation = session.wait(operation, brought_in=existing is None)
    canonical = str(operation["model"])
    question = prompt
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read().strip()
    if question:
        _answer_once(session, canonical, question, operation)
    elif session.json:
        show.say_json({"model": canonical, "base_url": f"{session.client.base_url}/v1", "operation": operation})
    elif sys.stdin.isatty() and sys.stdout.isatty():
        _chat(session, canonical)
    else:
        print_how_to_call(session, canonical)


def print_how_to_call(session: Session, model: str) -> None:
    session.out.print(f"Base URL  {session.client.base_url}/v1\nModel     {model}\n", markup=False)
    session.out.print(show.curl(session.client.base_url, model, GREETING, session.client.has_key), markup=False, soft_wrap=True)


def _bring_in(client: Client, name: str | None, meant: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    if client.is_here and "model" in meant["spec"]:
        # The engine of the daemon may be another module than vLLM, and need no checkpoint.
        refuse_unusable(meant["spec"]["model"], vllm=False)
    return client.post("/models", {"name": name or meant["name"], "spec": {**meant["spec"], **settings}})


def _answer_once(session: Session, model: str, question: str, operation: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": question}]
    if session.json:
        pieces = list(session.client.answer(model, messages))
        answer, thought = "".join(piece.text for piece in pieces), "".join(piece.thought for piece in pieces)
        show.say_json({"model": model, "answer": answer, "thought": thought, "operation": operation})
    else:
        _stream(session, model, messages)


def _chat(session: Session, model: str) -> None:
    """Ctrl-C cancels the answer, and at the prompt clears the line; /bye or Ctrl-D ends it."""
    import readline  # noqa: F401 - line editing for input()

    session.out.print(f"[bold]{model}[/]  [dim]/bye or Ctrl-D leaves, Ctrl-C stops an answer, /clear forgets the conversation[/]")
    messages: list[Message] = []
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            session.out.print()
            return
        except KeyboardInterrupt:
            session.out.print("  [dim](/bye or Ctrl-D leaves)[/]")
            continue
        if line == "/bye":
            return
        if line == "/clear":
            messages.clear()
        elif line.startswith("/"):
            session.out.print("[dim]/bye leaves, /clear forgets the conversation[/]")
        elif line:
            _turn(session, model, messages, line)


def _turn(session: Session, model: str, messages: list[Message], line: str) -> None:
    """One question and its answer; a question without an answer is forgotten."""
    messages.append({"role": "user", "content": line})
    try:
        answer = _stream(session, model, messages)
    except KeyboardInterrupt:
        session.out.print("\n[dim](stopped)[/]")
        messages.pop()
    except SparkdError as error:
        session.err.print(f"error: {error.message}", style="red", markup=False)
        messages.pop()
    else:
        messages.append({"role": "assistant", "content": answer})


def _stream(session: Session, model: str, messages: list[Message]) -> str:
    """Print an answer as it comes; returns its text. A reasoning model's thoughts are shown dimmed on a terminal, and not in a pipe."""
    terminal, answer, thinking = session.out.is_terminal, "", False
    for piece in session.client.answer(model, messages):
        if terminal and piece.thought:
            session.out.print(show.printable(piece.thought), end="", style="dim", markup=False, soft_wrap=True)
            thinking = True
        if piece.text:
            if thinking:
                session.out.print("\n")
                thinking = False
            answer += piece.text
            session.out.file.write(show.printable(piece.text) if terminal else piece.text)
            session.out.file.flush()
    session.out.file.write("\n")
    return answer
