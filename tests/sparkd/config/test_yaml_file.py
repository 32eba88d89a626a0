"""YAML texts, as tables: what they mean here, and where they are wrong."""

from typing import Any

import pytest

from sparkd.config.yaml_file import Location, parse


def problems(text: str | bytes, **environ: str) -> list[str]:
    document = parse(text if isinstance(text, bytes) else text.encode(), "f.yaml", environ)
    return [str(problem) for problem in document.problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("017", 17),
        ("1e3", 1000.0),
        ("true", True),
        ("", None),
        ("no", "no"),
        ("2026-11-21", "2026-11-21"),
        ("12345678901234567890", 12345678901234567890.0),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    document = parse(f"a: {text}".encode(), "f.yaml", {})

    assert document.problems == []
    assert document.values == {"a": value}
    assert type(document.values["a"]) is type(value)


def test_every_value_knows_its_line() -> None:
    document = parse(b"# c\na:\n  b: [x,\n   y]\n7: z\n", "f.yaml", {})

    assert document.values == {"a": {"b": ["x", "y"]}, "7": "z"}
    lines = {("a",): 2, ("a", "b"): 3, ("a", "b", 0): 3, ("a", "b", 1): 4, ("7",): 5}
    assert {path: document.place(path) for path in lines} == {path: Location("f.yaml", line) for path, line in lines.items()}
    assert document.place(("a", "b", 1, "x", 2)).line == 4


def test_anchors_and_merges() -> None:
    document = parse(b"x: &x {p: 1, q: 2}\ny: &y {<<: *x, q: 3}\nz:\n  <<: [*x, {p: 9, r: 1}]\nw: *y\n", "f.yaml", {})

    assert document.problems == []
    assert document.values["y"] == document.values["w"] == {"q": 3, "p": 1}
    assert document.values["z"] == {"p": 1, "q": 2, "r": 1}
    assert document.place(("y", "p")).line == 1


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: b\n---\nc: d", 2, "another document"),
        ("a: 1\nb: !!python/object/apply:os.system [x]", 2, "tags"),
        ("a: &a [*a]", 1, "nested"),
        ("a: " + "[" * 5000, 1, "nested"),
        ("a: " + "{a: 1, b: " * 5000, 1, "nested"),
        ("%YAML " + "9" * 5000 + ".1\n---\na: 1", None, "malformed"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_wrong_and_where(text: str | bytes, line: int | None, words: str) -> None:
    (problem,) = parse(text if isinstance(text, bytes) else text.encode(), "f.yaml", {}).problems

    assert words in problem.message
    assert (problem.file, problem.line) == ("f.yaml", line)


def test_aliases_are_counted_when_they_are_used() -> None:
    laughs = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))

    (problem,) = problems(laughs)
    assert "20000" in problem
    merges = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12))
    assert problems(merges) == []


def test_environment_variables_are_filled_in_and_remembered() -> None:
    document = parse(b"a: x${env.ONE}y${env.TWO}\nb: ${PORT} $HOME\nc: ['${env.ONE}']\nd: 1", "f.yaml", {"ONE": "${env.TWO}", "TWO": "2"})

    assert document.values == {"a": "x${env.TWO}y2", "b": "${PORT} $HOME", "c": ["${env.TWO}"], "d": 1}
    assert document.env_names == {"ONE", "TWO"}
    assert [document.place((key,)).secret for key in "abd"] == [True, False, False]
    assert document.place(("c", 0)).secret


def test_malformed_text_is_not_repeated() -> None:
    assert "canary" not in str(problems("keys: {inference: [*sk-canary]}"))
    assert "canary" not in str(problems("keys: {inference: 'sk-canary' 'x'}"))
