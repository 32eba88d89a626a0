"""Finds the part of every tensor that this rank's model takes, by one load with tensors without memory. Never reads a checkpoint, never
changes a parameter.

vLLM's own weight loaders decide which parts a rank needs: they narrow a checkpoint tensor to the rank's rows or columns, drop experts of
other ranks and skip layers of other pipeline stages. The trace gives the model `PhantomTensor`s under the checkpoint's names and notes
which region of each is copied into a parameter. If a loader does more than a plain view (arithmetic, concatenation, `.item()`), the whole
tensor counts as needed, so the answer is never too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

Region = tuple[tuple[int, int], ...]  # one half-open interval for each dimension of the whole tensor

SMALL_BYTES = 16 * 2**20  # a larger stand-in has only one element in memory, so that the trace stays cheap

_aten = torch.ops.aten


class Target(NamedTuple):
    """The target of a copy: a parameter's memory, the region of the tensor that is copied there, and the order of its dimensions.

    like: a view of that memory. With `offset` the target has the same shape and strides but begins at that element of the storage, so that
    for 9,000 experts no view is made before the copy.
    """

    like: torch.Tensor
    region: Region
    dims: tuple[int | None, ...]
    offset: int | None = None

    @property
    def memory(self) -> torch.Tensor:
        return self.like if self.offset is None else self.like.as_strided(self.like.shape, self.like.stride(), self.offset)

    @property
    def start(self) -> int:
        """The number of the target's first element in its storage."""
        return self.like.storage_offset() if self.offset is None else self.offset


@dataclass(slots=True)
class Taken:
    """The part of one tensor that the model has taken: `region` is the smallest box that contains every copy, None without a copy.

    once: the model copied it exactly once and did nothing else with it, so its bytes may go directly to `target`.
    """

    shape: tuple[int, ...]
    region: Region | None = None
    copies: int = 0
    target: Target | None = None

    @property
    def once(self) -> bool:
        return self.copies == 1

    def add(self, region: Region) -> None:
        self.copies += 1
        if any(stop <= start for start, stop in region):
            return
        if self.region is None:
            self.region = region
            return
        self.region = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(self.region, region, strict=True))

    def whole(self) -> None:
        self.copies += 2
        self.region = tuple((0, size) for size in self.shape)


@dataclass(slots=True)
class Phantom:
    """A view of a tensor without memory: the box of the source that it shows, and the order of its dimensions.

    dims: for every dimension of the view the source's dimension, or None for one of size 1 that the source does not have.
    """

    taken: Taken
    region: Region
    dims: tuple[int | None, ...]
    on_copy: Callable[[torch.Tensor, Phantom], None] | None = None

    def sizes(self) -> tuple[int, ...]:
        return tuple(1 if dim is None else self.region[dim][1] - self.region[dim][0] for dim in self.dims)

    def cut(self, dim: int, start: int, stop: int, *, drop: bool = False) -> Phantom | None:
        """The view narrowed along one of its dimensions; None where the result is no box of the source."""
        dim %= len(self.dims)
        source = self.dims[dim]
        dims = self.dims[:dim] + self.dims[dim + 1 :] if drop else self.dims
        if source is None:
            return Phantom(self.taken, self.region, dims, self.on_copy) if (start, stop) == (0, 1) else None
        first = self.region[source][0]
        region = (*self.region[:source], (first + start, first + stop), *self.region[source + 1 :])
        return Phantom(self.taken, region, dims, self.on_copy)

    def shaped(self, sizes: Sequence[int]) -> Phantom | None:
        """The same elements under another shape, where the shapes differ only in dimensions of size 1."""
        mine = [dim for dim, size in zip(self.dims, self.sizes(), strict=True) if size != 1]
        theirs = [size for size in sizes if size != 1]
        if [self.region[dim][1] - self.region[dim][0] for dim in mine if dim is not None] != theirs:
            return None
        left = iter(mine)
        return Phantom(self.taken, self.region, tuple(None if size == 1 else next(left) for size in sizes), self.on_copy)


