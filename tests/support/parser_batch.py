"""Owns how tests ask vLLM's parser many questions in one child, because each child imports vLLM, or none at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from sparkd.vllm.ask import parser as parser_answers


def ask_at_once(checks: Callable[[], object]) -> None:
    """Run `checks` without an answer, and then ask the parser all that they asked. This process keeps the answers."""
    lines: dict[Path | None, list[Sequence[str]]] = {}

    def note(asked: Sequence[Sequence[str]], runtime: Path | None, *_: object, **__: object) -> list[None]:
        lines.setdefault(runtime, []).extend(asked)
        return [None for _ in asked]

    with patch.object(parser_answers, "answers", note):
        checks()
    for runtime, asked in lines.items():
        parser_answers.answers(asked, runtime, [], ask=True)


def refuse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer every question at once, as a parser that takes all arguments."""
    monkeypatch.setattr(parser_answers, "answers", lambda lines, *_, **__: [()] * len(lines))
