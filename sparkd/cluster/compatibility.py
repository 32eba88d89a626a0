"""Finds the nodes that may share one model: rails between them, and the same vLLM, plugin and checkpoint on each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from sparkd.errors import DoesNotFit, RankError
from sparkd.fabric.fabric_nodes import FabricNodes

log = logging.getLogger("sparkd.cluster")

Identity = Mapping[str, Any]
# The reason of a DoesNotFit: enough nodes, but no rails between them.
UNLINKED = "Unlinked"
PROGRAMS = ("vllm", "platform", "plugin")


async def compatible_nodes(
    model: str,
    size: int,
    nodes: Sequence[str],
    fabric: FabricNodes,
    identify: Callable[[str], Awaitable[Identity]],
    *,
    rdma: bool,
    linked: bool = True,
) -> tuple[str, ...]:
    """The first `size` of `nodes` that may share the model and would serve the same; none where so many are not there.

    identify: what workers.host.identity.identity says on a node.
    rdma: False for engines on CPUs.
    linked: see FabricNodes.team.

    Raises DoesNotFit where no so many are linked, RankError where no so many of these would serve the same, both with the cure;
    ClusterError where a node does not answer.
    """
    if len(nodes) < size:
        return ()
    chosen, refusal = await fabric.team(nodes, size, rdma=rdma, linked=linked)
    if refusal:
        raise DoesNotFit(f"{model} cannot be shared by {size} nodes (tensor_parallel): {refusal}.", reason=UNLINKED)
    answers = await asyncio.gather(*(identify(node) for node in chosen))
    identities: dict[str, Identity] = dict(zip(chosen, answers, strict=True))
    differing = first_mismatch(identities)
    if differing is None:
        return chosen
    rest = [node for node in nodes if node not in identities]
    others = await asyncio.gather(*(identify(node) for node in rest), return_exceptions=True)
    identities |= {node: answer for node, answer in zip(rest, others, strict=True) if not isinstance(answer, BaseException)}
    for alike in _alike(nodes, identities):
        if len(alike) >= size:
            chosen_instead, refusal = await fabric.team(alike, size, rdma=rdma, linked=linked)
            if not refusal:
                log.warning("%s goes over %s, since of the nodes before them %s", model, _among(chosen_instead), differing)
                return chosen_instead
    raise RankError(f"{model} cannot be shared by {_among(chosen)}: {differing}")


def _alike(nodes: Sequence[str], identities: Mapping[str, Identity]) -> Iterator[list[str]]:
    """Groups of nodes that would all serve the same, and have it: what the first has, by which the model was counted, or where it has no
    files at all what others have."""
    first = next(iter(identities))
    able = [node for node in nodes if node in identities and identities[node]["files"] is not None]
    left = [node for node in able if all(identities[node][name] == identities[first][name] for name in PROGRAMS)]
    while left:
        first_left = first if first in left else left[0]
        alike = [node for node in left if first_mismatch({first_left: identities[first_left], node: identities[node]}) is None]
        left = [node for node in left if node not in alike] if first_left != first else []
        yield alike


def first_mismatch(identities: Mapping[str, Identity]) -> str | None:
    """The first thing in which nodes differ, with the value of each, and what helps; None where they are alike."""
    return next(_differences(identities), None)


def _differences(identities: Mapping[str, Identity]) -> Iterator[str]:
    same = "install the same release of sparkd on all of them and restart their Ray (systemctl restart sparkd-ray)."
    for name, called, cure in (
        ("vllm", "vLLM", "install the same version in the runtime of each (engine.runtime)."),
        ("platform", "the platform", "ranks of one model run on one kind of device."),
        ("plugin", "the build of sparkd's plugin", same),
    ):
        values = {node: identity[name] or "missing" for node, identity in identities.items()}
        if len(set(values.values())) > 1:
            yield f"{called} is {_each(values)}: {cure}"
    files = {node: identity["files"] for node, identity in identities.items()}
    there = {node: names for node, names in files.items() if names is not None}
    if there and len(there) < len(files):
        lacking = _among(node for node in files if node not in there)
        yield f"the model is not on {lacking}: `sparkd pull MODEL` copies it from {next(iter(there))}."
    wrong = [sentence for name in sorted({name for names in there.values() for name in names}) if (sentence := _file(name, there))]
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