class PhantomTensor(torch.Tensor):
    """A tensor with shape, dtype and device but no memory, which notes the regions that are copied from it."""

    phantom: Phantom

    @staticmethod
    def __new__(cls, phantom: Phantom, dtype: torch.dtype, device: torch.device) -> PhantomTensor:
        sizes = phantom.sizes()
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        tensor = torch.Tensor._make_wrapper_subclass(cls, sizes, strides=strides, dtype=dtype, device=device, requires_grad=False)
        tensor.phantom = phantom
        return tensor

    def __repr__(self, **_kwargs: Any) -> str:
        return f"PhantomTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        packet = function.overloadpacket
        if packet is _aten.copy_ and isinstance(args[1], PhantomTensor) and not isinstance(args[0], PhantomTensor):
            return _copied(args[0], args[1].phantom)
        view = _VIEWS.get(packet)
        if view is not None and isinstance(args[0], PhantomTensor):
            shown = view(args[0].phantom, *args[1:], **kwargs)
            if shown is not None:
                return _wrapped(shown, kwargs.get("dtype") or args[0].dtype, kwargs.get("device") or args[0].device)
        return _opaque(function, args, kwargs)


def _copied(target: torch.Tensor, phantom: Phantom) -> torch.Tensor:
    if target.numel() != math.prod(phantom.sizes()):  # broadcast: rare, and then small
        phantom.taken.whole()
    else:
        phantom.taken.add(phantom.region)
        phantom.taken.target = Target(target.detach(), phantom.region, phantom.dims)
    if phantom.on_copy is not None:
        phantom.on_copy(target, phantom)
    return target


