"""YAML texts, as tables: what they mean here, and where they are wrong."""

from typing import Any

import pytest

from sparkd.schema.yaml_file import ConfigProblem, Items, Location, Table, masked, parse


def problems(text: str | bytes, **environ: str) -> list[str]:
    document = parse(text if isinstance(text, bytes) else text.encode(), "f.yaml", environ)
    return [str(problem) for problem in document.problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0x1F", 31),
        ("017", 17),
        ("1e3", 1000.0),
        ("true", True),
        ("", None),
        ("no", "no"),
        ("2026-11-21", "2026-11-21"),
        ('"\\ud83d\\ude00"', "\U0001f600"),
        ("12345678901234567890", 12345678901234567890.0),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    document = parse(f"a: {text}".encode(), "f.yaml", {})

    assert document.problems == []
    assert document.table == {"a": value}
    assert type(document.table["a"]) is type(value) or isinstance(value, list | dict)


def test_every_value_knows_its_line() -> None:
    table = parse(b"# c\na:\n  b: [x,\n   y]\n7: z\n", "f.yaml", {}).table

    assert isinstance(table["a"], Table)
    assert isinstance(table["a"]["b"], Items)
    assert table.places == {"a": Location("f.yaml", 2), "7": Location("f.yaml", 5)}
    assert table["a"].places == {"b": Location("f.yaml", 3)}
    assert table["a"]["b"].places == [Location("f.yaml", 3), Location("f.yaml", 4)]


def test_anchors_and_merges() -> None:
    table = parse(b"x: &x {p: 1, q: 2}\ny: {<<: *x, q: 3}\nz:\n  <<: [*x, {p: 9, r: 1}]\n", "f.yaml", {}).table

    assert table["y"] == {"q": 3, "p": 1}
    assert table["z"] == {"p": 1, "q": 2, "r": 1}
    assert table["y"].places["p"].line == 1


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: b\n---\nc: d", 2, "another document"),
        ("a: 1\nb: !!python/object/apply:os.system [x]", 2, "tags"),
        ("a: &a [*a]", 1, "nested"),
        ("a: " + "[" * 5000, 1, "nested"),
        ("%YAML " + "9" * 5000 + ".1\n---\na: 1", None, "range"),
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


def test_environment_variables_are_filled_in_and_remembered() -> None:
    document = parse(b"a: x${env.ONE}y${env.TWO}\nb: ${PORT} $HOME\nc: ['${env.ONE}']\nd: 1", "f.yaml", {"ONE": "${env.TWO}", "TWO": "2"})

    assert document.table == {"a": "x${env.TWO}y2", "b": "${PORT} $HOME", "c": ["${env.TWO}"], "d": 1}
    assert document.env_names == {"ONE", "TWO"}
    assert [document.table.places[key].secret for key in "abd"] == [True, False, False]
    assert document.table["c"].places[0].secret


def test_malformed_text_is_not_repeated() -> None:
    assert "canary" not in str(problems("keys: {inference: [*sk-canary]}"))
    assert "canary" not in str(problems("keys: {inference: 'sk-canary' 'x'}"))


def test_a_value_that_is_cut_short_twice_is_hidden_twice() -> None:
    value = "Canary-4f1c9e77d2" * 8
    quoted = f"{value[:20]}... is no recipe, and {value[:64]!r} no registry"

    (hidden,) = masked([ConfigProblem("f", 1, quoted)], ["S"], {"S": value})

    assert hidden.message == "${env.S} is no recipe, and '${env.S}' no registry"
