"""Owns what is known of a checkpoint's tensors, compactly: of 190,000 only names and kinds are kept, some 16 MiB. Never reads a file."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Hashable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

_SIZE = attrgetter("nbytes")


class TensorKind(NamedTuple):
    """The properties that alike tensors share. dtype: safetensors code ("BF16", "F8_E4M3")."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class TensorRef(NamedTuple):
    """Where one tensor lies. dtype: safetensors code; path: absolute, or a hub's hf:// one; offset: bytes from the start of the file.

    A tuple, because it is made 190,000 times in a walk over a large checkpoint, in a fifth of the time of a frozen dataclass.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileTensors:
    """One file's tensors in the order of their offsets, each where the one before it ends.

    names: UTF-8, joined by line feeds, which no name has; begin: where the data begins, bytes from the start of the file; left_out: names
    that do not count, because another file's tensor of this name does.
    """

    path: str
    begin: int
    names: bytes
    kinds: tuple[TensorKind, ...]
    left_out: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.kinds) - len(self.left_out)

    def __iter__(self) -> Iterator[TensorRef]:
        sizes = list(map(_SIZE, self.kinds))
        dtypes, shapes = map(attrgetter("dtype"), self.kinds), map(attrgetter("shape"), self.kinds)
        fields = zip(self.all_names(), dtypes, shapes, repeat(self.path), accumulate(sizes, initial=self.begin), sizes, strict=False)
        return self._counting(map(partial(tuple.__new__, TensorRef), fields))

    def refs_at(self, positions: Iterable[int], names: Sequence[str]) -> list[TensorRef]:
        """Those of all tensors that are left out too. names: as `all_names`."""
        starts = list(accumulate(map(_SIZE, self.kinds), initial=self.begin))
        return [TensorRef(names[at], *self.kinds[at][:2], self.path, starts[at], self.kinds[at].nbytes) for at in positions]

    def all_names(self) -> list[str]:
        """In the order of `kinds`, those that are left out too."""
        return self.names.decode().split("\n") if self.kinds else []

    def split_names(self) -> list[bytes]:
        """All of them, those that are left out too."""
        return self.names.split(b"\n") if self.kinds else []

    def counting_names(self) -> Iterator[str]:
        return self._counting(self.all_names())

    def _counting(self, values: Iterable[Any]) -> Iterator[Any]:
        if not self.left_out:
            return iter(values)
        return compress(values, [name not in self.left_out for name in self.all_names()])


class TensorGroup(NamedTuple):
    """Tensors of one kind whose names differ in what was replaced only. name: with that; first: of them; total: how many there are."""

    name: str
    first: TensorRef
    total: int


class Tensors(Mapping[str, TensorRef]):
    """Tensors by name, in the order of the files, then of the offsets. A walk over them makes each anew; a look-up by name makes all, once.

    The files must not name a tensor twice.
    """

    def __init__(self, files: Iterable[FileTensors]) -> None:
        self._files = tuple(files)
        self._by_name: dict[str, TensorRef] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._files))

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name) if self._by_name is not None else (name for file in self._files for name in file.counting_names())

    def __getitem__(self, name: str) -> TensorRef:
        return self._table()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._table()

    def values(self) -> ValuesView[TensorRef]:
        return _Values(self)

    def items(self) -> ItemsView[str, TensorRef]:
        return _Items(self)

    def refs(self) -> Iterator[TensorRef]:
        return iter(self._by_name.values()) if self._by_name is not None else (ref for file in self._files for ref in file)

    def alike(self, pattern: re.Pattern[str], replacement: str) -> Iterable[TensorGroup]:
        """See the function of this name."""
        if any(file.left_out for file in self._files):
            return _alike(self, pattern, replacement)
        groups: dict[tuple[str, TensorKind], TensorGroup] = {}
        for file in self._files:
            names = pattern.sub(replacement, file.names.decode()).split("\n") if file.kinds else []
            counts = _counted(names, file.kinds)
            if new := [key for key in counts if key not in groups]:
                firsts = file.refs_at(_positions(names, file.kinds, new), file.all_names())
                groups.update((key, TensorGroup(key[0], first, 0)) for key, first in zip(new, firsts, strict=True))
            for key, count in counts.items():
                groups[key] = groups[key]._replace(total=groups[key].total + count)
        return groups.values()

    def _table(self) -> dict[str, TensorRef]:
        if self._by_name is None:
            self._by_name = {ref.name: ref for file in self._files for ref in file}
        return self._by_name


def alike(tensors: Mapping[str, TensorRef], pattern: re.Pattern[str], replacement: str) -> Iterable[TensorGroup]:
    """Groups of alike tensors, in the order in which they first occur: of 190,000 tensors of 60 layers of experts, some hundreds.

    pattern, replacement: of re.sub; what the pattern finds may not hold a line feed.
    """
    return tensors.alike(pattern, replacement) if isinstance(tensors, Tensors) else _alike(tensors, pattern, replacement)


def _counted(names: Sequence[str], kinds: Sequence[TensorKind]) -> Mapping[tuple[str, TensorKind], int]:
    kind_of = dict(zip(names, kinds, strict=True))
    if all(map(is_, map(kind_of.__getitem__, names), kinds)):
        return {(name, kind_of[name]): count for name, count in Counter(names).items()}
    return Counter(zip(names, kinds, strict=True))


def _positions(names: Sequence[str], kinds: Sequence[TensorKind], keys: Iterable[tuple[str, TensorKind]]) -> Iterator[int]:
    """Where each key first is. keys: in the order in which they first occur, so that none need be looked for before the one before it."""
    at = -1
    for name, kind in keys:
        at = names.index(name, at + 1)
        while kinds[at] != kind:
            at = names.index(name, at + 1)
        yield at


def _alike(tensors: Mapping[str, TensorRef], pattern: re.Pattern[str], replacement: str) -> Iterable[TensorGroup]:
    groups: dict[tuple[str, TensorKind], TensorGroup] = {}
    for name, tensor in tensors.items():
        key = pattern.sub(replacement, name), TensorKind(tensor.dtype, tensor.shape, tensor.nbytes)
        group = groups.get(key)
        groups[key] = TensorGroup(key[0], tensor, 1) if group is None else group._replace(total=group.total + 1)
    return groups.values()


def any_twice(names: Iterable[Hashable]) -> bool:
    """False where none stands there twice; True may also be two with the same hash of 64 bits.

    In parts, because the numbers of 190,000 hashes in one set take 14 MB.
    """
    parts = [array("q") for _ in range(16)]
    for value in map(hash, names):
        parts[value & 15].append(value)
    return any(len(set(part)) < len(part) for part in parts)


class _Values(ValuesView[TensorRef]):
    _mapping: Tensors

    def __iter__(self) -> Iterator[TensorRef]:
        return self._mapping.refs()


class _Items(ItemsView[str, TensorRef]):
    _mapping: Tensors

    def __iter__(self) -> Iterator[tuple[str, TensorRef]]:
        return ((ref.name, ref) for ref in self._mapping.refs())