def _opaque(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that is no view: every phantom in its arguments counts as needed whole and is replaced by ones of its shape."""

    def real(value: Any) -> Any:
        if not isinstance(value, PhantomTensor):
            return value
        value.phantom.taken.whole()
        if value.phantom.on_copy is not None:
            raise NotAView(str(function))
        ones = torch.ones((), dtype=torch.float32, device=value.device).to(value.dtype).expand(value.shape)
        return ones.contiguous() if value.numel() * value.element_size() <= SMALL_BYTES else ones

    mutated = args[0] if args and isinstance(args[0], PhantomTensor) and function._schema.is_mutable else None
    result = function(*tree_map(real, args), **tree_map(real, kwargs))
    return mutated if mutated is not None else result


class NotAView(RuntimeError):
    """A weight loader did more with a streamed tensor than copy a view of it."""


def _wrapped(shown: Any, dtype: torch.dtype, device: torch.device) -> Any:
    if isinstance(shown, Phantom):
        return PhantomTensor(shown, dtype, device)
    return [PhantomTensor(phantom, dtype, device) for phantom in shown]


def _slice(of: Phantom, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Phantom | None:
    if step != 1:
        return None
    size = of.sizes()[dim]
    first, last, _ = slice(start, end).indices(size)
    return of.cut(dim, first, max(first, last))


def _select(of: Phantom, dim: int, index: int) -> Phantom | None:
    index %= of.sizes()[dim]
    return of.cut(dim, index, index + 1, drop=True)


def _split(of: Phantom, size: int | Sequence[int], dim: int = 0) -> list[Phantom] | None:
    total = of.sizes()[dim]
    sizes = [min(size, total - at) for at in range(0, total, size)] if isinstance(size, int) else list(size)
    parts: list[Phantom] = []
    at = 0
    for width in sizes:
        part = of.cut(dim, at, at + width)
        if part is None:
            return None
        parts.append(part)
        at += width
    return parts


def _unbind(of: Phantom, dim: int = 0) -> list[Phantom] | None:
    parts = [of.cut(dim, at, at + 1, drop=True) for at in range(of.sizes()[dim])]
    return None if None in parts else [part for part in parts if part is not None]


def _permute(of: Phantom, order: Sequence[int]) -> Phantom:
    return Phantom(of.taken, of.region, tuple(of.dims[dim] for dim in order), of.on_copy)


def _transpose(of: Phantom, first: int, second: int) -> Phantom:
    order = list(range(len(of.dims)))
    order[first], order[second] = order[second], order[first]
    return _permute(of, order)


def _t(of: Phantom) -> Phantom:
    return _permute(of, range(len(of.dims))[::-1])


def _unsqueeze(of: Phantom, dim: int) -> Phantom:
    dim %= len(of.dims) + 1
    return Phantom(of.taken, of.region, (*of.dims[:dim], None, *of.dims[dim:]), of.on_copy)


def _squeeze(of: Phantom, dim: int | Sequence[int] | None = None) -> Phantom | None:
    sizes = of.sizes()
    wanted = range(len(sizes)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {index % len(sizes) for index in wanted if sizes[index] == 1} if sizes else set()
    return Phantom(of.taken, of.region, tuple(d for i, d in enumerate(of.dims) if i not in gone), of.on_copy)


def _view(of: Phantom, sizes: Any) -> Phantom | None:
    if isinstance(sizes, torch.dtype):
        return None
    product = math.prod(size for size in sizes if size != -1)
    total = math.prod(of.sizes())
    return of.shaped([total // product if size == -1 else size for size in sizes]) if product else None


def _same(of: Phantom, *_args: Any, **_kwargs: Any) -> Phantom:
    return Phantom(of.taken, of.region, of.dims, of.on_copy)


_VIEWS: dict[Any, Callable[..., Any]] = {
    _aten.slice: _slice,
    _aten.select: _select,
    _aten.split: _split,
    _aten.split_with_sizes: _split,
    _aten.unbind: _unbind,
    _aten.permute: _permute,
    _aten.transpose: _transpose,
    _aten.t: _t,
    _aten.unsqueeze: _unsqueeze,
    _aten.squeeze: _squeeze,
    _aten.view: _view,
    _aten._unsafe_view: _view,
    _aten.reshape: _view,
    _aten.detach: _same,
    _aten.alias: _same,
    _aten._to_copy: _same,
    _aten.clone: _same,
    _aten.contiguous: _same,
    _aten.lift_fresh: _same,
}


@dataclass(slots=True)
class Trace:
    """The regions that the model takes: one for every tensor it was offered. A tensor that it never copied is not needed (region None).

    straight: targets of tensors that need not pass through the model's weight loader (expert_placement.py). seen: copies of each tensor at
    the time the model asked for the next one. A model that copies later (`late`) hides when a tensor has reached its parameter.
    """

    taken: dict[str, Taken] = field(default_factory=dict)
    straight: dict[str, Target] = field(default_factory=dict)
    seen: list[tuple[Taken, int]] = field(default_factory=list)

    @property
    def late(self) -> bool:
        """Whether the model copied a tensor after it had requested the next one. Valid once the model has taken all phantoms."""
        return any(taken.copies != copies for taken, copies in self.seen)

    def forget_targets(self) -> None:
        """Drop the targets, which hold memory of parameters that vLLM may replace; regions stay."""
        for taken in self.taken.values():
            taken.target = None

    def region(self, name: str) -> Region | None:
        return self.taken[name].region

    def once(self, name: str) -> bool:
        return self.taken[name].once


def phantoms(
    tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], device: torch.device, trace: Trace
) -> Iterator[tuple[str, torch.Tensor]]:
    """A phantom for every named tensor; `trace` notes the parts that the model's weight loaders take."""
    passed: list[tuple[Taken, int]] = []
    for name, shape, dtype in tensors:
        taken = trace.taken[name] = Taken(tuple(shape))
        yield name, streamed(taken, dtype, device)
        passed.append((taken, taken.copies))
    trace.seen = passed


def streamed(
    taken: Taken, dtype: torch.dtype, device: torch.device, on_copy: Callable[[torch.Tensor, Phantom], None] | None = None
) -> PhantomTensor:
    """A phantom of a whole tensor. With `on_copy(target, phantom)` the caller carries out every copy from it.

    Raises NotAView where a weight loader computes with a phantom that has `on_copy`.
    """
    whole = tuple((0, size) for size in taken.shape)
    return PhantomTensor(Phantom(taken, whole, tuple(range(len(taken.shape))), on_copy), dtype, device)
