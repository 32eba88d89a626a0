"""The section `groups`: which models never run side by side, and which always do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from sparkd.config.fields import Names, Section
from sparkd.nearest import nearest


@dataclass(frozen=True, slots=True)
class Ties:
    """By canonical name: a model's rivals, and its companions (of companions, too)."""

    rivals: Mapping[str, frozenset[str]] = field(default_factory=dict)
    companions: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def rivals_of(self, name: str) -> frozenset[str]:
        return self.rivals.get(name, frozenset())

    def companions_of(self, name: str) -> frozenset[str]:
        return self.companions.get(name, frozenset())


class GroupSettings(Section):
    """Lists of names, or aliases, of models."""

    exclude: tuple[Names, ...] = ()
    accompany: tuple[Names, ...] = ()

    def ties(self, names: Mapping[str, str]) -> Ties:
        """names: every name that a request may use -> the model's canonical one; what is not among them ties nothing."""
        rivals: dict[str, set[str]] = {}
        for model, other in _pairs(self.exclude, names):
            rivals.setdefault(model, set()).add(other)
            rivals.setdefault(other, set()).add(model)
        sets: list[set[str]] = []
        for group in self.accompany:
            joined = {names[name] for name in group if name in names}
            met = [friends for friends in sets if friends & joined]
            sets = [*(friends for friends in sets if friends not in met), joined.union(*met)]
        companions = {name: frozenset(friends - {name}) for friends in sets for name in friends}
        return Ties({name: frozenset(others) for name, others in rivals.items()}, companions)

    def problems(self, names: Mapping[str, str]) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """(place, sentence) of each name that no model has, and of models that exclude and accompany each other."""
        for key in ("exclude", "accompany"):
            for index, group in enumerate(getattr(self, key)):
                for position, name in enumerate(group):
                    if name not in names:
                        message = f"groups.{key} names {name!r}, which is not a model. {known_or_nearest(name, names)}"
                        yield ("groups", key, index, position), message
                if len(group) < 2 or len({names.get(name, name) for name in group}) < len(group):
                    mistake = f"{', '.join(group)} names a model twice, or only one model" if group else "a group here is empty"
                    message = f"groups.{key}: {mistake}. A group is of two or more models."
                    yield ("groups", key, index), message
        ties = self.ties(names)
        for index, group in enumerate(self.exclude):
            for model, other in _pairs((group,), names):
                if other in ties.companions_of(model):
                    contradiction = f"{model} and {other} exclude each other here and accompany each other in groups.accompany"
                    yield ("groups", "exclude", index), f"groups.exclude: {contradiction}. Remove one of the two."


def known_or_nearest(name: str, names: Collection[str]) -> str:
    """The end of a sentence about a name that no model has."""
    near = nearest(name, names)
    return f"Did you mean {near}?" if near else f"Known: {', '.join(sorted(names)) or 'none'}."


def _pairs(groups: tuple[tuple[str, ...], ...], names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for group in groups:
        yield from combinations(dict.fromkeys(names[name] for name in group if name in names), 2)
