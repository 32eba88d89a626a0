"""Owns a compact table of a checkpoint's tensors: it keeps only names and kinds, some 16 MiB for 190,000 tensors. Never reads a file."""

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
    """The properties that similar tensors share. dtype: safetensors code ("BF16", "F8_E4M3")."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class TensorRef(NamedTuple):
    """The place of one tensor. dtype: safetensors code; path: absolute, or a hub's hf:// path; offset: bytes from the start of the file.

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
    """One file's tensors in the order of their offsets, without gaps.

    names: UTF-8, joined by line feeds, which no name contains; begin: offset of the data, bytes from the start of the file; left_out: names
    that do not count, because another file's tensor with that name does.
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
        """The references of the tensors at these positions, left-out tensors included. names: the result of `all_names`."""
        starts = list(accumulate(map(_SIZE, self.kinds), initial=self.begin))
        return [TensorRef(names[at], *self.kinds[at][:2], self.path, starts[at], self.kinds[at].nbytes) for at in positions]

    def all_names(self) -> list[str]:
        """All names, left-out tensors included, in the order of `kinds`."""
        return self.names.decode().split("\n") if self.kinds else []

    def split_names(self) -> list[bytes]:
        """All names as bytes, left-out tensors included."""
        return self.names.split(b"\n") if self.kinds else []

    def counting_names(self) -> Iterator[str]:
        return self._counting(self.all_names())

    def _counting(self, values: Iterable[Any]) -> Iterator[Any]:
        if not self.left_out:
            return iter(values)
        return compress(values, [name not in self.left_out for name in self.all_names()])


class TensorGroup(NamedTuple):
    """Tensors of one kind whose names are equal after the replacement. name: that name; first: the first tensor; total: their number."""

    name: str
    first: TensorRef
    total: int


class Tensors(Mapping[str, TensorRef]):
    """Tensors by name, in the order of the files, then of the offsets. An iteration makes each anew; the first look-up by name makes all.

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
        """See the function `alike`."""
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
    """Groups of similar tensors, in the order of their first tensors: some hundreds for 190,000 tensors in 60 layers of experts.

    pattern, replacement: as for re.sub; a match of the pattern may not contain a line feed.
    """
    return tensors.alike(pattern, replacement) if isinstance(tensors, Tensors) else _alike(tensors, pattern, replacement)


def _counted(names: Sequence[str], kinds: Sequence[TensorKind]) -> Mapping[tuple[str, TensorKind], int]:
    kind_of = dict(zip(names, kinds, strict=True))
    if all(map(is_, map(kind_of.__getitem__, names), kinds)):
        return {(name, kind_of[name]): count for name, count in Counter(names).items()}
    return Counter(zip(names, kinds, strict=True))


def _positions(names: Sequence[str], kinds: Sequence[TensorKind], keys: Iterable[tuple[str, TensorKind]]) -> Iterator[int]:
    """The first position of each key. keys: in the order of their first positions, so that each search begins after the last one."""
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
    """Whether a name occurs twice. True may also mean two names with the same 64-bit hash.

    The hashes are checked in parts, because 190,000 of them in one set take 14 MB.
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
