"""Flags and variables that vLLM dropped: what is translated, what is refused, and that the tables are true of a real release."""

from __future__ import annotations

import json
import re
from importlib import util
from pathlib import Path

import pytest

from sparkd.recipes.dropped_settings import FLAGS, VARIABLES, Settings, translated
from sparkd.vllm.arg_check import FLAGS_FILE
from sparkd.vllm.flags import json_object, words


def said(args: str = "", env: dict[str, str] | None = None) -> Settings:
    return translated(args.split(), env or {})


@pytest.mark.parametrize(
    ("env", "args", "becomes"),
    [
        ({"VLLM_NVFP4_GEMM_BACKEND": "flashinfer-cutlass"}, "", "--linear-backend flashinfer_cutlass"),
        ({"VLLM_USE_FLASHINFER_MOE_FP4": "1", "VLLM_FLASHINFER_MOE_BACKEND": "throughput"}, "", "--moe-backend flashinfer_cutlass"),
        ({"VLLM_ATTENTION_BACKEND": "TRITON_ATTN_VLLM_V1"}, "", "--attention-backend triton_attn"),
        ({"VLLM_TEST_FORCE_FP8_MARLIN": "1"}, "--moe-backend triton", "--moe-backend triton --linear-backend marlin"),
        ({}, "--mxfp4_backend=marlin --seed 1", "--seed 1 --moe-backend marlin"),
    ],
)  # fmt: skip
def test_what_a_release_dropped_is_said_as_it_says_it_now(env: dict[str, str], args: str, becomes: str) -> None:
    found = said(args, env)

    assert words(found.flags) == becomes.split()
    assert found.env == {} and found.refused == []
    assert len(found.notes) >= max(1, len(env))


@pytest.mark.parametrize(
    ("env", "args", "words"),
    [
        ({"VLLM_ATTENTION_BACKEND": "XFORMERS"}, "", "--attention-backend in extra_args"),
        ({"VLLM_NVFP4_GEMM_BACKEND": "sk-canary"}, "", "--linear-backend"),
        ({}, "--mxfp4-layers moe", "'quantize:'"),
    ],
)
def test_what_has_no_match_is_refused_with_the_reason_and_without_its_value(env: dict[str, str], args: str, words: str) -> None:
    (reason,) = said(args, env).refused

    assert words in reason and "canary" not in reason
    assert reason.startswith(tuple(env) or args.split(maxsplit=1)[0]) and reason.endswith(".")


def test_what_needs_no_other_words_is_left_as_it_is() -> None:
    found = said("--max_num_seqs=8 --speculative-config=nonsense", {"OMP_NUM_THREADS": "4"})

    assert found == Settings({"max-num-seqs": "8", "speculative-config": "nonsense"}, {"OMP_NUM_THREADS": "4"})


def test_the_backend_of_a_drafts_experts_moves_into_its_configuration() -> None:
    config = {"method": "mtp", "num_speculative_tokens": 3}
    found = translated(["--speculative-config", json.dumps(config)], {"VLLM_USE_FLASHINFER_MOE_FP16": "0"})

    assert json_object(str(found.flags["speculative-config"])) == config | {"moe_backend": "triton"}
    assert found.env == {} and len(found.notes) == 1


# The tables, against a real release.


def flags_of_the_release() -> set[str]:
    lines = [line.split()[1:] for line in FLAGS_FILE.read_text().splitlines() if not line.startswith("#")]
    return {spelling.removeprefix("--") for spellings in lines for spelling in spellings}


def test_a_row_names_a_way_out() -> None:
    known, rows = flags_of_the_release(), [*VARIABLES, *FLAGS]
    assert len(rows) >= 9
    for row in rows:
        named = {name for flags in row.becomes.values() for name in flags}
        assert row.cure, row.name
        assert named <= known, row.name
        assert {*re.findall(r"--([a-z][a-z0-9-]+)", row.cure)} <= known, row.name
        assert row in VARIABLES or row.name not in known


def test_no_variable_of_the_tables_is_read_by_the_installed_release() -> None:
    """Their names do not stand in its envs.py, which is read and not imported."""
    found = util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.fail("the tests need vLLM beside them")
    text = (Path(found.origin).parent / "envs.py").read_text()

    assert [row.name for row in VARIABLES if f'"{row.name}"' in text] == []
