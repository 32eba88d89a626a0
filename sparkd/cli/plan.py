"""The verb `sparkd plan` and its options. Never plans: what does is imported only when it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparkd.cli.models import Session, verb
from sparkd.cli.options import argument, option
from sparkd.units import MOST, real, whole

NODES, SEQS = whole("--nodes", 1, MOST["nodes"]), whole("--seqs", 1, MOST["requests"])
CONTEXT = whole("--ctx", 1, MOST["max_model_len"], tokens=True)
BATCH = whole("--batch", 1, MOST["max_num_batched_tokens"], tokens=True)
MARGIN = real("--margin", 0, MOST["margin_gib"], "GiB")


def register(app: typer.Typer) -> None:
    app.command("plan")(verb(plan))


def plan(
    session: Session,
    model: Annotated[str, argument(metavar="MODEL", help="A folder, a hub id, or a configured name.")],
    nodes: Annotated[int | None, option("--nodes", metavar="N", parser=NODES, help="How many nodes there are; 1.")] = None,
    context: Annotated[int | None, option("--ctx", metavar="TOKENS", parser=CONTEXT, help="Length of a request; as much as fits.")] = None,
    seqs: Annotated[int | None, option("--seqs", metavar="N", parser=SEQS, help="Requests of that length at once; 1.")] = None,
    quantize: Annotated[str | None, option("--quantize", metavar="VALUE", help="A format or a recipe; all formats are tried.")] = None,
    hardware: Annotated[str | None, option("--hardware", metavar="X", help="spark (if no daemon's), h200, or a YAML file.")] = None,
    batch: Annotated[int | None, option("--batch", metavar="TOKENS", parser=BATCH, help="max_num_batched_tokens; vLLM's default.")] = None,
    kv_dtype: Annotated[str | None, option("--kv-dtype", metavar="TYPE", help="Of the KV cache: auto (the default), fp8.")] = None,
    speculative: Annotated[
        str | None, option("--speculative", metavar="HOW", help="Count a draft: off, ngram, suffix, mtp or dflash.")
    ] = None,
    margin: Annotated[float | None, option("--margin", metavar="GIB", parser=MARGIN, help="To stay free; 1 GiB or 3 %.")] = None,
    eager: Annotated[bool, option("--eager", help="Without CUDA graphs.")] = False,
    docker: Annotated[bool, option("--docker", help="Print `docker run` for the choice instead.")] = False,
    compose: Annotated[bool, option("--compose", help="Print a compose file for the choice instead.")] = False,
    image: Annotated[str | None, option("--image", metavar="NAME", help="With --docker or --compose: the container's image.")] = None,
    quick: Annotated[bool, option("--quick", help="Start no vLLM to ask it.")] = False,
    every: Annotated[bool, option("--all", help="Also tell why each other way cannot be.")] = False,
    config: Annotated[Path | None, option("--config", metavar="FILE", help="The sparkd.yaml that knows MODEL.")] = None,
) -> None:
    """Whether a model fits, how, and vLLM's command for it.

    From headers, here or on the hub, and what the installed vLLM says of them.
    """
    from sparkd.cli import plan_run

    code = plan_run.run(
        lambda: session.client,
        json=session.json,
        model=model,
        nodes=nodes,
        context=context,
        seqs=seqs,
        quantize=quantize,
        hardware=hardware,
        batch=batch,
        kv_dtype=kv_dtype,
        speculative=speculative,
        margin=margin,
        eager=eager,
        docker=docker,
        compose=compose,
        image=image,
        quick=quick,
        every=every,
        config=config,
    )
    if code:
        raise typer.Exit(code)
