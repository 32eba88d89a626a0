"""Owns what a look at a model's files finds wrong with its entry, for `sparkd check` and for a reload. Never asks vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from sparkd.capacity.account import Evidence
from sparkd.capacity.headers import headers_here
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.parallelism import uneven_heads
from sparkd.capacity.unloadable import fault, uneven, unmet
from sparkd.checkpoint.model_folder import unusable_of
from sparkd.checkpoint.source import folder_of
from sparkd.config.config import Config, ModelConfig
from sparkd.entry.trusted_commits import refusal
from sparkd.errors import CheckpointUncounted, ConfigError
from sparkd.hardware import SPARK
from sparkd.schema.engine_args import EngineArgs, engine_args
from sparkd.vllm.ask.cache import places
from sparkd.vllm.ask.model import InquiryRuntime, kept_here
from workers.quantization.recipe import AS_IT_IS


@dataclass(frozen=True, slots=True)
class EntryFault:
    """key: of the entry. ends_start: whether a start would end over it. names_key: whether the message names the key itself."""

    key: str
    message: str
    ends_start: bool = True
    names_key: bool = False


def entry_faults(spec: ModelConfig, env: Mapping[str, str], config: Config) -> Iterator[EntryFault]:
    """Nothing but its absence for a model whose files are not on this machine. env: of its engine. Blocks. Raises ConfigError for a number
    of a flag that vLLM refuses too."""
    if absent := unusable_of(spec, config.engine):
        # A folder may lie on another node.
        yield EntryFault("model", absent.message, ends_start=os.path.lexists(spec.model))
        return
    if not spec.runs_vllm(config.engine):
        return
    if reason := refusal(spec, config):
        yield EntryFault("trust_remote_code", reason)
    runtime = spec.runtime_of(config.engine)
    if folder_of(spec.model, spec.revision, env) is None:
        return
    args = engine_args(spec, env)
    if (broken := fault(args)) is not None:
        yield EntryFault("model", broken.message, ends_start=not isinstance(broken, CheckpointUncounted))
    for sentence in unmet(args):
        yield EntryFault("quantize", sentence, ends_start=False, names_key=True)
    if why := uneven(args):
        yield EntryFault("quantize", why)
    if (why := _refusal(args, InquiryRuntime(runtime, places(config.state_dir)))) is not None:
        yield EntryFault("model" if args.split == (1, 1) else "tensor_parallel", f"vLLM refuses it: {why}.")


def _refusal(args: EngineArgs, runtime: InquiryRuntime) -> str | None:
    """vLLM's refusal of the entry in an answer that is kept, else the heads that its ranks cannot share; without a full stop, None
    without either."""
    headers = headers_here(args)
    if headers is None:
        return None
    consultation = Evidence(ask=partial(kept_here, runtime=runtime)).consultation(args, headers.model.checkpoint, SPARK)
    consultation.ask([(AS_IT_IS, *args.split)])
    exact = consultation.exact(AS_IT_IS, Serving(1, tensor_parallel=args.split[0]))
    return exact.refusal if exact.decides else uneven_heads(headers.model.shape, args.split[0])


def refuse_faulty(specs: Iterable[ModelConfig], config: Config) -> None:
    """Raise ConfigError with every fault for which a start of these entries would end. Blocks."""
    faults = [
        f"models.{spec.name}.{found.key}: {found.message}"
        for spec in specs
        for found in entry_faults(spec, spec.environment(config.engine), config)
        if found.ends_start
    ]
    if faults:
        raise ConfigError("\n".join(faults))
