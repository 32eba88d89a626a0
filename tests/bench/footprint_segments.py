"""Why torch has reserved what it has: every segment that its allocator asked the driver for, in order, with the call that needed it.

It reads the history that torch keeps itself (torch.cuda.memory._record_memory_history, from the loaded weights on) and measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MIB = 2**20
# Smaller segments are told together.
SHOWN_BYTES = 20 * MIB
EVENTS = 2_000_000
# Innermost calls of a place, and of those of a block that is held.
CALLS, BLOCK_CALLS = 5, 3
_DULL = ("/torch/nn/modules/module.py", "/torch/utils/", "/torch/_ops.py", "/contextlib.py", "/vllm/model_executor/custom_op.py")


def record() -> None:
    """From here on."""
    import torch

    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=EVENTS)


def lines() -> list[str]:
    """Of this process's only device."""
    import torch

    traces = torch.cuda.memory._snapshot()["device_traces"]
    return list(told(max(traces, key=len)))


def told(events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """events: of torch's history, in order. First the segments as they come, then what was held when most was reserved."""
    reserved = held = most = 0
    small = 0
    segments: dict[int, int] = {}
    blocks: dict[int, tuple[int, str]] = {}
    at_most: tuple[dict[int, int], dict[int, tuple[int, str]]] = ({}, {})
    asked: list[int] = []
    for event in events:
        action, address, size = event["action"], int(event.get("addr", 0)), int(event.get("size", 0))
        if action == "segment_alloc":
            reserved += size
            segments[address] = size
            asked.append(size)
            if reserved >= most:
                most = reserved
                at_most = dict(segments), dict(blocks)
        elif action == "segment_free":
            reserved -= size
            segments.pop(address, None)
            if size >= SHOWN_BYTES:
                yield f"- {size / MIB:.0f}: {reserved / MIB:.0f} reserved, {held / MIB:.0f} held"
        elif action == "alloc":
            held += size
            blocks[address] = size, _where(event, BLOCK_CALLS)
            if reserved == most:
                at_most[1][address] = blocks[address]
            for grown in asked:
                small += grown < SHOWN_BYTES
                if grown >= SHOWN_BYTES:
                    place = _where(event, CALLS)
                    yield f"+ {grown / MIB:.0f} for {size / MIB:.1f}: {reserved / MIB:.0f} reserved, {held / MIB:.0f} held: {place}"
            asked.clear()
        elif action == "free_completed" and address in blocks:
            held -= blocks.pop(address)[0]
    yield f"{small} segments under {SHOWN_BYTES // MIB} MiB; at most {most / MIB:.0f} MiB reserved, in segments of"
    for address, size in sorted(at_most[0].items(), key=lambda one: -one[1]):
        if size >= SHOWN_BYTES:
            inside = [block for at, block in at_most[1].items() if address <= at < address + size]
            used = "; ".join(f"{length / MIB:.1f} {place}" for length, place in sorted(inside, reverse=True)[:3])
            yield f"  {size / MIB:.0f}, {sum(length for length, _ in inside) / MIB:.0f} held: {used or 'nothing'}"


def _where(event: Mapping[str, Any], calls: int) -> str:
    frames = [one for one in event.get("frames") or () if not _is_dull(one)]
    return " < ".join(f"{str(one['filename']).rpartition('/')[2].removesuffix('.py')}:{one['line']}" for one in frames[:calls])


def _is_dull(frame: Mapping[str, Any]) -> bool:
    return any(part in str(frame["filename"]) for part in _DULL)
