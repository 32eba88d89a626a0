"""Which flags change the account of a model, in every spelling."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.uncounted import _FLAGS, switched, uncounted

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
