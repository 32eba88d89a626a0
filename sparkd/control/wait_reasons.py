"""Owns the reasons for which a model that is to be loaded is not loaded now: a reason to compare, and a message to read."""

from __future__ import annotations

from dataclasses import dataclass

from sparkd.state.memory_book import Lack

# Others come first: one is started first, or asked first and waits for room.
STARTED_FIRST, ASKED_FIRST = "StartedFirst", "AskedFirst"
# One model at a time is started or ended; memory of one that has ended comes back.
LOADS, ENDS, RETURNS = "Loads", "Ends", "Returns"
# It waits for memory, or for models that it cannot run with. UNCLAIMED: no client and no operator requests it. Otherwise the other models
# may stay for now (STAY), start or end already (PASS), or are unloaded now (LEAVE).
UNCLAIMED, STAY, PASS, LEAVE = "Unclaimed", "Stay", "Pass", "Leave"
# In vain: what is pinned excludes it, or the end of all that may go would not do.
EXCLUDED, NO_ROOM = "Excluded", "NoRoom"
# Nothing is loaded at all; the others of this sort are the reasons of conditions.
RAY_STARTS, AGENT_SILENT, LEFT_BEHIND, MEMORY = "RayStarting", "AgentSilent", "LeftBehind", "Memory"


@dataclass(frozen=True, slots=True)
class Wait:
    """reason: one of the above, or of a condition. models: those that it waits for, or that are in its way. lack: of its memory. stay_s:
    for how long those may stay."""

    reason: str
    message: str
    models: tuple[str, ...] = ()
    lack: Lack | None = None
    stay_s: float | None = None

    def is_as(self, other: Wait | None) -> bool:
        """Whether it says the same, but for how long it takes."""
        return other is not None and (self.reason, self.models) == (other.reason, other.models)
