"""Takes a worker from loaded weights to a sized cache: rehearse or use a profile, read free memory, subtract, check afterwards."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from sparkd.errors import MissingSymbol
from workers.kv.agreement import Course, Gather, Vote, alone, course_of
from workers.kv.arithmetic import GIB, PEAK_FACTOR, CacheCosts, CacheDoesNotFit, CachePool, Demand, SizeBounds, pool, too_little
from workers.kv.load_watch import Batches, UnderLoad
from workers.kv.memory import MemoryReading, lowest
from workers.kv.memory_floor import Floor, floor_of
from workers.kv.profiles import MeasuredProfile, Profiles, key_of
from workers.kv.report import Report
from workers.kv.request import PLENTY_BYTES, CacheRequest
from workers.kv.settings import BLOCKS_FLAG, CacheSettings

logger = logging.getLogger("vllm.sparkd.kv")

# Seconds over which the least free memory is read: other processes vary, and freed memory comes back late. KNOWN_WINDOW_S: for a GPU's own
# memory, which no other process uses.
WINDOW_S, KNOWN_WINDOW_S = 1.0, 0.2
# A profile counts as wrong where free memory differs from the expectation by more.
ERROR_BYTES, ERROR_SHARE = GIB // 4, 0.01
# Each failed rehearsal halves the next one's batch, down to an eighth; the peak is scaled up accordingly.
MOST_SETBACKS = 3
# The difference between two compile runs of the same batch that is normal: Triton's autotuner alone holds 256 MiB while it measures.
WARM_BYTES, WARM_SHARE = GIB // 2, 0.1
# Where a function that is private to vLLM is missing, or exists and behaves differently.
OF_ANOTHER_RELEASE = (MissingSymbol, AttributeError, TypeError, ImportError, AssertionError)
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the next try may succeed


class Rehearsal(Batches, Protocol):
    """The platform's part of a rehearsal."""

    def warm(self) -> int:
        """Run the first step of a start, before the KV cache exists: vLLM compiles the model. Returns the peak bytes of its batch, 0 where
        unknown. Raises RanOut."""

    def rehearse(self, scale: float) -> Demand:
        """Run the largest batches on a minimal cache and remove it; the compile run's peak does not count. Raises MissingSymbol, RanOut."""

    def keep(self) -> None:
        """Run the largest batches on the real cache, after the capture, and keep their memory. Raises MissingSymbol, RanOut."""

    def read(self) -> MemoryReading: ...

    def watch(self) -> MemoryReading:
        """The reading that the floor watches. Where the cache is in the host's memory it asks no driver, which may hang."""

    def taken(self) -> int:
        """Bytes that all processes of the engine on this host hold in the memory of the cache."""

    def idle(self) -> int:
        """Bytes that the engine's own allocator keeps in reserve: a batch can use them, though the system counts them as taken."""


class RanOut(Exception):
    """The device has refused memory in a rehearsal; the message is the allocator's own."""


class _Wrong(Exception):
    """A profile is not credible; the message is the reason."""


