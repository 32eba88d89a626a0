"""Finds the part of every tensor that this rank's model takes, and its target, by one load with tensors without memory.

vLLM's own weight loaders decide which parts a rank needs: they narrow a checkpoint tensor to the rank's rows or columns, drop experts of
other ranks and skip layers of other pipeline stages. The trace gives the model `PhantomTensor`s under the checkpoint's names and notes
which region of each is copied into a parameter. If a loader does more than a plain view (arithmetic, concatenation, `.item()`), the whole
tensor counts as needed, so the answer is never too small.

A layer's experts are adjacent in one parameter, and vLLM's loader searches for the right place for every tensor: about 100 us each, 18,000
tensors for 128 experts in 48 layers with three scales each. So only the first, the second and the last expert are traced. Where their
targets are evenly spaced and take the same region, those of the others follow; otherwise vLLM places the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from workers.load.virtual import OutputTensor
from workers.quantization.fusion import EXPERT

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
class TensorTrace:
    """The part of one tensor that the model takes: `region` is the smallest one that contains every copy, None without a copy.

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
    """A view of a tensor without memory: the region of the source that it shows, and the order of its dimensions.

    dims: for every dimension of the view the source's dimension, or None for one of size 1 that the source does not have.
    """

    trace: TensorTrace
    region: Region
    dims: tuple[int | None, ...]
    on_copy: Callable[[torch.Tensor, Phantom], None] | None = None

    def sizes(self) -> tuple[int, ...]:
        return tuple(1 if dim is None else self.region[dim][1] - self.region[dim][0] for dim in self.dims)

    def cut(self, dim: int, start: int, stop: int, *, drop: bool = False) -> Phantom | None:
        """The view narrowed along one of its dimensions; None where the result is no region of the source."""
        dim %= len(self.dims)
        source = self.dims[dim]
        dims = self.dims[:dim] + self.dims[dim + 1 :] if drop else self.dims
        if source is None:
            return Phantom(self.trace, self.region, dims, self.on_copy) if (start, stop) == (0, 1) else None
        first = self.region[source][0]
        region = (*self.region[:source], (first + start, first + stop), *self.region[source + 1 :])
        return Phantom(self.trace, region, dims, self.on_copy)

    def shaped(self, sizes: Sequence[int]) -> Phantom | None:
        """The same elements under another shape, where the shapes differ only in dimensions of size 1."""
        mine = [dim for dim, size in zip(self.dims, self.sizes(), strict=True) if size != 1]
        theirs = [size for size in sizes if size != 1]
        if [self.region[dim][1] - self.region[dim][0] for dim in mine if dim is not None] != theirs:
            return None
        left = iter(mine)
        return Phantom(self.trace, self.region, tuple(None if size == 1 else next(left) for size in sizes), self.on_copy)


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
        phantom.trace.whole()
    else:
        phantom.trace.add(phantom.region)
        phantom.trace.target = Target(target.detach(), phantom.region, phantom.dims)
    if phantom.on_copy is not None:
        phantom.on_copy(target, phantom)
    return target


