"""Owns whether nodes may share one model: rails between them, and the same vLLM, plugin and checkpoint on each. Never starts a rank."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from sparkd.errors import DoesNotFit, RankError
from sparkd.fabric.readings import FabricNodes

log = logging.getLogger("sparkd.cluster")

Identity = Mapping[str, Any]
PROGRAMS = ("vllm", "platform", "plugin")


async def team_of(
    model: str, size: int, nodes: Sequence[str], fabric: FabricNodes, identify: Callable[[str], Awaitable[Identity]], *, rdma: bool
) -> tuple[str, ...]:
    """The first `size` of `nodes` that have a sound rail between each two and would serve the same; none where so many are not there.

    identify: what workers.host.identity.identity says on a node. rdma: False for engines on CPUs. Raises DoesNotFit where no so many are
    linked, RankError where no so many of these would serve the same, both with the cure; ClusterError where a node does not answer.
    """
    if len(nodes) < size:
        return ()
    chosen, why = await fabric.team(nodes, size, rdma=rdma)
    if why:
        raise DoesNotFit(f"{model} cannot be shared by {size} nodes (tensor_parallel): {why}.")
    found = await asyncio.gather(*(identify(node) for node in chosen))
    known: dict[str, Identity] = dict(zip(chosen, found, strict=True))
    told = difference(known)
    if told is None:
        return chosen
    rest = [node for node in nodes if node not in known]
    others = await asyncio.gather(*(identify(node) for node in rest), return_exceptions=True)
    known |= {node: one for node, one in zip(rest, others, strict=True) if not isinstance(one, BaseException)}
    for alike in _alike(nodes, known):
        if len(alike) >= size:
            chosen_instead, why = await fabric.team(alike, size, rdma=rdma)
            if not why:
                log.warning("%s goes over %s, since of the nodes before them %s", model, _among(chosen_instead), told)
                return chosen_instead
    raise RankError(f"{model} cannot be shared by {_among(chosen)}: {told}")


def _alike(nodes: Sequence[str], known: Mapping[str, Identity]) -> Iterator[list[str]]:
    """Groups of nodes that would all serve the same, and have it: what the first has, by which the model was counted, or where it has no
    files at all what others have."""
    first = next(iter(known))
    able = [node for node in nodes if node in known and known[node]["files"] is not None]
    left = [node for node in able if all(known[node][name] == known[first][name] for name in PROGRAMS)]
    while left:
        one = first if first in left else left[0]
        alike = [node for node in left if difference({one: known[one], node: known[node]}) is None]
        left = [node for node in left if node not in alike] if one != first else []
        yield alike


def difference(found: Mapping[str, Identity]) -> str | None:
    """The first thing in which nodes differ, with the value of each, and what helps; None where they are alike."""
    return next(_differences(found), None)


def _differences(found: Mapping[str, Identity]) -> Iterator[str]:
    same = "install the same release of sparkd on all of them and restart their Ray (systemctl restart sparkd-ray)."
    for name, called, cure in (
        ("vllm", "vLLM", "install the same version in the runtime of each (engine.runtime)."),
        ("platform", "the platform", "ranks of one model run on one kind of device."),
        ("plugin", "the build of sparkd's plugin", same),
    ):
        values = {node: one[name] or "missing" for node, one in found.items()}
        if len(set(values.values())) > 1:
            yield f"{called} is {_each(values)}: {cure}"
    files = {node: one["files"] for node, one in found.items()}
    there = {node: names for node, names in files.items() if names is not None}
    if there and len(there) < len(files):
        lacking = _among(node for node in files if node not in there)
        yield f"the model is not on {lacking}: `sparkd pull MODEL` copies it from {next(iter(there))}."
    wrong = [told for name in sorted({name for names in there.values() for name in names}) if (told := _file(name, there))]
    if wrong:
        more = f", and {len(wrong) - 1} more files" if len(wrong) > 1 else ""
        yield f"{wrong[0]}{more}: `sparkd pull MODEL` brings the same files to all of them."


def _file(name: str, there: Mapping[str, Mapping[str, Sequence[Any]]]) -> str | None:
    """How a file differs; None where it does not."""
    missing = [node for node, names in there.items() if name not in names]
    if missing:
        return f"{name} is not on {_among(missing)}"
    sizes = {node: f"{names[name][0]:,} bytes" for node, names in there.items()}
    if len(set(sizes.values())) > 1:
        return f"{name} has {_each(sizes)}"
    digests = {node: names[name][1] for node, names in there.items()}
    return f"{name} differs (digest {_each(digests)})" if len(set(digests.values())) > 1 else None


def _each(values: Mapping[str, str]) -> str:
    """`0.32.0 on a and b, 0.31.0 on c`."""
    return ", ".join(f"{value} on {_among(node for node in values if values[node] == value)}" for value in dict.fromkeys(values.values()))


def _among(nodes: Iterator[str] | Sequence[str]) -> str:
    return " and ".join(nodes)
