"""Decides when a model that failed is tried again."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from sparkd.cluster.compatibility import UNLINKED
from sparkd.config.config import BackoffSettings
from sparkd.control.record import Record
from sparkd.control.registry import Registry
from sparkd.errors import DoesNotFit, ModelUnusable, RankError
from sparkd.state.model_state import ModelState
from workers.rank.signatures import LASTING

# An engine that hangs is started again so often within that time, then it rests for as long (gb10-services' breaker).
HANGS, HANG_WINDOW_S = 2, 900.0
# sparkd waits this long before it retries a model that only its owner can fix: each try loads for minutes and takes a turn from others.
# A model that has served is retried as usual: a single request may have needed a part that its build lacks.
LASTING_S = 3600.0
FOR_ITS_OWNER = LASTING | {UNLINKED, *(kind.__name__ for kind in (DoesNotFit, ModelUnusable, RankError))}


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pause after a failure.

    lasts: another try does not help until the cause is fixed.
    advice: a sentence for the operator, or empty.
    """

    delay_s: float
    lasts: bool = False
    advice: str = ""


def back_off(record: Record, reason: str, settings: BackoffSettings, now_s: float, rng: random.Random, *, lasts: bool) -> Backoff:
    """Count a failure of the model, and choose the pause before the next try.

    now_s: monotonic seconds.
    lasts: whether a retry cannot help although `reason` allows one.
    """
    ready_since_s = record.attempt.ready_since_s
    was_stable = ready_since_s is not None and now_s - ready_since_s >= settings.reset_after_s
    record.failures = 1 if was_stable else record.failures + 1
    delay_s = settings.delay_s(record.failures, rng)
    if reason == "EngineFrozen":
        record.hang_times_s = (*(at_s for at_s in record.hang_times_s if now_s - at_s < HANG_WINDOW_S), now_s)
        if (times := len(record.hang_times_s)) > HANGS:
            minutes = HANG_WINDOW_S / 60
            advice = f"It hung {times} times in {minutes:.0f} minutes. sparkd starts it again in {minutes:.0f} minutes."
            return Backoff(max(delay_s, HANG_WINDOW_S), advice=advice)
    if (lasts or reason in LASTING) and ready_since_s is None:
        advice = f"Another try will not help until its cause is fixed: {_cure(record)}."
        return Backoff(max(delay_s, LASTING_S), True, advice)
    return Backoff(delay_s)


def end_backoffs(registry: Registry, now_s: float, reasons: Collection[str], names: Collection[str] = ()) -> None:
    """A model that failed for one of these reasons, or is one of these, is tried again at once."""
    for record in registry.records.values():
        if record.state is ModelState.FAILED and (record.attempt.reason in reasons or record.name in names):
            record.backoff_until_s = now_s


def _cure(record: Record) -> str:
    """The advice for whoever brought the model in, without a full stop, once a start has failed for good: only a file is read again."""
    name = record.name
    if record.origin == "file":
        return f"fix its entry, then run `sparkd reload` or `sparkd load {name}`"
    if record.origin == "serve":
        return f"fix the cause, then run `sparkd load {name}`, or start `sparkd serve` with other flags"
    again = f"add it again with others, as by `sparkd run MODEL --name {name} -- FLAGS`"
    return f"if its own flags are wrong, {again}; otherwise fix the cause, then run `sparkd load {name}`"
