"""Owns what a look at a model's files finds wrong with its entry, for `sparkd check` and for a reload. Never asks vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from sparkd.capacity.account import Evidence
from sparkd.capacity.entry_check import misfits
from sparkd.capacity.unloadable import fault, too_long, uneven, unmet
from sparkd.config.config import Config, ModelConfig
from sparkd.entry.trusted_commits import refusal
from sparkd.errors import CheckpointUncounted, ConfigError
from sparkd.inquiry.model_answers import InquiryRuntime, kept_here, places
from sparkd.models.folder import unusable_of
from sparkd.models.source import folder_of
from sparkd.schema.engine_args import engine_args
from sparkd.vllm.installed import full_version_in, release_in
from workers.kv.profiles import profiles_in


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
    answers = partial(kept_here, runtime=InquiryRuntime(runtime, places(config.state_dir)))
    # As a start counts it: what it measured before may be less than the formulas say.
    release, platform = full_version_in(runtime), config.engine.platform
    if platform == "auto" and release is not None and release.endswith("+cpu"):
        platform = "cpu"  # as a start here finds it
    evidence = Evidence(profiles_in(str(config.profiles_path)), release, answers)
    reasons = {"max_model_len": too_long(args, release_in(runtime)), "quantize": uneven(args)}
    for key, message in [*reasons.items(), *misfits(args, platform, evidence)]:
        if message:
            yield EntryFault(key, message)


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
