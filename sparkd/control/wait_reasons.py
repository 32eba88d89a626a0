"""Why a model is not loaded now: a reason to compare, and a message to read."""

from __future__ import annotations

from dataclasses import dataclass

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
RAY_STARTS, AGENT_SILENT, LEFT_BEHIND = "RayStarting", "AgentSilent", "LeftBehind"


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a model is not loaded now.

    reason: one of the above, or that of a condition.
    models: the models that it waits for, or that are in its way.
    """

    reason: str
    message: str
    models: tuple[str, ...] = ()

    def is_as(self, other: Wait | None) -> bool:
        """Whether reason and models are the same. The message also tells the seconds that are left, which change."""
        return other is not None and (self.reason, self.models) == (other.reason, other.models)
