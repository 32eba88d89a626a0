"""Owns the verb `sparkd plan`: whether a model fits, and how, from its headers alone. Never loads a weight."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from sparkd.capacity.consultation import Consultation, Witness
from sparkd.capacity.plan_for_checkpoint import answer
from sparkd.capacity.plan_report import STATE_DIR, Site, vllm_json
from sparkd.capacity.plan_request import MODEL_CHARACTERS, KvDtype, PlanRequest
from sparkd.capacity.speculative import METHODS, recipe_for
from sparkd.checkpoint import Checkpoint
from sparkd.cli.layers import named_model, of_recipe, settings_around, value_of
from sparkd.errors import ConfigError, DoesNotFit, EngineError, SparkdError, Unauthorized, Unavailable
from sparkd.hardware import KNOWN, SPARK, Hardware, hardware_of
from sparkd.inquiry.model_answers import InquiryRuntime, ModelAnswer, ModelQuestion, ask, kept_answers, places
from sparkd.models.prequantized import prequantized
from sparkd.models.remote_headers import checkpoint_of
from sparkd.models.source import source_of
from sparkd.render import plan as show_plan
from sparkd.render.page import printable, say_json
from sparkd.render.terminal import Page, headers_of
from sparkd.schema.engine_flags import flags_of
from sparkd.schema.quantize import AUTO
from sparkd.vllm.installed import full_version_in

if TYPE_CHECKING:
    from sparkd.admin.client import Client
    from sparkd.config.config import Config, ModelConfig

# A daemon looks at a model's headers for at most a minute (sparkd.capacity.plan_for_node).
DAEMON_S = 75.0
KV_DTYPES = get_args(KvDtype)


def run(
    daemon: Callable[[], Client],
    *,
    json: bool,
    model: str,
    nodes: int | None = None,
    context: int | None = None,
    seqs: int | None = None,
    quantize: str | None = None,
    hardware: str | None = None,
    batch: int | None = None,
    kv_dtype: str | None = None,
    speculative: str | None = None,
    margin: float | None = None,
    eager: bool = False,
    docker: bool = False,
    compose: bool = False,
    image: str | None = None,
    quick: bool = False,
    every: bool = False,
    config: Path | None = None,
) -> int:
    """The exit code. daemon: asked of a name that no sparkd.yaml here has. The others are the options of `sparkd plan`.

    Raises ConfigError and CheckpointError.
    """
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype {kv_dtype}: {', '.join(KV_DTYPES)} are known.")
    if speculative is not None and speculative not in METHODS:
        raise ConfigError(f"--speculative {speculative}: {', '.join(METHODS)} are known.")
    if not 1 <= len(model) <= MODEL_CHARACTERS:
        problem = f"MODEL has {len(model):,} characters, and 1 to {MODEL_CHARACTERS:,} are expected"
        raise ConfigError(f"{problem}: give a configured name, a folder, or a hub id (owner/name).")
    if model.endswith((".yaml", ".yml")):
        from sparkd.recipes.file import refuse_as_model

        refuse_as_model(model)
    if json and (docker or compose):
        raise ConfigError("--json cannot be combined with --docker or --compose.")
    if image is not None and not (docker or compose):
        raise ConfigError("--image needs --docker or --compose.")
    request = PlanRequest(
        model=model,
        nodes=nodes,
        max_model_len=context,
        requests=seqs,
        quantize=value_of(quantize) if quantize is not None else None,
        max_num_batched_tokens=batch,
        kv_cache_dtype=kv_dtype,  # type: ignore[arg-type]  # checked above
        margin_gib=margin,
        speculative=speculative,
        enforce_eager=True if eager else None,
    )
    plan, unheard = found(request, hardware, config, daemon, quick=quick)
    if json:
        plan["notes"] += unheard
    else:
        # Where a container's file is made of standard output too.
        sys.stderr.write("".join(f"{printable(line)}\n" for line in unheard))
    if docker or compose:
        write_containers(plan, image, compose=compose)
    else:
        show_found(plan, json=json, every=every)
    return 0 if plan["choice"] is not None else DoesNotFit.exit_code


def found(
    question: PlanRequest, hardware: str | None, config: Path | None, daemon: Callable[[], Client], *, quick: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """The plan as plain JSON, and what a daemon in reach was asked in vain: whose, why and the cure, a sentence each. daemon: asked of a
    name that no sparkd.yaml here has; of its own models it makes the plan itself. hardware: None for the nodes of a daemon in reach where
    the model is configured, and for a Spark where it is not or none is. quick: vLLM is not started to be asked.

    Raises ConfigError and CheckpointError; Unauthorized and Unavailable where a daemon in reach would have to know the name.
    """
    machine, name = SPARK if hardware is None else hardware_of(hardware), question.model
    own, around = _own(name, config)
    views = list[dict[str, Any]]()
    silent: Unavailable | Unauthorized | None = None
    there, unheard = None, list[str]()
    if not source_of(name).startswith("/") and own is None:
        if not daemon().listens():
            silent = Unavailable(f"No sparkd answers at {daemon().base_url}.")
        else:
            try:
                views = daemon().models()
            except (Unavailable, Unauthorized) as error:
                unheard.append(f"Whether the daemon has an entry for {name} is not known: {error.message}")
                silent = error
        configured = next((view for view in views if name in (view["name"], *view["aliases"])), None)
        if configured is not None:
            return _of_daemon(daemon(), question, str(configured["name"]), hardware), unheard
        own = of_recipe(name, config, os.environ)
        if silent is not None and unheard and own is None and "/" not in name:
            raise silent
    elif own is not None and hardware is None:
        there, problem = _nodes_of(daemon())
        if problem is not None:
            unheard.append(f"This is for a Spark, since the daemon did not say what its nodes are: {problem}")
        if there is not None:
            machine, nodes = there
            if question.nodes is None and own[0].tensor_parallel == AUTO:
                question = replace(question, nodes=nodes)
    env: dict[str, str] = {}

    def models() -> list[dict[str, Any]]:
        if silent is not None:
            raise silent
        return views

    def find(name: str) -> tuple[str, Checkpoint, Any]:
        entry = None
        if own is not None:
            # These modules are imported for an entry alone.
            from sparkd.capacity.plan_for_entry import entry_of

            entry = entry_of(*own)
            source, revision, engine = entry.spec.model, entry.spec.revision, {**os.environ, **entry.env}
        else:
            named = named_model(name, config, os.environ, models)
            source, revision, engine = named.source, named.revision, named.env
        env.update(engine)
        with headers_of(source) as progress:
            checkpoint = checkpoint_of(source, revision, env, progress)
        return source, checkpoint, entry

    if own is not None:
        around = own[1]
    site = Site.without_config(os.environ) if around is None else Site.of(around)
    runtime = runtime_of(own, around)
    witness = Witness(partial(asked_here, runtime=runtime, quick=quick, unheard=unheard))
    plan = answer(
        question,
        machine,
        find,
        lambda source, checkpoint: prequantized(source, checkpoint, env),
        read=lambda draft: checkpoint_of(draft, None, env),
        site=site,
        ask=witness,
    )
    plan["vllm"] = vllm_json(runtime, witness)
    return plan if there is None else _on_nodes(plan, daemon()), unheard


def runtime_of(own: tuple[ModelConfig, Config, str] | None, around: Config | None) -> InquiryRuntime:
    """The runtime whose vLLM is asked about a model. own: the model's entry; around: this machine's configuration; each may be None."""
    if around is None:
        return InquiryRuntime(None, places(Path(os.environ.get("SPARKD_STATE_DIR") or STATE_DIR)))
    interpreter = around.engine.runtime if own is None else own[0].runtime_of(around.engine)
    return InquiryRuntime(interpreter, places(around.state_dir))


def consult(model: str, config: Path | None, *, quick: bool, unheard: list[str]) -> Callable[[Checkpoint], Consultation]:
    """vLLM, about the headers of what a user calls MODEL, on a Spark. quick, unheard: as asked_here."""
    own, around = _own(model, config)
    args, env = (flags_of(own[0]), own[0].environment(own[1].engine)) if own is not None else ([], {})
    ask_vllm = partial(asked_here, runtime=runtime_of(own, around), quick=quick, unheard=unheard)
    return lambda checkpoint: Consultation(ask_vllm, checkpoint, args, env, SPARK)


def _own(model: str, config: Path | None) -> tuple[tuple[ModelConfig, Config, str] | None, Config | None]:
    """(the entry of that name, the configuration of this machine), None where there is none. A folder has no entry, and is planned where
    the configuration cannot be read too. Raises ConfigError."""
    if source_of(model).startswith("/"):
        with suppress(ConfigError):
            around = settings_around(config, os.environ)
            return None, None if around is None else around[0]
        return None, None
    around = settings_around(config, os.environ)
    spec = None if around is None else around[0].lookup(model)
    return None if around is None or spec is None else (spec, *around), None if around is None else around[0]


def asked_here(
    questions: Sequence[ModelQuestion], *, runtime: InquiryRuntime, quick: bool, unheard: list[str]
) -> Sequence[ModelAnswer | None]:
    """The answer of this machine's vLLM, None where there is none. unheard: gets a sentence where there is one that cannot be asked."""
    if quick or full_version_in(runtime.interpreter) is None:
        return kept_answers(questions, runtime)
    with ExitStack() as shown:
        lines: list[Callable[[str, str], None]] = []

        def progress(step: str, number: int) -> None:
            if not lines:
                # Its terminal is a library that a plan which asks nothing need not wait for.
                from sparkd.render import models as show

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


