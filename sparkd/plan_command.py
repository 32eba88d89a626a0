"""What `sparkd plan` does: whether a model fits, and how, from its headers alone. Never loads a weight."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from sparkd import show, show_plan
from sparkd.checkpoint import Checkpoint
from sparkd.hardware import hardware_of
from sparkd.hub_headers import checkpoint_of
from sparkd.layers import meant, value_of
from sparkd.plan_question import Question, answer
from sparkd.prequantized import prequantized
from sparkd.quantizing import AUTO

__all__ = ["KV_DTYPES", "Question", "found", "show_found", "value_of", "write_containers"]

KV_DTYPES = get_args(Question.model_fields["kv_cache_dtype"].annotation)


def found(question: Question, hardware: str, config: Path | None, ask: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    """The plan as plain JSON. ask: the daemon's models, called only where nothing else knows the name.

    Raises ConfigError and CheckpointError.
    """

    env: dict[str, str] = {}

    def find(name: str) -> tuple[str, Checkpoint, Any]:
        source, revision, configured, engine = meant(name, config, os.environ, ask)
        env.update(engine)
        with show.headers_of(source) as progress:
            checkpoint = checkpoint_of(source, revision, env, progress)
        return source, checkpoint, None if configured in (AUTO, "bf16") else configured

    return answer(question, hardware_of(hardware), find, lambda source, checkpoint: prequantized(source, checkpoint, env))


def show_found(plan: dict[str, Any], console: Console, *, json: bool, every: bool) -> None:
    if json:
        show.say_json(plan)
    else:
        show_plan.plan(plan, console, every=every)


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
