"""Copies experts directly into their parameter, without vLLM's weight loader. Never guesses: where three experts do not agree, vLLM places
them.

A layer's experts are adjacent in one parameter, and vLLM's loader searches for the right place for every tensor: about 100 us each, 18,000
tensors for 128 experts in 48 layers with three scales each. So the loader traces only the first, the second and the last expert (trace.py);
where their places are evenly spaced and taken in the same way, those of the others follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from workers.load.trace import Region, Taken, Target
from workers.load.virtual import Emitted
from workers.quantization.fusion import EXPERT


@dataclass(slots=True)
class Family:
    """The same tensor of every expert of one layer: names by the expert's number. prefix, suffix: the name before and after the number."""

    shape: tuple[int, ...]
    names: dict[int, str]
    prefix: str = ""
    suffix: str = ""

    @property
    def asked(self) -> tuple[int, ...]:
        numbers = sorted(self.names)
        return tuple(dict.fromkeys((numbers[0], numbers[min(1, len(numbers) - 1)], numbers[-1])))

    @property
    def followers(self) -> list[str]:
        """The names of the experts that are not traced."""
        leaders = self.asked
        return [name for number, name in self.names.items() if number not in leaders]


def families(emitted: Sequence[Emitted]) -> list[Family]:
    """The families among the emitted tensors. A tensor with another shape than its siblings is in a family of its own."""
    by_kind: dict[tuple[str, str, tuple[int, ...]], Family] = {}
    for tensor in emitted:
        if (expert := EXPERT.search(tensor.name)) is None:
            continue
        prefix, suffix = tensor.name[: expert.start(1)], tensor.name[expert.end(1) :]
        key = (prefix, suffix, tensor.shape)
        if (family := by_kind.get(key)) is None:
            family = by_kind[key] = Family(tensor.shape, {}, prefix, suffix)
        family.names[int(expert[1])] = tensor.name
    return list(by_kind.values())


def answered(groups: Sequence[Family], taken: dict[str, Taken]) -> dict[str, Target]:
    """Complete `taken` for the experts that were not traced. Returns the targets of those whose place follows; vLLM places the rest."""
    straight: dict[str, Target] = {}
    for family in groups:
        leaders = {number: taken[family.names[number]] for number in family.asked}
        first = next(iter(leaders.values()))
        line = _line({number: tried.target for number, tried in leaders.items() if tried.once})
        alike = Taken(family.shape, first.region, first.copies)
        others = {number: name for number, name in family.names.items() if number not in leaders}
        taken.update(dict.fromkeys(others.values(), alike))
        if line is not None and (like := first.target) is not None:
            origin, step = line
            straight.update((name, Target(like.like, like.region, like.dims, origin + number * step)) for number, name in others.items())
    return straight


def place(target: Target, tensor: torch.Tensor) -> None:
    """Do the work of vLLM's loader: copy the tensor's part, in the target's order of dimensions, into the parameter."""
    place_stacked([target], tensor.unsqueeze(0))


def place_stacked(targets: Sequence[Target], stacked: torch.Tensor) -> None:
    """Like `place`, for several tensors [targets, ..] whose places `followers` has found evenly spaced."""
    first = targets[0]
    box = tuple(slice(start, stop) for start, stop in first.region)
    part = stacked[(slice(None), *box)] if _cuts(first.region, stacked[0]) else stacked
    dims = [dim + 1 for dim in first.dims if dim is not None]
    if dims != sorted(dims):
        part = part.permute([0, *dims, *(dim for dim in range(1, part.dim()) if dim not in dims)])
    like, start = first.like, first.start
    step = targets[1].start - start if len(targets) > 1 else 1
    memory = like.as_strided((len(targets), *like.shape), (step, *like.stride()), start)
    memory.copy_(part if part.shape == memory.shape else part.reshape(memory.shape), non_blocking=True)


def followers(targets: Sequence[Target | None]) -> Iterator[tuple[int, int]]:
    """Cut a sequence into (first, end) of targets that are evenly spaced and taken in the same way; a None is alone."""
    start = 0
    step: int | None = None
    for at in range(1, len(targets) + 1):
        before, target = targets[at - 1], targets[at] if at < len(targets) else None
        if before is not None and target is not None and _alike(before, target):
            ahead = target.start - before.start
            if ahead > 0 and step in (None, ahead):
                step = ahead
                continue
        yield start, at
        start, step = at, None


def straightened(target: Target, origin: tuple[int, ...], shape: Sequence[int]) -> Target | None:
    """The target for the part of a tensor that begins at `origin` and has this shape; None where the target takes more than that part."""
    if len(target.region) != len(origin) or len(origin) != len(shape):
        return None
    region = tuple((start - at, stop - at) for (start, stop), at in zip(target.region, origin, strict=True))
    inside = all(start >= 0 and stop <= size for (start, stop), size in zip(region, shape, strict=True))
    return target._replace(region=region) if inside else None


def _cuts(region: Region, tensor: torch.Tensor) -> bool:
    return any((start, stop) != (0, size) for (start, stop), size in zip(region, tensor.shape, strict=True))


def _line(targets: Mapping[int, Target | None]) -> tuple[int, int] | None:
    """(offset of expert 0, step) in elements of the parameter's memory; None unless the targets of three experts are evenly spaced."""
    placed = [(number, target) for number, target in targets.items() if target is not None]
    if len(placed) < 3:
        return None
    (a, first), (b, second), *_ = placed
    step, rest = divmod(second.start - first.start, b - a)
    origin = first.start - a * step
    if rest or not all(_alike(first, other) and other.start == origin + number * step for number, other in placed):
        return None
    return origin, step


def _alike(first: Target, other: Target) -> bool:
    a, b = first.like, other.like
    if (first.region, first.dims) != (other.region, other.dims):
        return False
    return a is b or (
        (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )
