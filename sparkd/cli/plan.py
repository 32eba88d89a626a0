"""The verb `sparkd plan`: whether a model fits, and how, from its headers and vLLM's answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkd.cli.options import EntryFile, argument, option
from sparkd.cli.session import Session, verb
from sparkd.errors import ConfigError, DoesNotFit, EngineError, SparkdError, Unauthorized, Unavailable
from sparkd.units import MOST, real, whole

if TYPE_CHECKING:
    from sparkd.admin.client import Client
    from sparkd.capacity.planned_entry import PlanRequest
    from sparkd.cli.named_entry import NamedEntry
    from sparkd.hardware import Hardware
    from sparkd.vllm.ask.answers import ModelAnswer, ModelQuestion
    from sparkd.vllm.ask.model import InquiryRuntime

NODES, SEQS = whole("--nodes", 1, MOST["nodes"]), whole("--seqs", 1, MOST["requests"])
CONTEXT = whole("--ctx", 1, MOST["max_model_len"], tokens=True)
BATCH = whole("--batch", 1, MOST["max_num_batched_tokens"], tokens=True)
MARGIN = real("--margin", 0, MOST["margin_gib"], "GiB")
# Draws the plan that is known so far.
Draw = Callable[[dict[str, Any]], None]
KV_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
# A daemon looks at a model's headers for at most a minute (sparkd.capacity.plan_for_node).
DAEMON_S = 75.0
# The longest wait for the vLLM that a daemon asks.
VLLM_S = 600.0


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
    docker: Annotated[bool, option("--docker", help="Print a `docker run` command instead.")] = False,
    image: Annotated[str | None, option("--image", metavar="NAME", help="Container image for --docker.")] = None,
    quick: Annotated[bool, option("--quick", help="Do not start vLLM to ask it.")] = False,
    every: Annotated[bool, option("--all", help="Also show why each other choice was rejected.")] = False,
    config: EntryFile = None,
) -> None:
    """Tell whether a model fits, in which format, and vLLM's command.

    Reads config.json and the headers of the weights (local or Hub); asks vLLM.
    """
    from sparkd.capacity.planned_entry import METHODS, MODEL_CHARACTERS, PlanRequest
    from sparkd.cli.named_entry import value_of
    from sparkd.recipes.file import refuse_as_model
    from sparkd.render import plan as show_plan
    from sparkd.render.page import printable, say_json

    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype {kv_dtype}: {', '.join(KV_DTYPES)} are known.")
    if speculative is not None and speculative not in METHODS:
        raise ConfigError(f"--speculative {speculative}: {', '.join(METHODS)} are known.")
    if not 1 <= len(model) <= MODEL_CHARACTERS:
        problem = f"MODEL has {len(model):,} characters, and 1 to {MODEL_CHARACTERS:,} are expected"
        raise ConfigError(f"{problem}: give a configured name, a recipe, a folder, or a hub id (owner/name).")
    if model.endswith((".yaml", ".yml")):
        refuse_as_model(model)
    if session.json and docker:
        raise ConfigError("--json cannot be combined with --docker.")
    if image is not None and not docker:
        raise ConfigError("--image needs --docker.")
    request = PlanRequest(
        model=model,
        nodes=nodes,
        max_model_len=context,
        requests=seqs,
        quantize=value_of(quantize) if quantize is not None else None,
        max_num_batched_tokens=batch,
        kv_cache_dtype=kv_dtype,  # type: ignore[arg-type]  # checked above
        margin_gib=margin,
        speculative=speculative,  # type: ignore[arg-type]  # checked above
    )
    preview = show_plan.Preview(session.out)
    draw = preview.draw if session.out.is_terminal and not session.json and not docker else None
    answer, unheard = planned(request, hardware, config, lambda: session.client, quick=quick, draw=draw)
    preview.erase()
    if session.json:
        answer["notes"] += unheard
        say_json(answer)
    else:
        # Where a container's command is made of standard output too.
        sys.stderr.write("".join(f"{printable(line)}\n" for line in unheard))
        if docker:
            _write_containers(answer, image)
        else:
            show_plan.plan(answer, session.out, every=every)
    if answer["choice"] is None:
        raise typer.Exit(DoesNotFit.exit_code)


def planned(
    request: PlanRequest,
    hardware: str | None,
    config: Path | None,
    daemon: Callable[[], Client],
    *,
    quick: bool = True,
    draw: Draw | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The plan as plain JSON, and a sentence for each question that a daemon in reach did not answer: whose, why and the cure.

    A daemon plans its own models itself.

    hardware: None for the nodes of a daemon in reach, and for a Spark where there is none.
    daemon: asked of a name that no sparkd.yaml here has.
    quick: vLLM is not started to be asked.
    draw: gets the plan by an estimate before vLLM is started to be asked.

    Raises ConfigError and CheckpointError; Unauthorized and Unavailable where a daemon in reach would have to know the name.
    """
    from sparkd.cli.named_entry import configured, of_hub, of_recipe, unknown
    from sparkd.config.quantize import AUTO
    from sparkd.hardware import SPARK, hardware_of

    machine, name, unheard = SPARK if hardware is None else hardware_of(hardware), request.model, list[str]()
    named = configured(name, config, os.environ)
    if named is None:
        views, silent = _models_of(daemon(), name, unheard)
        if view := next((view for view in views if name in (view["name"], *view["aliases"])), None):
            return _of_daemon(daemon(), request, str(view["name"]), hardware, unheard, draw, quick=quick), unheard
        named = of_recipe(name, config, os.environ) or of_hub(name, config, os.environ)
        if named is None:
            if silent is not None and unheard:
                raise silent
            names = [word for view in views for word in (view["name"], *view["aliases"])]
            raise unknown(name, config, os.environ, asked=silent is None, names=names)
    if hardware is None:
        there, problem = _nodes_of(daemon())
        if problem is not None:
            unheard.append(f"This is for a Spark, since the daemon did not say what its nodes are: {problem}")
        if there is not None:
            machine, nodes = there
            if request.nodes is None and (named.origin is None or named.spec.tensor_parallel == AUTO):
                request = request.model_copy(update={"nodes": nodes})
            return _on_nodes(_planned_here(named, request, machine, unheard, draw, quick=quick), daemon()), unheard
    return _planned_here(named, request, machine, unheard, draw, quick=quick), unheard


def asked_here(
    questions: Sequence[ModelQuestion], *, runtime: InquiryRuntime, quick: bool, unheard: list[str]
) -> Sequence[ModelAnswer | None]:
    """The answer of this machine's vLLM, None where there is none.

    unheard: gets a sentence where there is one that cannot be asked.
    """
    from sparkd.render import models as show
    from sparkd.vllm.ask.model import ask, kept_answers
    from sparkd.vllm.installed import full_version_in

    if quick or full_version_in(runtime.interpreter) is None:
        return kept_answers(questions, runtime)
    with ExitStack() as shown:
        lines: list[Callable[[str, str], None]] = []

        def progress(step: str, number: int) -> None:
            if not lines:
                lines.append(shown.enter_context(show.progress(show.terminal(stderr=True))))
            if number >= 0:
                lines[0](f"asking vLLM about the model ({number + 1} of {len(questions)})", step)
            elif step == "importing":
                lines[0]("starting vLLM to ask it about the model", step)

        try:
            return ask(questions, runtime, progress=progress)
        except (EngineError, OSError) as error:
            unheard.append(f"{error} The numbers are those of sparkd's own formulas.")
            return [None] * len(questions)


def _planned_here(
    named: NamedEntry, request: PlanRequest, machine: Hardware, unheard: list[str], draw: Draw | None, *, quick: bool
) -> dict[str, Any]:
    from sparkd.capacity.plan import plan as plan_of
    from sparkd.capacity.planned_entry import entry_of
    from sparkd.checkpoint.remote_headers import checkpoint_at
    from sparkd.render.models import headers_of

    entry = entry_of(named.spec, named.config, named.origin, made=named.origin is None)
    env = {**os.environ, **entry.env}
    with headers_of(entry.spec.model) as progress:
        checkpoint = checkpoint_at(entry.spec.model, entry.spec.revision, env, progress)

    def answer(*, quick: bool) -> dict[str, Any]:
        return plan_of(
            request,
            entry,
            checkpoint,
            machine,
            read=lambda draft: checkpoint_at(draft, None, env),
            ask=partial(asked_here, runtime=entry.runtime, quick=quick, unheard=unheard),
        )

    if draw is not None and not quick and entry.runtime.version is not None:
        guess = answer(quick=True)
        if not guess["vllm"]["answered"]:
            draw(guess)
    return answer(quick=quick)


