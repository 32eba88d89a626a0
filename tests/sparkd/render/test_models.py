"""A program reads what sparkd prints as JSON."""

from __future__ import annotations

import json

import pytest

from sparkd.render.models import say_json_line


def test_a_line_of_json_has_no_character_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"message": "an engine wrote \x1b[2J \x9b31m \u202e"}
    say_json_line(event)

    out = capsys.readouterr().out
    assert out.isascii() and out.removesuffix("\n").isprintable()
    assert json.loads(out) == event
