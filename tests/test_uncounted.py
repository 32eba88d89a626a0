"""Which flags change the account of a model, in every spelling."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparkd.model_config import ModelConfig
from sparkd.uncounted import _FLAGS, reserved_whole, switched, uncounted

FLAGS = Path(__file__).parent / "fixtures" / "vllm-flags-0.32.0.txt"
# Of releases before 0.32.
GONE = {"task", "swap-space"}
# sparkd refuses it everywhere (sparkd.vllm_args), and it begins --config-format.
REFUSED = {"config"}


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--block-size", "32"], ["--block-size"]),
        (["--block_size=32"], ["--block_size"]),
        (["--block", "32"], ["--block"]),
        (["--no-enforce-eager"], ["--no-enforce-eager"]),
        (["--hf-overrides.rope_theta", "1"], ["--hf-overrides.rope_theta"]),
        (["-q", "fp8"], ["-q"]),
        (["-qfp8"], ["-q"]),
        (["-O3"], ["-O"]),
        (["-dcp", "2", "-ep"], ["-dcp", "-ep"]),
        (["-sc", "{}"], ["-sc"]),
        (["--speculative-config.method", "ngram"], ["--speculative-config.method"]),
        (["--speculative_config", "{}"], []),
        (["-ac.backend", "x", "--seed", "-1", "--moe-backend=marlin", "--max-cudagraph-capture-size", "8"], []),
    ],
)
def test_what_changes_the_account_is_named(args: list[str], told: list[str]) -> None:
    assert list(uncounted(args)) == told


@pytest.mark.parametrize(
    ("args", "memory_gib", "told"),
    [
        (
            ["--max-num-seq", "4", "--block-size=32"],
            "auto",
            "--max-num-seq and --block-size in .*Better use max_num_seqs of the",
        ),
        (["--block-size", "32"], "auto", "Better set memory_gib to what it really needs"),
        (["--block-size", "32"], 4, None),
        (["--seed", "1"], "auto", None),
    ],
)
def test_check_says_what_has_a_whole_machine_reserved(args: list[str], memory_gib: object, told: str | None) -> None:
    found = list(reserved_whole(args, memory_gib, ModelConfig.model_fields))
    assert len(found) == (told is not None)
    assert told is None or re.search(told, found[0])


def test_no_flag_of_the_release_is_taken_for_the_beginning_of_another() -> None:
    spelled = {word for line in FLAGS.read_text().splitlines() if line[:1] != "#" for word in line.split()[1:] if word[:2] == "--"}
    plain = {word[2:].removeprefix("no-") for word in spelled}
    assert {flag for flag in plain if any(uncounted([f"--{flag}"]))} - REFUSED == _FLAGS - GONE
    assert plain >= _FLAGS - GONE


def test_the_last_switch_counts() -> None:
    name = "enable-prefix-caching"
    assert switched(["--moe-backend", "marlin"], name) is None
    assert switched(["--enable_prefix_caching"], name) is True
    assert switched([f"--{name}", f"--no-{name}"], name) is False