def _models_of(client: Client, name: str, unheard: list[str]) -> tuple[list[dict[str, Any]], Unavailable | Unauthorized | None]:
    """The daemon's models; none, and why, where it does not say.

    unheard: gets a sentence where a daemon in reach does not.
    """
    if not client.listens():
        return [], Unavailable(f"No sparkd answers at {client.base_url}.")
    try:
        return client.models(), None
    except (Unavailable, Unauthorized) as error:
        unheard.append(f"Whether the daemon has an entry for {name} is not known: {error.message}")
        return [], error


def _of_daemon(
    client: Client, request: PlanRequest, name: str, hardware: str | None, unheard: list[str], draw: Draw | None, *, quick: bool
) -> dict[str, Any]:
    """The daemon's own plan of its entry, for the machine that is asked for here, else for its nodes, once its vLLM has answered."""
    from sparkd.hardware import KNOWN

    if hardware is not None and hardware not in KNOWN:
        cure = f"choose {' or '.join(KNOWN)}, or name the sparkd.yaml with {name} by --config"
        raise ConfigError(f"--hardware {hardware}: {name} is a model of sparkd at {client.base_url}, which cannot read that: {cure}.")
    question = {**request.model_dump(exclude_none=True), "model": name, "hardware": hardware or "node"} | ({"quick": True} if quick else {})

    def asked() -> tuple[dict[str, Any], str | None]:
        """The plan, and the operation that asks vLLM for more."""
        answer = {**client.post("/plan", question, DAEMON_S), "entry": {"name": name, "origin": f"sparkd at {client.base_url}"}}
        operation = answer.pop("operation", None)
        answer.pop("href", None)
        return _on_nodes(answer, client) if hardware is None else answer, operation

    answer, operation = asked()
    while operation is not None:
        if draw is not None:
            draw(answer)
        ended = client.get(f"/operations/{operation}", wait_s=VLLM_S)
        if ended["state"] != "SUCCEEDED":
            unheard.append(f"vLLM gave the daemon no answer: {ended['message']}")
            break
        answer, operation = asked()
    return answer


def _nodes_of(client: Client) -> tuple[tuple[Hardware, int] | None, str | None]:
    """One node of the daemon's as a plan counts it, and how many answer; or why it does not say so. (None, None) where none is in reach."""
    from sparkd.hardware import Hardware

    if not client.listens():
        return None, None
    try:
        listing = client.get("/nodes")
        hardware = Hardware(**listing["hardware"])
        # Measurements of this machine tell nothing of another's.
        hardware = hardware if client.is_here else replace(hardware, name=client.base_url.partition("://")[2])
        return (hardware, max(1, sum(bool(node["agent"]) for node in listing["nodes"]))), None
    except SparkdError as error:
        return None, error.message
    except (KeyError, TypeError):
        cure = "update the older of the two, or name the machine by --hardware"
        return None, f"sparkd at {client.base_url} runs another version: {cure}."


def _on_nodes(answer: dict[str, Any], client: Client) -> dict[str, Any]:
    """The plan with the daemon whose nodes it is for."""
    return {**answer, "hardware": {**answer["hardware"], "of": f"sparkd at {client.base_url}"}}


def _write_containers(answer: dict[str, Any], image: str | None) -> None:
    """On standard output alone, so that it can go to a file. Raises ConfigError."""
    from sparkd.capacity.docker_run import docker_run, shell
    from sparkd.render.page import printable
    from sparkd.render.plan import OWN_WORDS

    choice = answer["choice"]
    if choice is not None and image is None and not choice["configured"]:
        answer = {**answer, "choice": {**choice, "container": _container_for(str(choice["model"]))}}
    launches = docker_run(answer, image)
    recipe = (answer["choice"] or {}).get("container")
    if launches and recipe and not image:
        sys.stdout.write(f"# the image is that of the recipe {recipe['recipe']}\n")
        if recipe.get("note"):
            sys.stdout.write(f"# {printable(' '.join(recipe['note'].split()))}\n")
    for number, launch in enumerate(launches):
        if len(launches) > 1:
            sys.stdout.write(f"# node {number}; {OWN_WORDS}\n")
        sys.stdout.write(shell(launch) + "\n")


def _container_for(model: str) -> dict[str, Any] | None:
    """The image that the recipe for this very model names; an entry that names the recipe takes its settings."""
    from sparkd.capacity.planned_entry import recipe_for

    recipe = recipe_for(model)
    container = recipe.recipe.container if recipe is not None else None
    return None if container is None or recipe is None else {**container.model_dump(), "recipe": recipe.name}