def _opaque(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that is no view: every phantom in its arguments counts as needed whole and is replaced by ones of its shape."""

    def real(value: Any) -> Any:
        if not isinstance(value, PhantomTensor):
            return value
        value.phantom.trace.whole()
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
    return Phantom(of.trace, of.region, tuple(of.dims[dim] for dim in order), of.on_copy)


def _transpose(of: Phantom, first: int, second: int) -> Phantom:
    order = list(range(len(of.dims)))
    order[first], order[second] = order[second], order[first]
    return _permute(of, order)


def _t(of: Phantom) -> Phantom:
    return _permute(of, range(len(of.dims))[::-1])


def _unsqueeze(of: Phantom, dim: int) -> Phantom:
    dim %= len(of.dims) + 1
    return Phantom(of.trace, of.region, (*of.dims[:dim], None, *of.dims[dim:]), of.on_copy)


def _squeeze(of: Phantom, dim: int | Sequence[int] | None = None) -> Phantom | None:
    sizes = of.sizes()
    wanted = range(len(sizes)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {index % len(sizes) for index in wanted if sizes[index] == 1} if sizes else set()
    return Phantom(of.trace, of.region, tuple(d for i, d in enumerate(of.dims) if i not in gone), of.on_copy)


def _view(of: Phantom, sizes: Any) -> Phantom | None:
    if isinstance(sizes, torch.dtype):
        return None
    product = math.prod(size for size in sizes if size != -1)
    total = math.prod(of.sizes())
    return of.shaped([total // product if size == -1 else size for size in sizes]) if product else None


def _same(of: Phantom, *_args: Any, **_kwargs: Any) -> Phantom:
    return Phantom(of.trace, of.region, of.dims, of.on_copy)


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
    """The regions that the model takes: one of every tensor it was offered. A tensor that it never copied is not needed (region None).

    direct_targets: targets of tensors that need not pass through the model's weight loader.
    seen: copies of each tensor at the time the model requested the next one. A model that copies later (`late`) hides when a tensor has
        reached its parameter.
    """

    tensors: dict[str, TensorTrace] = field(default_factory=dict)
    direct_targets: dict[str, Target] = field(default_factory=dict)
    seen: list[tuple[TensorTrace, int]] = field(default_factory=list)

    @property
    def late(self) -> bool:
        """Whether the model copied a tensor after it had requested the next one. Valid once the model has taken all phantoms."""
        return any(traced.copies != copies for traced, copies in self.seen)

    def forget_targets(self) -> None:
        """Drop the targets, which hold memory of parameters that vLLM may replace; regions stay."""
        for traced in self.tensors.values():
            traced.target = None


def phantoms(
    tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], device: torch.device, trace: Trace
) -> Iterator[tuple[str, torch.Tensor]]:
    """A phantom for every named tensor; `trace` notes the parts that the model's weight loaders take."""
    passed: list[tuple[TensorTrace, int]] = []
    for name, shape, dtype in tensors:
        traced = trace.tensors[name] = TensorTrace(tuple(shape))
        yield name, phantom_of(traced, dtype, device)
        passed.append((traced, traced.copies))
    trace.seen = passed


def phantom_of(
    traced: TensorTrace, dtype: torch.dtype, device: torch.device, on_copy: Callable[[torch.Tensor, Phantom], None] | None = None
) -> PhantomTensor:
    """A phantom of a whole tensor. With `on_copy(target, phantom)` the caller carries out every copy from it.

    Raises NotAView where a weight loader computes with a phantom that has `on_copy`.
    """
    whole = tuple((0, size) for size in traced.shape)
    return PhantomTensor(Phantom(traced, whole, tuple(range(len(traced.shape))), on_copy), dtype, device)


@dataclass(slots=True)
class ExpertFamily:
    """The same tensor of every expert of one layer: names by the expert's number."""

    shape: tuple[int, ...]
    names: dict[int, str] = field(default_factory=dict)

    @property
    def traced(self) -> tuple[int, ...]:
        numbers = sorted(self.names)
        return tuple(dict.fromkeys((numbers[0], numbers[min(1, len(numbers) - 1)], numbers[-1])))

    @property
    def untraced(self) -> list[str]:
        """The names of the experts that are not traced."""
        leaders = self.traced
        return [name for number, name in self.names.items() if number not in leaders]


def expert_families(tensors: Sequence[OutputTensor]) -> list[ExpertFamily]:
    """The families among the tensors that vLLM receives. One with another shape than its siblings is in a family of its own."""
    by_kind: dict[tuple[str, str, tuple[int, ...]], ExpertFamily] = {}
    for tensor in tensors:
        if (expert := EXPERT.search(tensor.name)) is None:
            continue
        key = (tensor.name[: expert.start(1)], tensor.name[expert.end(1) :], tensor.shape)
        if (family := by_kind.get(key)) is None:
            family = by_kind[key] = ExpertFamily(tensor.shape)
        family.names[int(expert[1])] = tensor.name
    return list(by_kind.values())


def inferred_targets(families: Sequence[ExpertFamily], traces: dict[str, TensorTrace]) -> dict[str, Target]:
    """Complete `traces` for the experts that were not traced. Returns the targets of those whose place follows; vLLM places the rest."""
    direct_targets: dict[str, Target] = {}
    for family in families:
        leaders = {number: traces[family.names[number]] for number in family.traced}
        first = next(iter(leaders.values()))
        spacing = _spacing({number: leader.target for number, leader in leaders.items() if leader.once})
        like_first = TensorTrace(family.shape, first.region, first.copies)
        others = {number: name for number, name in family.names.items() if number not in leaders}
        traces.update(dict.fromkeys(others.values(), like_first))
        if spacing is not None and (target := first.target) is not None:
            origin, step = spacing
            direct_targets.update((name, target._replace(offset=origin + number * step)) for number, name in others.items())
    return direct_targets


def place(target: Target, tensor: torch.Tensor) -> None:
    """Do the work of vLLM's loader: copy the tensor's part, in the target's order of dimensions, into the parameter."""
    place_stacked([target], tensor.unsqueeze(0))


def place_stacked(targets: Sequence[Target], stacked: torch.Tensor) -> None:
    """Like `place`, for several tensors [targets, ..] whose targets `evenly_spaced` has found."""
    first = targets[0]
    region = tuple(slice(start, stop) for start, stop in first.region)
    part = stacked[(slice(None), *region)] if _is_part(first.region, stacked[0]) else stacked
    dims = [dim + 1 for dim in first.dims if dim is not None]
    if dims != sorted(dims):
        part = part.permute([0, *dims, *(dim for dim in range(1, part.dim()) if dim not in dims)])
    like, start = first.like, first.start
    step = targets[1].start - start if len(targets) > 1 else 1
    memory = like.as_strided((len(targets), *like.shape), (step, *like.stride()), start)
    memory.copy_(part if part.shape == memory.shape else part.reshape(memory.shape), non_blocking=True)


def evenly_spaced(targets: Sequence[Target | None]) -> Iterator[tuple[int, int]]:
    """Cut a sequence into (first, end) of targets that are evenly spaced and take the same region; a None is alone."""
    start = 0
    step: int | None = None
    for at in range(1, len(targets) + 1):
        before, target = targets[at - 1], targets[at] if at < len(targets) else None
        if before is not None and target is not None and _same_layout(before, target):
            ahead = target.start - before.start
            if ahead > 0 and step in (None, ahead):
                step = ahead
                continue
        yield start, at
        start, step = at, None


def target_within(target: Target, origin: tuple[int, ...], shape: Sequence[int]) -> Target | None:
    """The target for the part of a tensor that begins at `origin` and has this shape; None where the target takes more than that part."""
    if len(target.region) != len(origin) or len(origin) != len(shape):
        return None
    region = tuple((start - at, stop - at) for (start, stop), at in zip(target.region, origin, strict=True))
    inside = all(start >= 0 and stop <= size for (start, stop), size in zip(region, shape, strict=True))
    return target._replace(region=region) if inside else None


def _is_part(region: Region, tensor: torch.Tensor) -> bool:
    return any((start, stop) != (0, size) for (start, stop), size in zip(region, tensor.shape, strict=True))


def _spacing(targets: Mapping[int, Target | None]) -> tuple[int, int] | None:
    """(offset of expert 0, step) in elements of the parameter's memory; None unless the targets of three experts are evenly spaced."""
    placed = [(number, target) for number, target in targets.items() if target is not None]
    if len(placed) < 3:
        return None
    (a, first), (b, second), *_ = placed
    step, rest = divmod(second.start - first.start, b - a)
    origin = first.start - a * step
    if rest or not all(_same_layout(first, other) and other.start == origin + number * step for number, other in placed):
        return None
    return origin, step


def _same_layout(first: Target, other: Target) -> bool:
    a, b = first.like, other.like
    if (first.region, first.dims) != (other.region, other.dims):
        return False
    return a is b or (
        (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )
