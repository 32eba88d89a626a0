"""What `sparkd plan` does: whether a model fits, and how, from its headers alone. Never loads a weight."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from sparkd import show_plan
from sparkd.checkpoint import Checkpoint
from sparkd.drafting import METHODS
from sparkd.errors import ConfigError, DoesNotFit
from sparkd.hardware import hardware_of
from sparkd.hub_headers import checkpoint_of
from sparkd.layers import meant, value_of
from sparkd.page import headers_of, say_json, standard
from sparkd.plan_question import KvDtype, Question, answer, beyond
from sparkd.prequantized import prequantized
from sparkd.quantizing import AUTO

KV_DTYPES = get_args(KvDtype)
# What a field of the question is called on the command line.
_OPTIONS = {
    "model": "MODEL",
    "nodes": "--nodes",
    "max_model_len": "--ctx",
    "requests": "--seqs",
    "max_num_batched_tokens": "--batch",
    "margin_gib": "--margin",
}


def run(
    ask: Callable[[], list[dict[str, Any]]],
    *,
    json: bool,
    model: str,
    nodes: int = 1,
    context: int | None = None,
    seqs: int = 1,
    quantize: str | None = None,
    hardware: str = "spark",
    batch: int | None = None,
    kv_dtype: str = "auto",
    speculative: str | None = None,
    margin: float | None = None,
    eager: bool = False,
    docker: bool = False,
    compose: bool = False,
    image: str | None = None,
    every: bool = False,
    config: Path | None = None,
) -> int:
    """The exit code. ask: the daemon's models, called only where nothing else knows the name. The others are the options of `sparkd plan`.

    Raises ConfigError and CheckpointError.
    """
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype {kv_dtype}: {', '.join(KV_DTYPES)} are known.")
    if speculative is not None and speculative not in METHODS:
        raise ConfigError(f"--speculative {speculative}: {', '.join(METHODS)} are known.")
    if margin is not None and not math.isfinite(margin):
        raise ConfigError(f"--margin {margin}: a number of GiB is expected.")
    if image is not None and not (docker or compose):
        raise ConfigError("--image belongs to --docker or --compose.")
    asked = Question(
        model=model,
        nodes=nodes,
        max_model_len=context,
        requests=seqs,
        quantize=value_of(quantize) if quantize is not None else None,
        max_num_batched_tokens=batch,
        kv_cache_dtype=kv_dtype,  # type: ignore[arg-type]  # checked above
        margin_gib=margin,
        speculative=speculative,
        enforce_eager=eager,
    )
    if (too_much := beyond(asked)) is not None:
        raise ConfigError(f"{_OPTIONS[too_much[0]]}: {too_much[1]}.")
    plan = found(asked, hardware, config, ask)
    if docker or compose:
        write_containers(plan, image, compose=compose)
    else:
        show_found(plan, json=json, every=every)
    return 0 if plan["choice"] is not None else DoesNotFit.exit_code


def found(question: Question, hardware: str, config: Path | None, ask: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    """The plan as plain JSON. ask: the daemon's models, called only where nothing else knows the name.

    Raises ConfigError and CheckpointError.
    """

    env: dict[str, str] = {}

    def find(name: str) -> tuple[str, Checkpoint, Any]:
        source, revision, configured, engine = meant(name, config, os.environ, ask)
        env.update(engine)
        with headers_of(source) as progress:
            checkpoint = checkpoint_of(source, revision, env, progress)
        return source, checkpoint, None if configured in (AUTO, "bf16") else configured

    return answer(
        question,
        hardware_of(hardware),
        find,
        lambda source, checkpoint: prequantized(source, checkpoint, env),
        read=lambda draft: checkpoint_of(draft, None, env),
    )


def show_found(plan: dict[str, Any], *, json: bool, every: bool) -> None:
    if json:
        say_json(plan)
    else:
        show_plan.plan(plan, standard(), every=every)


def write_containers(plan: dict[str, Any], image: str | None, *, compose: bool) -> None:
    """On standard output alone, so that it can go to a file. Raises ConfigError."""
    import yaml

    from sparkd.container import containers, shell

    made = containers(plan, image)
    for number, one in enumerate(made):
        if len(made) > 1:
            sys.stdout.write(f"# node {number}; HEAD is the address of node 0 on the QSFP link\n")
        text = yaml.safe_dump({"services": {one.name: one.compose()}}, sort_keys=False) if compose else shell(one) + "\n"
        sys.stdout.write(text)
