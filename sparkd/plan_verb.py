"""`sparkd plan`: whether a model fits, and how, from its headers alone. Never loads a weight."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml

from sparkd import show, show_plan
from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.container import containers, shell
from sparkd.errors import ConfigError, DoesNotFit
from sparkd.hardware import hardware_of
from sparkd.layers import located, value_of
from sparkd.plan_question import Question, answer
from sparkd.quantizing import AUTO
from sparkd.verbs import Session, argument, option, verb

KV_DTYPES = get_args(Question.model_fields["kv_cache_dtype"].annotation)


def register(app: typer.Typer) -> None:
    app.command("plan")(verb(plan))


def plan(
    session: Session,
    model: Annotated[str, argument(metavar="MODEL", help="A folder, a hub id, or a configured name.")],
    nodes: Annotated[int, option("--nodes", metavar="N", min=1, max=64, help="How many nodes there are; 1.")] = 1,
    context: Annotated[int | None, option("--ctx", metavar="TOKENS", min=1, help="Length of a request; as much as fits.")] = None,
    seqs: Annotated[int, option("--seqs", metavar="N", min=1, help="Requests of that length at once; 1.")] = 1,
    quantize: Annotated[str | None, option("--quantize", metavar="VALUE", help="A format or a recipe; all formats are tried.")] = None,
    hardware: Annotated[str, option("--hardware", metavar="X", help="spark (the default), h200, or a YAML file.")] = "spark",
    batch: Annotated[int | None, option("--batch", metavar="TOKENS", min=1, help="max_num_batched_tokens; vLLM's default.")] = None,
    kv_dtype: Annotated[str, option("--kv-dtype", metavar="TYPE", help="Of the KV cache: auto (the default), fp8.")] = "auto",
    margin: Annotated[float | None, option("--margin", metavar="GIB", min=0, help="To stay free; 1 GiB or 3 %.")] = None,
    eager: Annotated[bool, option("--eager", help="Without CUDA graphs.")] = False,
    docker: Annotated[bool, option("--docker", help="Print `docker run` for the choice instead.")] = False,
    compose: Annotated[bool, option("--compose", help="Print a compose file for the choice instead.")] = False,
    image: Annotated[str | None, option("--image", metavar="NAME", help="With --docker or --compose: the container's image.")] = None,
    every: Annotated[bool, option("--all", help="Also tell why each other way cannot be.")] = False,
    config: Annotated[Path | None, option("--config", metavar="FILE", help="The sparkd.yaml that knows MODEL.")] = None,
) -> None:
    """Will it fit, and how: every format and way over the nodes, the best one, and vLLM's command for it.

    Reads config.json and the headers of the weights, and needs neither a daemon nor a GPU. A hub id that is not on this machine is looked
    at on the hub; nothing but headers is fetched.
    """
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype {kv_dtype}: {', '.join(KV_DTYPES)} are known.")

    def find(name: str) -> tuple[str, Checkpoint, Any]:
        source, folder, configured, _ = located(name, config, os.environ, session.client.models)
        return source, read_checkpoint(folder), None if configured in (AUTO, "bf16") else configured

    question = Question(
        model=model,
        nodes=nodes,
        max_model_len=context,
        requests=seqs,
        quantize=value_of(quantize) if quantize is not None else None,
        max_num_batched_tokens=batch,
        kv_cache_dtype=kv_dtype,  # type: ignore[arg-type]  # checked above
        margin_gib=margin,
        enforce_eager=eager,
    )
    found = answer(question, hardware_of(hardware), find)
    if image is not None and not (docker or compose):
        raise ConfigError("--image belongs to --docker or --compose.")
    if docker or compose:
        _containers(found, image, compose=compose)
    elif session.json:
        show.say_json(found)
    else:
        show_plan.plan(found, session.out, every=every)
    if found["choice"] is None:
        raise typer.Exit(DoesNotFit.exit_code)


def _containers(found: dict[str, Any], image: str | None, *, compose: bool) -> None:
    """On standard output alone, so that it can go to a file."""
    made = containers(found, image)
    for number, one in enumerate(made):
        if len(made) > 1:
            sys.stdout.write(f"# node {number}; HEAD is the address of node 0 on the QSFP link\n")
        text = yaml.safe_dump({"services": {one.name: one.compose()}}, sort_keys=False) if compose else shell(one) + "\n"
        sys.stdout.write(text)
