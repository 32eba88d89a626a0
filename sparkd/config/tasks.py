"""Reads from the files of a model what it can be asked for, before an engine runs."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sparkd.checkpoint import CONFIG
from sparkd.checkpoint.shape import shape_of
from sparkd.checkpoint.source import folder_of
from sparkd.config.model import ModelConfig
from sparkd.errors import CheckpointError
from sparkd.state.abilities import GENERATE, POOL, TRANSCRIBE, Abilities
from sparkd.vllm.flags import parsed
from workers.host import regular_file

# vllm/config/model.py, _SUFFIX_TO_DEFAULTS, and the tables of vllm/model_executor/models/registry.py (0.32). An architecture that neither
# an end nor a name tells may do anything.
_POOLING_ENDS = (
    *("ForSequenceClassification", "ForTokenClassification", "ForAudioClassification", "ForImageClassification", "ForVideoClassification"),
    *("ClassificationModel", "EmbeddingModel", "ForTextEncoding", "RewardModel", "ForRewardModeling", "ForMaskedLM", "ForRetrieval"),
    *("BertModel", "RobertaModel", "BidirectionalModel", "BidirectionalEmbedModel"),
)
# `supports_transcription_only` of their classes.
_TRANSCRIBING = frozenset(
    f"{name}ForConditionalGeneration" for name in ("Whisper", "CohereAsr", "FireRedASR2", "FunASR", "MossTranscribeDiarize")
)
_HEARING_TEXT_MODELS = frozenset(("MoonshotKimiaForCausalLM",))
# Flags that make something else of an architecture, or name another one.
_OTHER_WAYS = frozenset({"runner", "convert", "hf-config-path", "hf-overrides", "pooler-config", "config-format"})
# A sentence transformer's own (vllm/transformers_utils/config.py, get_pooling_config): then a text model pools.
_POOLER = "1_Pooling"
_MODULES = "modules.json"
_MOST_BYTES = 4 << 20


def abilities_of(spec: ModelConfig, environ: Mapping[str, str]) -> Abilities:
    """The abilities that a model's files on this machine show before an engine runs. environ: the engine's own. Blocks; never raises."""
    length = spec.max_model_len if isinstance(spec.max_model_len, int) else None
    folder = folder_of(spec.model, spec.revision, environ)
    if folder is None:
        return Abilities(max_model_len=length)
    config, files = _read(folder)
    if config is None:
        return Abilities(max_model_len=length)
    tasks = None if not _OTHER_WAYS.isdisjoint(parsed(spec.extra_args)) else tasks_of(config, files)
    return Abilities(tasks, max_model_len=length if spec.max_model_len is not None else _longest(config))


def _read(folder: str) -> tuple[dict[str, Any] | None, list[str]]:
    """config.json, None where it cannot be read, and the names beside it."""
    try:
        files = os.listdir(folder)
        config = json.loads(regular_file.read(Path(folder) / CONFIG, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None, []
    return (config if isinstance(config, dict) else None), files


def _longest(config: Mapping[str, Any]) -> int | None:
    try:
        return shape_of(config).max_len
    except (CheckpointError, ValueError, TypeError, AttributeError, LookupError):
        return None  # a kind of model that is not counted; its engine will say


def tasks_of(config: Mapping[str, Any], files: Collection[str]) -> frozenset[str] | None:
    """config: config.json; files: the names beside it."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return None
    name = str(names[0])
    if name in _TRANSCRIBING:
        return frozenset((TRANSCRIBE,))
    if _POOLER in files or name.endswith(_POOLING_ENDS):
        return frozenset((POOL,))
    if _MODULES in files:
        return None
    if name.endswith(("ForCausalLM", "LMHeadModel")) and name not in _HEARING_TEXT_MODELS:
        return frozenset((GENERATE,))
    if name.endswith("ForConditionalGeneration"):
        return frozenset((GENERATE, TRANSCRIBE))
    return None