def _of_daemon(client: Client, question: PlanRequest, name: str, hardware: str | None) -> dict[str, Any]:
    """The daemon's own plan of its entry, for the machine that is asked for here, else for its nodes."""
    if hardware is not None and hardware not in KNOWN:
        cure = f"choose {' or '.join(KNOWN)}, or name the sparkd.yaml with {name} by --config"
        raise ConfigError(f"--hardware {hardware}: {name} is a model of sparkd at {client.base_url}, which cannot read that: {cure}.")
    options = {key: value for key, value in asdict(question).items() if value is not None}
    plan = client.post("/plan", {**options, "model": name, "hardware": hardware or "node"}, DAEMON_S)
    named = {**plan, "entry": {"name": name, "origin": f"sparkd at {client.base_url}"}}
    return _on_nodes(named, client) if hardware is None else named


def _nodes_of(client: Client) -> tuple[tuple[Hardware, int] | None, str | None]:
    """One node of the daemon's as a plan counts it, and how many answer; or why it does not say so. (None, None) where none is in reach."""
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


def _on_nodes(plan: dict[str, Any], client: Client) -> dict[str, Any]:
    """It says whose nodes it is for."""
    return {**plan, "hardware": {**plan["hardware"], "of": f"sparkd at {client.base_url}"}}


