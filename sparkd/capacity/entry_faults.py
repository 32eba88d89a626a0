"""Faults of an entry that a model's files show before a start: missing files, formats that its weights cannot have, vLLM's kept refusal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from sparkd.capacity.evidence import Evidence
from sparkd.capacity.fit import Option, candidates_of, checked, source_of
from sparkd.capacity.formats import mixes_of
from sparkd.capacity.headers import headers_here, inventory_in
from sparkd.capacity.weights import uneven_groups
from sparkd.checkpoint.model_folder import unusable_of
from sparkd.checkpoint.source import folder_of
from sparkd.config.config import Config, ModelConfig
from sparkd.config.engine_args import EngineArgs, engine_args
from sparkd.config.quantize import AUTO
from sparkd.config.trusted_commits import refusal
from sparkd.errors import CheckpointError, CheckpointIncomplete, CheckpointUncounted, ConfigError
from sparkd.hardware import SPARK
from sparkd.vllm.ask.cache import places
from sparkd.vllm.ask.model import InquiryRuntime, kept_here
from sparkd.vllm.flags import LOAD_FORMAT

# The load formats that need every file of a checkpoint; others read no weights here, or files of their own.
_READS_SAFETENSORS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", LOAD_FORMAT)

# The causes for which vLLM refuses an entry.
_OF_VLLM = ("vllm", "split", "length")


@dataclass(frozen=True, slots=True)
class EntryFault:
    """A fault of an entry.

    key: of the entry.
    ends_start: whether a start would end over it.
    names_key: whether the message names the key itself.
    """

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
    if (broken := file_fault(args)) is not None:
        yield EntryFault("model", broken.message, ends_start=not isinstance(broken, CheckpointUncounted))
    draft = None if args.draft is None else args.draft.model
    if isinstance(draft, str) and draft.startswith("/") and not os.path.isdir(draft):
        yield EntryFault("extra_args", f"The draft {draft} is not there: correct the path in --speculative-config.", names_key=True)
    headers = headers_here(args)
    for sentence in () if headers is None else headers.model.unmet(args.recipe):
        yield EntryFault("quantize", sentence, ends_start=False, names_key=True)
    if why := format_fault(args):
        yield EntryFault("quantize", why)
    if refused := _refused(args, InquiryRuntime(runtime, places(config.state_dir))):
        if refused.cause == "length":
            yield EntryFault("max_model_len", f"{refused.reason}: set at most {refused.longest}.")
        else:
            yield EntryFault("model" if args.split == (1, 1) else "tensor_parallel", f"vLLM refuses it: {refused.reason}.")


def file_fault(args: EngineArgs) -> CheckpointError | None:
    """Why the files of the model here cannot be loaded, as `sparkd plan` refuses them; None where they can, or are not here.

    The missing files of a hub id are fetched by its engine. CheckpointUncounted: of these files only the engine knows.
    """
    spec, folder = args.spec, folder_of(args.spec.model, args.spec.revision, args.env)
    if folder is None or not os.path.isdir(folder) or (spec.load_format is not None and spec.load_format not in _READS_SAFETENSORS):
        return None
    try:
        inventory_in(folder)
    except CheckpointIncomplete as error:
        return error if spec.model.startswith("/") else None
    except CheckpointError as error:
        return error
    except OSError:
        return None  # this user may not look there
    return None


def format_fault(args: EngineArgs) -> str | None:
    """Why the loader would refuse the entry's `quantize`: groups that do not divide a weight's columns, a format that
    QuantizationRecipe.assign refuses, or a size that no mix of formats is as small as. None where it would not, or the headers are not on
    this machine."""
    headers, wish = headers_here(args), args.wish
    if headers is None or args.spec.quantize in (None, AUTO):
        return None
    try:
        if wish is not None:
            # With the draft and the precision that its flags ask for, as a start counts it.
            if wish.gib is not None:
                mixes_of(headers.model, wish, args.tensor_parallel or 1)
            return None
        groups = uneven_groups(headers.model.formatted(args.recipe))
        return groups and f"{groups}."
    except ConfigError as error:
        return error.explanation
    except CheckpointError as error:
        return error.message if wish is None else None


def _refused(args: EngineArgs, runtime: InquiryRuntime) -> Option | None:
    """The option of the entry that vLLM refuses, by a kept answer, its heads or its length; None if it refuses nothing."""
    args, headers = args.undecided(), headers_here(args)
    if headers is None:
        return None
    stored, *_ = candidates_of(source_of(args, headers, SPARK, Evidence(ask=partial(kept_here, runtime=runtime))))
    option = checked(stored, SPARK, args.split)
    return option if option.cause in _OF_VLLM else None


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
