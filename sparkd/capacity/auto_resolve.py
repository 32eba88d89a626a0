"""Owns the choice of format and context for `auto` in a model's entry, given the memory that the model may take.

Never decides whether the model is let in (sparkd.capacity.account), and reserves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from sparkd.capacity.account import NOTHING, Account, Evidence, Ways, account, cache_limit, consulted, illegal
from sparkd.capacity.candidates import Candidate
from sparkd.capacity.fit import CONTEXT_STEP, DEFAULT_CONTEXT
from sparkd.capacity.footprint import PROCESS_BYTES, margin_of
from sparkd.capacity.kv_cache import largest
from sparkd.capacity.parallelism import uneven_groups
from sparkd.config.engine_args import EngineArgs
from sparkd.config.quantize import AUTO
from sparkd.errors import CheckpointError
from sparkd.hardware import GIB, Hardware


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a model may take on each of its nodes. engine: in all; cache: of its cache, None without a limit of its own."""

    engine: int
    cache: int | None = None

    def holds(self, known: Account) -> bool:
        """Whether a request of full length fits, also into the configured cache."""
        caches = [size for size in (self.cache, known.cache) if size is not None]
        return known.least <= self.engine and all(known.kv.least <= size for size in caches)


def room_of(args: EngineArgs, hardware: Hardware, free_bytes: int) -> Room:
    """The memory that the entry's limits leave of free_bytes, the memory of a node that other models leave.

    memory_gib limits the engine; kv_margin_gib stays free in addition to it. gpu_memory_utilization limits all but the processes' memory on
    the host.
    """
    own = free_bytes if args.memory_gib is None else int(args.memory_gib * GIB)
    if args.share is not None:
        beside = PROCESS_BYTES[hardware.platform] if hardware.unified else 0
        return Room(min(free_bytes, own, int(args.share * hardware.memory_bytes) + beside))
    margin = margin_of(hardware, args.margin_bytes)
    return Room(min(free_bytes - margin, own), cache_limit(args, hardware.platform))


def resolved(
    candidates: Sequence[Candidate], hardware: Hardware, free_bytes: int, ways: Ways = (1, 1), evidence: Evidence = NOTHING
) -> Candidate:
    """Decide `quantize: auto` and `max_model_len: auto`.

    The choice is the first candidate in which a request of the configured length fits into free_bytes and the entry's limits.
    Its length is the longest that fits, at most the model's own. If nothing fits, the choice is the smallest, whose refusal gives the
    reason.
    candidates: at least one (sparkd.capacity.candidates).
    evidence: as in sparkd.capacity.account.account.

    If flags leave an account a guess, the guess decides the format, and vLLM decides a length of `auto` by measuring.
    Raises CheckpointError as sparkd.capacity.account.account.
    """
    plain, asked = candidates[0], candidates[0].args.max_model_len
    if asked != AUTO and len(candidates) == 1:
        return plain
    completed = consulted(plain, hardware, ways, evidence).completed(plain.model.inventory)
    room = room_of(plain.args, hardware, free_bytes)

    def at(one: Candidate, tokens: int) -> Account | None:
        try:
            return account(_of_length(one, tokens), hardware, evidence, ways, guesses=True)
        except CheckpointError:
            return None  # of a neighbour: the entry's own files were judged above

    def fits(one: Candidate, tokens: int) -> bool:
        found = at(one, tokens)
        return found is not None and room.holds(found)

    most = asked if isinstance(asked, int) else completed.shape.max_len
    step = CONTEXT_STEP if asked == AUTO else most
    enough = min(most, DEFAULT_CONTEXT) if asked == AUTO else most
    legal = [one for one in candidates if uneven_groups(one.model) is None and illegal(one, hardware, ways, evidence) is None]
    lengths = [(one, largest(partial(fits, one), most, step)) for one in legal]
    best = next((pair for pair in lengths if pair[1] >= enough), None)
    best = best or max(lengths, key=lambda pair: pair[1], default=(plain, 0))
    if not best[1] and lengths:
        best = min(lengths, key=lambda pair: _least(at(pair[0], min(most, CONTEXT_STEP))))
    one, tokens = best
    chosen = _of_length(one, tokens)
    if asked != AUTO or not tokens or account(chosen, hardware, evidence, ways) is None:
        return one
    return chosen


def _of_length(candidate: Candidate, tokens: int) -> Candidate:
    return replace(candidate, args=replace(candidate.args, max_model_len=tokens))


def _least(known: Account | None) -> float:
    return float("inf") if known is None else known.least
