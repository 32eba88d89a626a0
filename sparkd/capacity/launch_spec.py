"""Owns what every rank of a configured model is started with, wherever it runs: of a workers.rank.spec.RankSpec, all that its entry
decides. Never starts a rank: the daemon does, and `sparkd plan` shows the same.
"""

from __future__ import annotations

from typing import Any

from sparkd.capacity.profiles import engine_of
from sparkd.capacity.requirement import runtime_of
from sparkd.config import kv_cache, quantize
from sparkd.config.config import Config, ModelConfig
from sparkd.entry.trusted_commits import commits_of
from sparkd.hardware import GIB
from sparkd.vllm.translate import Translation
from workers.rank.command import media_flags

# The gateway keeps an access log, and a scrape every five seconds would fill the engine's.
QUIET = ("--disable-uvicorn-access-log",)


def rank_fields(config: Config, spec: ModelConfig, platform: str, entrypoint: str, said: Translation, vllm: str | None) -> dict[str, Any]:
    """spec: nothing in it is `auto` any more. said: its flags and variables as its release knows them. vllm: that release, None where it is
    not known. Reads the checkpoint's headers. `env` is what sparkd sets and the entry's own variables override."""
    reserved_bytes = int(spec.memory_gib * GIB) if isinstance(spec.memory_gib, int | float) else None
    fields: dict[str, Any] = {
        "model_name": spec.name,
        "served_names": list(spec.served_names()),
        "model": spec.model,
        "runtime": runtime_of(spec, config),
        "entrypoint": entrypoint,
        "platform": platform,
        # torch.compile on a CPU takes minutes and gains little; `--no-enforce-eager` in extra_args comes later and wins.
        "flags": [*(["--enforce-eager"] if platform == "cpu" else []), *QUIET, *media_flags(spec.media.domains)],
        "env": {},
        "extra_args": list(said.args),
        **loader_of(config, spec),
        **sizing_of(config, spec, platform, entrypoint, reserved_bytes),
    }
    if (commits := commits_of(spec)) is not None:
        fields["trusted_code"] = commits.to_dict()
    if "kv_cache" in fields:
        # By this name the next plan and the next start find what this one measures.
        engine = engine_of(spec.vllm_flags(), spec.quantize, spec.environment(config.engine), vllm, platform)
        fields["kv_cache"] = {**fields["kv_cache"], "engine": engine}
    return fields


def loader_of(config: Config, spec: ModelConfig) -> dict[str, Any]:
    """See sparkd.config.quantize.loader_of."""
    limit_gib = config.quantized_cache.limit_gib
    limit_bytes = None if limit_gib is None else int(limit_gib * GIB)
    return quantize.loader_of(spec, str(config.quantized_path), limit_bytes)


def sizing_of(config: Config, spec: ModelConfig, platform: str, entrypoint: str, reserved_bytes: int | None) -> dict[str, Any]:
    """See sparkd.config.kv_cache.sizing_of."""
    return kv_cache.sizing_of(spec, platform, entrypoint, spec.environment(config.engine), str(config.profiles_path), reserved_bytes)
