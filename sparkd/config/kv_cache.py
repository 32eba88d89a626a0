"""The key `kv_cache:` of a model: its spellings, the keys that contradict it, and the settings of sparkd's worker."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sparkd.config.refusal import plain, refuse
from sparkd.errors import ConfigError
from sparkd.units import GIB
from sparkd.vllm import reserved_args
from workers.host.runtime import GUARDED
from workers.kv.settings import BLOCKS_FLAG, CPU_KV_CACHE_GIB, CPU_KV_SPACE

if TYPE_CHECKING:
    from sparkd.config.model import ModelConfig

AUTO = "auto"
WORKERS = {"cuda": "workers.kv.SparkWorker", "cpu": "workers.kv.SparkCPUWorker"}
_WAYS = ("bytes", "tokens", "sequences", "utilization")
_EXAMPLES = "{bytes: 8GiB}, {tokens: 32768}, {sequences: 4, at: 8192} or {utilization: 0.8}"
_LARGEST = 2**53
_BYTES = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?([KMGT])iB")
# A small letter means a power of 1000, a capital letter one of 1024, as in vLLM's lengths.
_TOKENS = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)([kmgKMG])")


def kv_cache(value: Any) -> Any:
    """A pydantic validator that makes all spellings of a size one value: `auto`, or a map of plain numbers."""
    if value is None or value == AUTO:
        return value
    if not isinstance(value, Mapping):
        raise refuse(f"must be auto, or a map such as {_EXAMPLES}")
    given = plain(value)
    if unknown := next((key for key in given if key not in (*_WAYS, "at")), None):
        raise refuse(f"has no {str(unknown)[:48]!r}: give {_EXAMPLES}", item=unknown)
    said = [way for way in _WAYS if way in given]
    if not said:
        raise refuse(f"sets no size: give {_EXAMPLES}, or auto", item=next(iter(given), None))
    if len(said) > 1:
        raise refuse(f"says {' and '.join(said)}: keep one of them", item=said[1])
    if "at" in given and said != ["sequences"]:
        raise refuse(f"sets 'at' together with {said[0]}; 'at' is the length of each of the 'sequences'. Remove it", item="at")
    return {key: made for key, found in given.items() if (made := _READ[key](key, found)) is not None}


def excluded(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """(key, message) of every other key or flag of the entry that sizes the cache too."""
    key = "kv_cache" if model.kv_cache is not None else "kv_margin_gib" if model.kv_margin_gib is not None else None
    if key is None:
        return
    why = "exclude each other, because each says how the KV cache is sized: remove one of them"
    if model.gpu_memory_utilization is not None:
        yield "gpu_memory_utilization", f"gpu_memory_utilization and {key} {why}"
    for flag in reserved_args.cache_flags(model.extra_args):
        yield "extra_args", f"{flag} and {key} {why}"
    if model.kv_margin_gib is not None and isinstance(model.kv_cache, dict) and "utilization" in model.kv_cache:
        yield "kv_margin_gib", "kv_margin_gib and kv_cache with utilization exclude each other, because vLLM then sizes: remove one of them"


def impossible(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """(key, message) of each size that contradicts another number of the entry, for any model."""
    size, length = model.kv_cache, model.max_model_len
    if not isinstance(size, dict):
        return
    if isinstance(length, int) and size.get("at", 0) > length:
        reason = f"at is {size['at']:,} tokens, and no request has more than {length:,} (max_model_len)"
        yield "kv_cache", f"{reason}: lower at, or raise max_model_len."
    if isinstance(length, int) and size.get("tokens", length) < length:
        reason = f"it holds {size['tokens']:,} tokens, and one request may have {length:,} (max_model_len)"
        yield "kv_cache", f"{reason}: give it at least {spelled({'tokens': length})}, or lower max_model_len."
    whole_gib = model.memory_gib
    if isinstance(whole_gib, int | float) and size.get("bytes", 0) >= whole_gib * GIB:
        reason = f"{spelled({'bytes': size['bytes']})} are all of the {whole_gib:g} GiB that memory_gib gives the whole engine, or more"
        yield "kv_cache", f"{reason}: lower it, or raise memory_gib."


def written(key: str, value: Any) -> str:
    """A setting in the entry's spelling."""
    if isinstance(value, Mapping):
        return f"{BLOCKS_FLAG} {value['blocks']}" if "blocks" in value else f"{key}: {spelled(value)}"
    return f"{key}: {str(value).lower() if isinstance(value, bool) else value}"


def spelled(size: Mapping[str, Any]) -> str:
    """The size of a cache in the entry's spelling, which is parsed to the same size."""
    told = (f"{key}: {_gib_or_mib(value) if key == 'bytes' else value}" for key, value in size.items())
    return f"{{{', '.join(told)}}}"


def _gib_or_mib(size: int) -> str:
    tenths = f"{size / GIB:.1f}".removesuffix(".0")
    if int(float(tenths) * GIB) == size:
        return f"{tenths}GiB"
    return str(size) if size % (1 << 20) else f"{size >> 20}MiB"


