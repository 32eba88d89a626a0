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
    model: Annotated[str, argument(metavar="MODEL", help="A folder, a hub id, a recipe or a configured name.")],
    nodes: Annotated[
        int | None, option("--nodes", metavar="N", parser=NODES, help="Number of nodes; default: the daemon's, else 1.")
    ] = None,
    context: Annotated[
        int | None, option("--ctx", metavar="TOKENS", parser=CONTEXT, help="Tokens of one request; default: as many as fit.")
    ] = None,
    seqs: Annotated[int | None, option("--seqs", metavar="N", parser=SEQS, help="Concurrent requests of that length; default 1.")] = None,
    quantize: Annotated[str | None, option("--quantize", metavar="VALUE", help="Try this format or recipe; default: every format.")] = None,
    hardware: Annotated[str | None, option("--hardware", metavar="X", help="spark, h200 or a YAML file; default: the daemon's.")] = None,
    batch: Annotated[int | None, option("--batch", metavar="TOKENS", parser=BATCH, help="max_num_batched_tokens; default: vLLM's.")] = None,
    kv_dtype: Annotated[str | None, option("--kv-dtype", metavar="TYPE", help="Type of the KV cache: auto (default) or fp8.")] = None,
    speculative: Annotated[
        str | None, option("--speculative", metavar="HOW", help="Add a draft: off, ngram, suffix, mtp or dflash.")
    ] = None,
    margin: Annotated[
        float | None, option("--margin", metavar="GIB", parser=MARGIN, help="Memory to leave free; 7 on a Spark by default.")
    ] = None,
    eager: Annotated[bool, option("--eager", help="Count no CUDA graphs.")] = False,
    docker: Annotated[bool, option("--docker", help="Print a `docker run` command instead.")] = False,
    compose: Annotated[bool, option("--compose", help="Print a compose file instead.")] = False,
    image: Annotated[str | None, option("--image", metavar="NAME", help="Container image for --docker or --compose.")] = None,
    quick: Annotated[bool, option("--quick", help="Do not start vLLM to ask it.")] = False,
    every: Annotated[bool, option("--all", help="Also show why each other choice was rejected.")] = False,
    config: Annotated[Path | None, option("--config", metavar="FILE", help="The sparkd.yaml that has MODEL.")] = None,
) -> None:
    """Tell whether a model fits, in which format, and vLLM's command.

    Reads config.json and the headers of the weights (local or Hub); asks vLLM.
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
