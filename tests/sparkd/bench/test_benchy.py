"""llama-benchy's command, its progress events, and the text that it reads."""

from __future__ import annotations

from pathlib import Path

from sparkd.bench import benchy
from sparkd.bench.profile import Arguments
from sparkd.bench.result import Cell

CELL = Cell(depth=16, concurrency=2, prompt_tokens=8, output_tokens=4)
TARGET = benchy.BenchTarget("http://127.0.0.1:1/v1", "m", "/m", "/usr/bin/python3", key="sk-canary-0123456789")


def test_the_command_has_the_cell_and_no_key(tmp_path: Path) -> None:
    command = benchy.command(TARGET, CELL, Arguments(runs=2, exact_tg=True, prefix_caching=False), tmp_path / "r")
    words = " ".join(command)
    assert "--pp 8 --tg 4 --depth 16 --concurrency 2 --runs 2" in words and "--exact-tg" in command
    assert "--enable-prefix-caching" not in command and "canary" not in words and "canary" not in repr(TARGET)


def event(kind: str, number: int, at_s: float, **fields: object) -> dict[str, object]:
    return {"type": kind, "request_id": number, "ts": at_s, **fields}


def test_phases_of_requests_that_overlap() -> None:
    requests = benchy.MeasuredRequests()
    assert requests.take(event("request_start", 0, 10.0, run_index=1))
    assert not requests.take(event("request_start", 1, 10.5, run_index=1))
    for number, first_s, end_s in ((0, 12.0, 20.0), (1, 14.0, 18.0)):
        requests.take(event("request_first_token", number, first_s))
        requests.take(event("request_end", number, end_s, total_tokens=4, prompt_tokens=24, error=""))
    assert (requests.span(), requests.prompts(), requests.running()) == ((10.0, 20.0), [(10.0, 14.0)], [(10.0, 20.0)])
    assert (requests.output_tokens, requests.prompt_tokens, requests.run, requests.errors) == (8, 48, 1, [])


def test_a_prompt_in_the_midst_of_an_answer_is_a_time_of_its_own() -> None:
    requests = benchy.MeasuredRequests()
    for number, begin_s, first_s, end_s in ((0, 0.0, 1.0, 10.0), (1, 4.0, 5.0, 8.0)):
        requests.take(event("request_start", number, begin_s))
        requests.take(event("request_first_token", number, first_s))
        requests.take(event("request_end", number, end_s, error="it broke" if number else ""))
    assert (requests.prompts(), requests.running()) == ([(0.0, 1.0), (4.0, 5.0)], [(0.0, 10.0)])
    assert requests.errors == ["it broke"]


def test_the_text_is_the_same_each_time_and_no_part_comes_twice() -> None:
    text = benchy.made_up()
    assert text == benchy.made_up() and len(text.split()) == benchy.WORDS
    parts = [text[at : at + 200] for at in range(0, len(text) - 200, 200)]
    assert len(set(parts)) == len(parts)
