"""The verb `sparkd plan` and its options. Never plans: what does is imported only when it is asked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from sparkd.errors import ConfigError, DoesNotFit
from sparkd.verbs import Session, argument, option, verb

# What a field of the question is called on the command line.
_OPTIONS = {
    "model": "MODEL",
    "max_model_len": "--ctx",
    "requests": "--seqs",
    "max_num_batched_tokens": "--batch",
    "margin_gib": "--margin",
}


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
    """Whether a model fits, how, and vLLM's command for it.

    Reads config.json and the headers of the weights, and needs neither a daemon nor a GPU. A hub id that is not on this machine is looked
    at on the hub; nothing but headers is fetched.
    """
    from pydantic import ValidationError

    from sparkd import plan_command

    if kv_dtype not in plan_command.KV_DTYPES:
        raise ConfigError(f"--kv-dtype {kv_dtype}: {', '.join(plan_command.KV_DTYPES)} are known.")
    if margin is not None and not math.isfinite(margin):
        raise ConfigError(f"--margin {margin}: a number of GiB is expected.")
    if image is not None and not (docker or compose):
        raise ConfigError("--image belongs to --docker or --compose.")
    try:
        asked = plan_command.Question(
            model=model,
            nodes=nodes,
            max_model_len=context,
            requests=seqs,
            quantize=plan_command.value_of(quantize) if quantize is not None else None,
            max_num_batched_tokens=batch,
            kv_cache_dtype=kv_dtype,  # type: ignore[arg-type]  # checked above
            margin_gib=margin,
            enforce_eager=eager,
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(f"{_OPTIONS[str(first['loc'][0])]}: {first['msg']}.") from None
    found = plan_command.found(asked, hardware, config, session.client.models)
    if docker or compose:
        plan_command.write_containers(found, image, compose=compose)
    else:
        plan_command.show_found(found, session.out, json=session.json, every=every)
    if found["choice"] is None:
        raise typer.Exit(DoesNotFit.exit_code)
