"""A program that prints the metrics page of the installed vLLM for a model that drafts, without loading it. Argument: its folder."""

from __future__ import annotations

import sys

from prometheus_client import REGISTRY, generate_latest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.metrics.loggers import PrometheusStatLogger

DRAFT = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


def main() -> None:
    config = EngineArgs(model=sys.argv[1], max_model_len=2048, speculative_config=DRAFT).create_engine_config()
    logger = PrometheusStatLogger(config)
    logger.log_engine_initialized()
    sys.stdout.write(generate_latest(REGISTRY).decode())


if __name__ == "__main__":
    main()
