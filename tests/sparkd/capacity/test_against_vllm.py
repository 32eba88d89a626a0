"""The command of each rank of a plan is one that vLLM's own parser takes, and means what the plan says."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from sparkd.capacity.fit import FitRequest, choose
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.plan_report import to_json
from sparkd.capacity.speculative import Drafting
from sparkd.hardware import Hardware, hardware_of
from tests.support.checkpoints import mixture
from tests.support.inventories import known
from tests.support.published_tensors import tensors_of
from workers.quantization.recipe import QuantizationRecipe


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
    ("hardware", "wish"),
    [
        ("spark", FitRequest()),
        ("spark", FitRequest(nodes=2, requests=4, quantize=QuantizationRecipe.parse("nvfp4"), margin_bytes=2 << 30)),
        ("spark", FitRequest(nodes=2, max_model_len=4096, eager=True, unlinked={2: "no cable"})),
        (
            "spark",
            FitRequest(
                serving=Serving(0, kv_dtype="fp8", max_num_batched_tokens=2048),
                drafting=Drafting("ngram", 4, args=("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')),
            ),
        ),
        ("cpu", FitRequest(quantize=QuantizationRecipe.parse("mxfp4"), serving=Serving(0, platform="cpu"))),
    ],
)
def test_every_rank_has_a_command_that_vllm_parses(hardware: str, wish: FitRequest, parser: argparse.ArgumentParser) -> None:
    spark: Hardware = hardware_of("spark")
    machine = replace(spark, name="desk", memory_bytes=64 << 30, platform="cpu") if hardware == "cpu" else spark
    inventory = known(config := mixture(), tensors_of(config))
    choice = json.loads(json.dumps(to_json("/m", inventory, machine, wish, choose(inventory, machine, wish))))["choice"]

    assert len(choice["ranks"]) == choice["nodes"]
    for number, rank in enumerate(choice["ranks"]):
        _, safe_path, dash_m, module, *arguments = rank["command"]
        assert (safe_path, dash_m, module) == ("-P", "-m", "vllm.entrypoints.openai.api_server")
        parsed = parsed_by(parser, arguments)
        assert (parsed.model, parsed.max_model_len, parsed.max_num_seqs) == ("/m", choice["max_model_len"], Serving(0).max_num_seqs)
        assert parsed.max_num_batched_tokens == wish.serving.max_num_batched_tokens
        assert (parsed.tensor_parallel_size, parsed.pipeline_parallel_size) == (choice["tensor_parallel"], choice["pipeline_parallel"])
        assert (parsed.nnodes, parsed.node_rank) == (choice["nodes"], number) and parsed.headless == (number > 0)
        assert parsed.kv_cache_dtype == wish.serving.kv_dtype and parsed.enforce_eager == (wish.eager or hardware == "cpu")
        assert parsed.worker_cls.startswith("workers.kv.Spark") and (parsed.load_format == "spark_stream") == (wish.quantize is not None)