def share_of(model: ModelConfig) -> tuple[float | None, str]:
    """The share of the memory that vLLM's own sizing may take, None where the entry does not set one; and its spelling.

    On the CPU backend it is one of the machine's memory (cpu_worker.py).
    """
    if isinstance(model.kv_cache, dict) and "utilization" in model.kv_cache:
        return float(model.kv_cache["utilization"]), written("kv_cache", model.kv_cache)
    share = model.gpu_memory_utilization
    return share, "" if share is None else f"gpu_memory_utilization {share:g}"


def vllm_sizes(model: ModelConfig) -> bool:
    """Whether the entry chooses vLLM's sizing, or a worker class that is not sparkd's."""
    return share_of(model)[0] is not None or bool(reserved_args.cache_flags(model.extra_args))


def cpu_space_gib(env: Mapping[str, str]) -> int | None:
    """The size of the CPU backend's cache in vLLM's variable, GiB; None where it is not set. Raises ConfigError."""
    gib = env.get(CPU_KV_SPACE, "")
    if not gib:
        return None
    if not re.fullmatch(r"[0-9]{1,6}", gib):
        raise ConfigError(f"{CPU_KV_SPACE} must be a whole number of GiB.", param="env")
    return int(gib)


def margin_bytes(model: ModelConfig) -> int | None:
    """The bytes to leave free in addition to the cache; None for the default."""
    return None if model.kv_margin_gib is None else int(model.kv_margin_gib * GIB)


def unreadable(model: ModelConfig, env: Mapping[str, str]) -> str | None:
    """The error about CPU_KV_SPACE, where it sizes the cache and cannot be parsed; None where there is none."""
    try:
        if model.kv_cache is None:
            cpu_space_gib(env)
    except ConfigError as error:
        return error.message
    return None


def sizing_of(
    model: ModelConfig, platform: str, entrypoint: str, env: Mapping[str, str], profiles: str | None, reserved_bytes: int | None
) -> dict[str, Any]:
    """The fields of a RankSpec that make sparkd's worker class size the KV cache; empty where vLLM sizes it.

    On a CPU, often a desktop, an entry without kv_cache gets CPU_KV_CACHE_GIB.

    profiles: the folder of kept profiles, None keeps none.
    reserved_bytes: the limit of the whole engine on a node, which `auto` keeps by measuring what the engine holds; None without a limit.
    """
    if platform not in WORKERS or vllm_sizes(model) or (model.kv_cache is None and entrypoint not in GUARDED):
        return {}
    told: dict[str, Any] = {"profiles": profiles}
    if (margin := margin_bytes(model)) is not None:
        told["margin_bytes"] = margin
    space_gib = cpu_space_gib(env) if platform == "cpu" and model.kv_cache is None else None
    if isinstance(model.kv_cache, dict):
        told |= model.kv_cache
    elif space_gib:
        told["bytes"] = space_gib * GIB
    else:
        told |= {"at_most_bytes": CPU_KV_CACHE_GIB * GIB} if platform == "cpu" and model.kv_cache is None else {}
        told |= {"reserved_bytes": reserved_bytes} if reserved_bytes is not None else {}
    return {"worker_cls": WORKERS[platform], "kv_cache": told}


def without_cpu_space(model: ModelConfig, env: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment. With `kv_cache` set it lacks the CPU backend's variable, which would override the flag."""
    return {name: value for name, value in env.items() if name != CPU_KV_SPACE or model.kv_cache is None}


def _bytes(key: str, value: Any) -> int:
    if isinstance(value, str) and (match := _BYTES.fullmatch(value.strip())):
        value = int(float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1))
    return _count(key, value, "a size such as 8GiB or 512MiB, or a whole number of bytes above 0")


def _tokens(key: str, value: Any) -> int:
    if isinstance(value, str) and (match := _TOKENS.fullmatch(value)):
        value = int(float(match[1]) * (1000 if match[2].islower() else 1024) ** ("kmg".index(match[2].lower()) + 1))
    return _count(key, value, "a whole number of tokens above 0, such as 32768 or 32K")


def _sequences(key: str, value: Any) -> int:
    return _count(key, value, "a whole number of requests above 0")


def _at(key: str, value: Any) -> int | None:
    return None if value == "max_model_len" else _tokens(key, value)


def _utilization(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise _wrong(key, value, "a number above 0 and at most 1")
    return float(value)


def _count(key: str, value: Any, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise _wrong(key, value, expected)
    return value


def _wrong(key: str, value: Any, expected: str) -> Exception:
    shown = repr(value)
    return refuse(f"{key} is {shown if len(shown) <= 60 else shown[:57] + '...'}; it must be {expected}", item=key, repeats=True)


_READ = {"bytes": _bytes, "tokens": _tokens, "sequences": _sequences, "at": _at, "utilization": _utilization}