def show_found(plan: dict[str, Any], *, json: bool, every: bool) -> None:
    if json:
        say_json(plan)
    else:
        show_plan.plan(plan, Page(), every=every)


def _container(model: str) -> dict[str, Any] | None:
    """The image that the recipe for this very model names; its settings are taken by who names the recipe."""
    recipe = recipe_for(model)
    container = recipe.recipe.container if recipe is not None else None
    return None if container is None or recipe is None else {**container.model_dump(), "recipe": recipe.name}


def write_containers(plan: dict[str, Any], image: str | None, *, compose: bool) -> None:
    """On standard output alone, so that it can go to a file. Raises ConfigError."""
    import yaml

    from sparkd.capacity.container import containers, shell

    choice = plan["choice"]
    if choice is not None and image is None and not choice.get("configured"):
        plan = {**plan, "choice": {**choice, "container": _container(str(choice["model"]))}}
    launches = containers(plan, image)
    named = (plan["choice"] or {}).get("container")
    if launches and named and not image:
        sys.stdout.write(f"# the image is that of the recipe {named['recipe']}\n")
        if named.get("note"):
            sys.stdout.write(f"# {printable(' '.join(named['note'].split()))}\n")
    for number, launch in enumerate(launches):
        if len(launches) > 1:
            sys.stdout.write(f"# node {number}; {show_plan.OWN_WORDS}\n")
        text = yaml.safe_dump({"services": {launch.name: launch.compose()}}, sort_keys=False) if compose else shell(launch) + "\n"
        sys.stdout.write(text)
