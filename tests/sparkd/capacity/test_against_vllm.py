"""The command of each rank of a plan is one that vLLM's own parser takes, and means what the plan says."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from sparkd.hardware import SPARK, Hardware
from tests.support.checkpoints import mixture
from tests.support.inventories import known
from tests.support.plans import entry_for, planned
from tests.support.published_tensors import tensors_of


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Strict(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    made: argparse.ArgumentParser = make_arg_parser(Strict())
    return made


def parsed_by(parser: argparse.ArgumentParser, arguments: list[str]) -> Any:
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("hardware", "asked"),
    [
        (SPARK, {}),
        (SPARK, {"nodes": 2, "requests": 4, "quantize": "nvfp4", "margin_gib": 2}),
        (SPARK, {"max_model_len": 4096, "max_num_seqs": 8}),
        (SPARK, {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 2048, "speculative": "ngram"}),
        (replace(SPARK, name="desk", memory_bytes=64 << 30, platform="cpu"), {"quantize": "mxfp4"}),
    ],
)
def test_every_rank_has_a_command_that_vllm_parses(hardware: Hardware, asked: dict[str, Any], parser: argparse.ArgumentParser) -> None:
    config, entry = mixture(), entry_for("/m")
    entry = replace(entry, spec=entry.spec.model_copy(update={"tensor_parallel": asked.get("nodes", "auto")}))
    choice = json.loads(json.dumps(planned(entry, hardware, known(config, tensors_of(config)).checkpoint, **asked)))["choice"]

    assert len(choice["ranks"]) == choice["nodes"]
    for number, rank in enumerate(choice["ranks"]):
        _, safe_path, dash_m, module, *arguments = rank["command"]
        assert (safe_path, dash_m, module) == ("-P", "-m", "workers.vllm.headless" if number else "vllm.entrypoints.openai.api_server")
        parsed = parsed_by(parser, arguments)
        assert (parsed.model, parsed.max_model_len) == ("/m", choice["max_model_len"])
        assert parsed.max_num_seqs == asked.get("max_num_seqs", asked.get("requests"))
        assert parsed.max_num_batched_tokens == asked.get("max_num_batched_tokens")
        assert (parsed.tensor_parallel_size, parsed.pipeline_parallel_size) == (choice["tensor_parallel"], choice["pipeline_parallel"])
        assert (parsed.nnodes, parsed.node_rank) == (choice["nodes"], number) and parsed.headless == (number > 0)
        assert parsed.kv_cache_dtype == asked.get("kv_cache_dtype", "auto")
        assert parsed.enforce_eager == (hardware.platform == "cpu")
        assert parsed.worker_cls.startswith("workers.kv.Spark") and (parsed.load_format == "spark_stream") == ("quantize" in asked)
