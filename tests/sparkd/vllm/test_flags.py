"""vLLM's command line: read in one pass, and written again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from sparkd.recipes.admin_flags import refuse_flags
from sparkd.vllm.flags import Value, amount, flags_in, parsed, value_of, without, words
from sparkd.vllm.reserved_args import owned_args


@pytest.mark.parametrize(
    ("args", "flags"),
    [
        (["--max-num-seqs", "8", "--max_num_seqs=9"], {"max-num-seqs": "9"}),
        (["--enforce-eager", "--no-enable_prefix-caching"], {"enforce-eager": True, "enable-prefix-caching": False}),
        (["--enforce-eager", "--no-enforce-eager"], {"enforce-eager": False}),
        (["--seed", "-1", "--hf-overrides", '{"a": "--b"}'], {"seed": "-1", "hf-overrides": '{"a": "--b"}'}),
        (["--cudagraph-capture-sizes", "1", "2"], {"cudagraph-capture-sizes": ("1", "2")}),
        (["--middleware", "a", "--middleware=b"], {"middleware": ("a", "b")}),
        (["--chat-template=-x", "--response-role="], {"chat-template": "-x", "response-role": ""}),
        (["-sc", "{}", "--a.b", "1", "--", "c"], {}),
    ],
)
def test_flags_are_read_and_written(args: list[str], flags: dict[str, Value]) -> None:
    assert parsed(args) == flags
    assert parsed(words(flags)) == flags


def test_a_flag_is_taken_out_with_its_values() -> None:
    args = ["--seed", "1", "--moe_backend=x", "--enforce-eager", "--cudagraph-capture-sizes", "1", "2"]

    assert without(args, "moe-backend", "cudagraph-capture-sizes") == ["--seed", "1", "--enforce-eager"]
    assert (value_of(args, "moe-backend"), value_of(args, "enforce-eager"), value_of(args, "none")) == ("x", None, None)


@pytest.mark.parametrize(("text", "number"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1.5K", None), ("x", None)])
def test_numbers_are_read_as_vllm_reads_them(text: str, number: int | None) -> None:
    assert amount(text) == number


class Counted(list[str]):
    """Arguments that count how many of them were read."""

    count = 0

    def __getitem__(self, index: object) -> object:  # type: ignore[override]
        found = super().__getitem__(index)  # type: ignore[index]
        self.count += len(found) if isinstance(found, list) else 1
        return found

    def __iter__(self) -> Iterator[str]:
        for arg in super().__iter__():
            self.count += 1
            yield arg


@pytest.mark.parametrize("walk", [flags_in, owned_args, refuse_flags, parsed])
def test_twice_as_many_arguments_are_twice_the_work(walk: Callable[[Sequence[str]], object]) -> None:
    """Arguments come from an added model too, and are judged on the event loop."""
    few, many = Counted(["--seed", "1"] * 100), Counted(["--seed", "1"] * 200)
    for args in (few, many):
        found = walk(args)
        if isinstance(found, Iterator):
            list(found)
    assert 0 < many.count <= 2 * few.count + 1