class Sizing:
    """need: computes the costs of the model's cache; None for a model without one. identity: everything that the demand depends on. leave:
    ends the process with an exit code. gather: exchanges values between the engine's ranks, which agree whether they rehearse. assumed: the
    demand of an engine that never rehearses, nor learns.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        settings: CacheSettings,
        need: Callable[[], CacheCosts | None],
        identity: Callable[[], Mapping[str, Any]],
        rank: int = 0,
        leave: Callable[[int], Any] = os._exit,
        gather: Gather[Any] = alone,
        assumed: Demand | None = None,
    ) -> None:
        self._rehearsal = rehearsal
        self._settings = settings
        self._wish = CacheRequest(settings, rehearsal.taken)
        self._need_of = need
        self._identity = identity
        self._rank = rank
        self._gather = gather
        self._assumed = assumed
        self._profiles = Profiles(None if assumed else settings.profiles, settings.engine)
        self._report = Report(settings.report, rank)
        self._key = ""
        self._about: Mapping[str, Any] = {}
        self._learned: MeasuredProfile | None = None
        self._warm_bytes = 0
        self._ranks = 1
        self._pool: CachePool | None = None
        self._held = 0
        self._need: CacheCosts | None = None
        self._seconds = 0.0
        self._sentence = ""
        self._source = ""
        self._leave = leave
        self.under_load: UnderLoad | None = None

    def determine(self, stock: Callable[[int | None], int]) -> int:
        """Bytes for vLLM's cache. Raises ValueError with the arithmetic if it does not fit.

        stock: vLLM's own sizing within a number of bytes (None: no limit), for a cache that cannot be rehearsed.
        """
        try:
            course = self._course()
            reason = course.missing
            if self._need is not None and not reason:
                return self._together(self._need, course)
        except CacheDoesNotFit as sentence:
            self._report.tell("refused", why=str(sentence))
            raise ValueError(str(sentence)) from None
        except RanOut as refusal:
            raise self._set_back(refusal) from None
        except OF_ANOTHER_RELEASE as error:
            reason = _difference(error)
        if reason:
            return self._by_vllm(stock, reason)
        size = stock(None)  # the model, or this stage of it, has no cache
        if course.source == "profile":
            self._gather("")
        return size

    @property
    def is_sized(self) -> bool:
        """False where vLLM sizes its cache itself, because the release may lack the symbols to examine that cache."""
        return self._pool is not None

    def allocated(self, requests: float, max_model_len: int | None = None) -> None:
        """Called once vLLM has allocated the cache.

        requests: the number of requests of max_model_len tokens that it holds.
        max_model_len: None where vLLM has not changed it.
        """
        if self._pool is None or self._need is None:
            return
        if max_model_len is not None:
            self._need = self._need.shortened(max_model_len)
        tokens = int(requests * self._need.max_model_len)
        size = round(requests * self._need.per_request)
        # The cache is smaller by more than a block: another rank had less memory.
        other = self._pool.bytes - size > 2 * self._need.per_block and self._pool.bytes > size
        if other:
            # Memory that stays free because of another rank is no error of this rank's profile.
            self._pool = replace(self._pool, bytes=size)
        self._sentence = (
            f"{size / GIB:.2f} GiB of KV cache = {tokens:,} tokens = {requests:.1f} requests of {self._need.max_model_len:,} tokens "
            f"({self._need.per_token / 1024:.1f} KiB a token)"
        )
        self._report.tell(
            "sized",
            pool_bytes=size,
            tokens=tokens,
            sequences=requests,
            bytes_per_token=self._need.per_token,
            limited_by_other_rank=other,
        )

    def ready(self) -> None:
        """Called after warm-up and capture: run the largest batches once more, so that ready means that they have fitted, compare the free
        memory with the expectation, and keep the profile for the next start."""
        if self._pool is None or self._need is None:
            return
        try:
            self._rehearsal.keep()
        except RanOut as refusal:
            raise self._set_back(refusal) from None
        except OF_ANOTHER_RELEASE as other:
            logger.warning("sparkd: the largest batch was not run on the real cache: %s: %s", type(other).__name__, other)
        reading = lowest(self._rehearsal.read, KNOWN_WINDOW_S)
        idle = self._rehearsal.idle()
        slack = reading.room + idle
        demand = self._pool.demand
        error = slack - self._pool.expected_slack
        # By how much less the engine itself holds, its allocator's reserve apart, than it should.
        grown = (self._rehearsal.taken() - self._held) // reading.sharers - (idle - demand.reusable)
        own = self._pool.bytes + demand.graphs - grown
        if abs(error) > max(ERROR_BYTES, int(ERROR_SHARE * reading.size)) and self._source != "limit":
            agreed = error
            if reading.is_shared:
                agreed = min(error, max(0, own)) if error > 0 else max(error, min(0, own))
            demand = replace(demand, graphs=max(0, demand.graphs - agreed))
            what_now = "the profile is corrected" if self._learned is not None else "the next start knows"
            if demand == self._pool.demand:
                what_now = "other processes' memory is the difference, and the profile stays"
            expected = self._pool.expected_slack
            logger.info("sparkd: %.2f GiB are free where %.2f GiB were expected; %s.", slack / GIB, expected / GIB, what_now)
        starts = 0 if self._learned is None else self._learned.starts + 1
        # Keep the first measurement: a comparison with the last one would never notice slow growth.
        warm = (self._learned.warm if self._learned is not None else 0) or self._warm_bytes
        profile = MeasuredProfile(demand, self._seconds, starts, error, slack, warm)
        if self._source != "limit":
            self._profiles.keep(self._key, profile, self._about)
            self._watch_load(profile)
        batch = int(demand.peak * PEAK_FACTOR) or PLENTY_BYTES
        self._report.tell("ready", slack_bytes=slack, error_bytes=error, growth_bytes=max(0, batch - idle))
        logger.info("sparkd: %s; %.2f GiB are free, the margin is %.2f GiB.", self._sentence, slack / GIB, self._pool.margin / GIB)

    def _watch_load(self, profile: MeasuredProfile) -> None:
        def beyond(taken: int) -> None:
            reason = f"a batch took {taken / GIB:.2f} GiB for a moment where {profile.demand.peak / GIB:.2f} GiB were learned"
            self._profiles.keep(self._key, replace(profile, demand=replace(profile.demand, peak=taken)), self._about)
            self._report.tell("ready", peak_why=reason)
            logger.warning("sparkd: %s; the profile is corrected, and the next start leaves room for it.", reason)

        planned = int(profile.demand.peak * PEAK_FACTOR)
        self.under_load = UnderLoad(self._rehearsal, planned, lambda taken: self._report.tell("ready", load_peak_bytes=taken), beyond)

    def _course(self) -> Course:
        """The course of all ranks, after they have exchanged their votes. Raises CacheDoesNotFit, MissingSymbol."""
        votes = self._gather(self._vote())
        self._ranks = len(votes)
        course = course_of(votes, self._rank)
        if course.refusal:
            raise CacheDoesNotFit(course.refusal)
        if course.source != "profile":
            self._learned = None
        return course

    def _vote(self) -> Vote:
        try:
            self._need = need = self._need_of()
            if need is None:
                return Vote(self._rank)
            self._about = self._identity()
        except OF_ANOTHER_RELEASE as error:
            return Vote(self._rank, missing=_difference(error))
        self._key = key_of(self._about)
        before = self._rehearsal.read()
        floor = floor_of(self._wish.margin(before))
        self._learned = self._profiles.find(self._key)
        if before.room < floor:
            return Vote(self._rank, refusal=too_little(before.room, floor, need, self._rehearsal.taken() // before.sharers))
        setbacks = self._profiles.setbacks(self._key)
        plenty = self._assumed is not None or self._wish.is_plenty(need, before)
        return Vote(self._rank, self._learned is not None, plenty, setbacks)

    def _together(self, need: CacheCosts, course: Course) -> int:
        """The size by the common course. Where one rank doubts its profile, or has no room by it, all ranks rehearse."""
        if course.source != "profile":
            return self._sized(need, course)
        size, doubt = 0, ""
        try:
            size = self._sized(need, course)
        except (CacheDoesNotFit, _Wrong) as sentence:
            doubt = str(sentence)
        doubts = [(rank, refusal) for rank, refusal in enumerate(self._gather(doubt)) if refusal]
        if not doubts:
            return size
        rank, reason = doubts[0]
        who = "" if self._ranks == 1 else f"rank {rank}: "
        logger.info("sparkd: the profile of earlier starts no longer holds (%s%s) The rehearsal is done again.", who, reason)
        self._learned = None
        return self._sized(need, Course("rehearsal", why=f"{who}{reason}"))

    def _sized(self, need: CacheCosts, course: Course) -> int:
        """The size of this rank's cache. Raises CacheDoesNotFit, MissingSymbol, RanOut; _Wrong where a profile is not credible."""
        self._report.tell("rehearsing", source=course.source)
        began = time.monotonic()
        demand = self._assumed or Demand()
        with Floor(self._rehearsal.watch, floor_of(self._wish.margin(self._rehearsal.read())), self._ended):
            if course.source == "rehearsal":
                demand = self._rehearsed(course.setbacks)
                self._seconds = time.monotonic() - began
            else:
                self._warm_bytes = self._rehearsal.warm()
        if self._learned is not None:
            self._believe(self._learned)
            # The allocator's reserve is that of this start, not the profile's.
            demand = replace(self._learned.demand, reusable=self._rehearsal.idle())
            self._seconds = self._learned.seconds
        long = course.source == "rehearsal" and self._rehearsal.read().is_shared
        reading = lowest(self._rehearsal.read, WINDOW_S if long else KNOWN_WINDOW_S)
        wish = self._wish
        bounds = SizeBounds(
            wish.asked(need), self._settings.at_most_bytes, wish.reserved(reading), by_blocks=self._settings.blocks is not None
        )
        sized = pool(reading.room, demand, wish.margin(reading), need, bounds)
        self._held = self._rehearsal.taken()
        reasons = "; ".join(reason for reason in (wish.why(), sized.limit, course.why) if reason) or None
        self._pool = sized
        self._source = course.source
        self._report.tell(
            "sized",
            source=course.source,
            source_why=reasons,
            pool_bytes=sized.bytes,
            room_bytes=sized.room,
            margin_bytes=sized.margin,
            spare_bytes=sized.spare,
            **(demand.figures() if course.source != "limit" else {}),  # nothing was measured there
        )
        beside = f"{demand.ahead / GIB:.2f} GiB for graphs and the largest batch and " if demand.ahead else ""
        logger.info(
            "sparkd: %.2f GiB for the KV cache by %s%s: of %.2f GiB, less %s%.2f GiB margin%s.",
            sized.bytes / GIB,
            course.source,
            f" ({reasons})" if reasons else "",
            sized.room / GIB,
            beside,
            sized.margin / GIB,
            f"; {sized.spare / GIB:.2f} GiB stay unused" if sized.spare else "",
        )
        return sized.bytes

    def _believe(self, learned: MeasuredProfile) -> None:
        """Compare a profile with this start's compile run, which has the whole batch. Raises _Wrong where the peaks differ too much."""
        now, before = self._warm_bytes, learned.warm
        most = before or int(learned.demand.peak * PEAK_FACTOR)
        off = now - most if not before else abs(now - before)
        if now and off > max(WARM_BYTES, int(most * WARM_SHARE)):
            raise _Wrong(f"a batch took {now / GIB:.2f} GiB for a moment where {most / GIB:.2f} GiB were learned.")

    def _by_vllm(self, stock: Callable[[int | None], int], why: str) -> int:
        """vLLM's own sizing, within the requested limits as far as vLLM can keep them; the log names the others."""
        reading, need = self._rehearsal.read(), self._need
        settings, by_blocks = self._settings, self._settings.blocks is not None
        requested = (None if by_blocks else settings.bytes) if need is None else self._wish.asked(need)
        limit = requested if requested is not None or by_blocks else self._wish.limit(reading)
        lost = [name for name in ("tokens", "sequences") if getattr(settings, name) is not None and need is None and not by_blocks]
        addition = "" if limit is None else f", at most {limit / GIB:.2f} GiB"
        addition += f" ({self._wish.why()})" if by_blocks else ""
        addition += f"; `{lost[0]}` of kv_cache cannot be kept" if lost else ""
        logger.warning("sparkd: %s; it sizes its KV cache itself%s. The margin stays free, though no batch was rehearsed.", why, addition)
        self._report.tell("stock", why=f"{why}{addition}")
        self._pool = None
        size = stock(limit)
        after = self._rehearsal.read()
        left = max(0, after.room - self._wish.margin(after))
        if by_blocks and need is not None and requested is not None and requested > left:  # vLLM allocates blocks whatever this returns
            sentence = (
                f"{self._wish.why()}, which are {requested / GIB:.2f} GiB, but only {left / GIB:.2f} GiB are available without the margin. "
                f"Set {BLOCKS_FLAG} {left // need.per_block} or less."
            )
            self._report.tell("refused", why=sentence)
            raise ValueError(sentence)
        return min(size, left)

    def _rehearsed(self, setbacks: int) -> Demand:
        """The demand, by a rehearsal with a batch that is halved for each setback. Raises MissingSymbol, RanOut."""
        scale = 0.5 ** min(setbacks, MOST_SETBACKS)
        if setbacks:
            logger.warning("sparkd: memory ran out in %d rehearsals before; this one has %.3g of the batch.", setbacks, scale)
        demand = self._rehearsal.rehearse(scale)
        self._profiles.forgive(self._key)
        return demand

    def _set_back(self, refusal: RanOut) -> ValueError:
        self._profiles.set_back(self._key)
        reason = f"memory ran out in the rehearsal of the KV cache ({refusal}); the next start tries a smaller batch"
        self._report.tell("refused", why=reason)
        message = f"{reason}. To start now, set a smaller max_num_batched_tokens or max_num_seqs, or 4-bit weights."
        if self._ranks > 1:
            # The other ranks wait for this one within the batch; only the end of this process frees them.
            logger.critical("sparkd: %s", message)
            logging.shutdown()
            self._leave(EXIT_CODE)
        return ValueError(message)

    def _ended(self, reading: MemoryReading) -> None:
        """Called on the watching thread: end the process at once, even where the report of the reason fails, so that its memory is
        freed."""
        try:
            self._profiles.set_back(self._key)
            what_now = "the next start tries a smaller batch" if self._assumed is None else "set a smaller max_num_batched_tokens"
            when = "in the rehearsal" if self._assumed is None else "while the model was compiled"
            reason = f"memory ran out {when} ({reading.room / GIB:.2f} GiB were left); {what_now}"
            self._report.tell("refused", why=reason)
            logger.critical("sparkd: %s.", reason)
            logging.shutdown()
        finally:
            self._leave(EXIT_CODE)


def _difference(error: Exception) -> str:
    """Why this release of vLLM has to size its cache itself. error: one of OF_ANOTHER_RELEASE."""
    if isinstance(error, MissingSymbol):
        return f"this vLLM has no {error.symbol}"
    logger.debug("sparkd: the rehearsal", exc_info=error)
    return f"this vLLM's rehearsal is another one ({type(error).__name__}: {error})"
