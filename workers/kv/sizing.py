"""One worker's way from placed weights to a cache: rehearse or remember, read, subtract, check afterwards. Never runs the model itself."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from workers.kv.arithmetic import GIB, Demand, DoesNotFit, Need, Pool, margin_of, pool
from workers.kv.floor import Floor, floor_of
from workers.kv.profiles import Learned, Profiles, key_of
from workers.kv.readings import Reading, lowest
from workers.kv.report import Report
from workers.kv.settings import Settings
from workers.kv.symbols import Missing

logger = logging.getLogger("vllm.sparkd.kv")

# What is left is read as a minimum over so long: other processes breathe, and freed memory comes back late. A GPU's own memory is known.
WINDOW_S, KNOWN_WINDOW_S = 1.0, 0.2
# So far may free memory be from what was expected before a profile counts as wrong.
ERROR_BYTES, ERROR_SHARE = GIB // 4, 0.01
# The largest batches of the models that fit one Spark need 2 to 17 GiB for a moment; those of a CPU's models less than one.
PLENTY_BYTES, PLENTY_SHARE = 8 * GIB, 0.5
# A batch is not made smaller than an eighth: its peak is then taken times eight.
MOST_SETBACKS = 3
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the next try may do


class Rehearsal(Protocol):
    """The platform's part."""

    def warm(self) -> None:
        """What every start does before its cache is there: the model is compiled. Raises RanOut."""

    def rehearse(self, scale: float) -> Demand:
        """The largest batches on a minimal cache, torn down again; the compile run's own peak is not counted. Raises Missing, RanOut."""

    def read(self) -> Reading: ...

    def untouched(self, pool_bytes: int) -> int:
        """Of an allocated cache, the bytes that the system still counts as free."""

    def taken(self) -> int:
        """Bytes that the whole engine holds of the memory that the cache will be in, all its processes on this host together."""

    def idle(self) -> int:
        """Bytes that the engine's own allocator keeps and that a batch can have at once, though the system counts them as taken."""


class RanOut(Exception):
    """The device has refused memory in a rehearsal; the message is the allocator's own."""


class Sizing:
    """need: asks what the model's cache costs; None for a model without a cache. identity: everything that the demand depends on. leave:
    ends the process, with an exit code.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        settings: Settings,
        need: Callable[[], Need | None],
        identity: Callable[[], Mapping[str, Any]],
        rank: int = 0,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self._rehearsal = rehearsal
        self._settings = settings
        self._need_of = need
        self._identity = identity
        self._profiles = Profiles(settings.profiles)
        self._report = Report(settings.report, rank)
        self._key = ""
        self._about: Mapping[str, Any] = {}
        self._learned: Learned | None = None
        self._setbacks = 0
        self._pool: Pool | None = None
        self._need: Need | None = None
        self._seconds = 0.0
        self._sentence = ""
        self._source = ""
        self._leave = leave

    def determine(self, stock: Callable[[], int]) -> int:
        """Bytes for vLLM. stock: its own way, for what cannot be rehearsed. Raises ValueError with the arithmetic where it does not fit."""
        try:
            need = self._need_of()
            if need is None:
                return stock()
            self._need = need
            self._about = self._identity()
            self._key = key_of(self._about)
            # The compile run of a start that does not rehearse has the whole batch: after a setback a smaller one is rehearsed.
            self._setbacks = self._profiles.setbacks(self._key)
            self._learned = None if self._setbacks else self._profiles.find(self._key)
            try:
                return self._sized(need)
            except DoesNotFit as sentence:
                if self._learned is None:
                    raise
                logger.info("sparkd: with what was learned before it does not fit (%s) The rehearsal is done again.", sentence)
                self._learned = None
                return self._sized(need)
        except DoesNotFit as sentence:
            self._report.tell("refused", why=str(sentence))
            raise ValueError(str(sentence)) from None
        except RanOut as refusal:
            self._profiles.set_back(self._key)
            why = f"memory ran out in the rehearsal of the KV cache ({refusal}); the next start tries a smaller batch"
            self._report.tell("refused", why=why)
            raise ValueError(f"{why}. What helps at once: a smaller max_num_batched_tokens or max_num_seqs, or 4-bit weights.") from None
        except Missing as symbol:
            why = f"this vLLM has no {symbol}"
        except (AttributeError, TypeError, ImportError, AssertionError) as error:
            # A private function that is there and is another one.
            logger.debug("sparkd: the rehearsal", exc_info=True)
            why = f"this vLLM's rehearsal is another one ({type(error).__name__}: {error})"
        logger.warning("sparkd: %s; it sizes its KV cache itself.", why)
        self._report.tell("stock", why=why)
        self._pool = None
        return stock()

    def allocated(self, requests: float) -> None:
        """The cache is there. requests: of max_model_len tokens that it holds."""
        if self._pool is None or self._need is None:
            return
        tokens = int(requests * self._need.max_model_len)
        given = round(requests * self._need.per_request)
        # More than a block: another rank had less.
        other = self._pool.bytes - given > 2 * self._need.per_block and self._pool.bytes > given
        if other:
            # What is left over for the other's sake is no error of this rank's profile.
            self._pool = replace(self._pool, bytes=given)
        self._sentence = (
            f"{given / GIB:.2f} GiB of KV cache = {tokens:,} tokens = {requests:.1f} requests of {self._need.max_model_len:,} tokens "
            f"({self._need.per_token / 1024:.1f} KiB a token)"
        )
        self._report.tell(
            "sized",
            pool_bytes=given,
            tokens=tokens,
            sequences=requests,
            bytes_per_token=self._need.per_token,
            limited_by_other_rank=other,
        )

    def ready(self) -> None:
        """After warm-up and capture: how much is really free, and what the next start should know."""
        if self._pool is None or self._need is None:
            return
        reading = lowest(self._rehearsal.read, KNOWN_WINDOW_S)
        slack = reading.room + self._rehearsal.idle() - self._rehearsal.untouched(self._pool.bytes)
        error = slack - self._pool.expected_slack
        wrong = abs(error) > max(ERROR_BYTES, int(ERROR_SHARE * reading.size))
        demand = self._pool.demand
        if wrong and self._source != "plenty":
            demand = replace(demand, graphs=max(0, demand.graphs - error))
            logger.info(
                "sparkd: %.2f GiB are free where %.2f GiB were expected; %s.",
                slack / GIB,
                self._pool.expected_slack / GIB,
                "the profile is corrected" if self._learned is not None else "the next start knows",
            )
        starts = 0 if self._learned is None else self._learned.starts + 1
        if self._source != "plenty" and (wrong or self._learned is None or starts == 1):
            self._profiles.keep(self._key, Learned(demand, self._seconds, starts, error, slack), self._about)
        self._report.tell("ready", slack_bytes=slack, error_bytes=error)
        logger.info("sparkd: %s; %.2f GiB are free, %.2f GiB of them the margin.", self._sentence, slack / GIB, self._pool.margin / GIB)

    def _sized(self, need: Need) -> int:
        self._report.tell("rehearsing")
        began = time.monotonic()
        with self._watched():
            if self._learned is not None:
                self._rehearsal.warm()
                source, demand = "profile", self._learned.demand
                self._seconds = self._learned.seconds
            elif not self._setbacks and self._is_plenty(need):
                self._rehearsal.warm()
                source, demand = "plenty", Demand()
            else:
                source, demand = "rehearsal", self._rehearsed()
                self._seconds = time.monotonic() - began
        long = source == "rehearsal" and self._rehearsal.read().is_shared
        reading = lowest(self._rehearsal.read, WINDOW_S if long else KNOWN_WINDOW_S)
        made = pool(
            reading.room,
            demand,
            self._margin(reading),
            need,
            self._asked(need),
            self._at_most(demand, reading),
        )
        self._pool = made
        self._source = source
        self._report.tell(
            "sized",
            source=source,
            pool_bytes=made.bytes,
            room_bytes=made.room,
            margin_bytes=made.margin,
            graphs_bytes=demand.graphs,
            peak_bytes=demand.peak,
            weights_bytes=demand.weights,
            spare_bytes=made.spare,
        )
        logger.info(
            "sparkd: %.2f GiB for the KV cache by %s: of %.2f GiB, less %.2f GiB for graphs and the largest batch and %.2f GiB margin.",
            made.bytes / GIB,
            source,
            made.room / GIB,
            demand.ahead / GIB,
            made.margin / GIB,
        )
        return made.bytes

    def within_reservation(self) -> int | None:
        """Bytes that a reservation leaves to a cache whose batches were not rehearsed; None without one."""
        return self._at_most(Demand(), self._rehearsal.read()) if self._settings.reserved_bytes is not None else None

    def _at_most(self, demand: Demand, reading: Reading) -> int | None:
        """A limit on what `auto` takes: the one that was given, and what the reservation leaves by what the engine really holds."""
        given, reserved = self._settings.at_most_bytes, self._settings.reserved_bytes
        if reserved is None:
            return given
        exact = max(0, (reserved - self._rehearsal.taken()) // reading.sharers - demand.ahead)
        return exact if given is None else min(given, exact)

    def _is_plenty(self, need: Need) -> bool:
        """Whether a cache of the size that was asked for leaves so much that no batch could need it: then nothing has to be rehearsed."""
        asked = self._asked(need)
        reading = self._rehearsal.read()
        size = self._settings.at_most_bytes if asked is None else asked
        within = None if asked is not None else self._at_most(Demand(), reading)
        if size is None or (within is not None and within < size + PLENTY_BYTES and self._settings.reserved_bytes is not None):
            return False
        left = reading.room - size - self._margin(reading)
        return left >= max(PLENTY_BYTES, int(reading.room * PLENTY_SHARE))

    def _watched(self) -> Floor:
        """To be entered around what takes memory for a moment: where it runs out meanwhile, the process ends. Raises DoesNotFit where there
        is no room to begin."""
        before = self._rehearsal.read()
        floor = floor_of(self._margin(before))
        if before.room < floor:
            raise DoesNotFit(
                f"{before.room / GIB:.2f} GiB are left with the weights in memory; under {floor / GIB:.2f} GiB nothing is tried. "
                "What helps: 4-bit weights (quantize: nvfp4), or ending what else uses the memory."
            )
        return Floor(self._rehearsal.read, floor, self._ended)

    def _rehearsed(self) -> Demand:
        """Raises Missing, RanOut."""
        scale = 0.5 ** min(self._setbacks, MOST_SETBACKS)
        if self._setbacks:
            logger.warning("sparkd: memory ran out in %d rehearsals before; this one has %.3g of the batch.", self._setbacks, scale)
        demand = self._rehearsal.rehearse(scale)
        self._profiles.forgive(self._key)
        return demand

    def _ended(self, reading: Reading) -> None:
        """On the watching thread: the process ends at once, and the system has its memory back."""
        self._profiles.set_back(self._key)
        why = f"memory ran out in the rehearsal ({reading.room / GIB:.2f} GiB were left); the next start tries a smaller batch"
        self._report.tell("refused", why=why)
        logger.critical("sparkd: %s.", why)
        logging.shutdown()
        self._leave(EXIT_CODE)

    def _margin(self, reading: Reading) -> int:
        """This rank's part of what is to stay free on the machine."""
        asked = self._settings.margin_bytes
        return margin_of(reading.size, None if asked is None else asked // reading.sharers)

    def _asked(self, need: Need) -> int | None:
        """Bytes of a cache of a given size; None for all that is left. The block that vLLM keeps for itself is added."""
        settings = self._settings
        block = need.per_block
        if settings.bytes is not None:
            return settings.bytes
        if settings.tokens is not None:
            return _whole(settings.tokens * need.per_token, block) + block
        if settings.sequences is not None:
            tokens = min(settings.at or need.max_model_len, need.max_model_len)
            each = need.per_request if tokens == need.max_model_len else _whole(tokens * need.per_token, block)
            return settings.sequences * each + block
        return None


def _whole(size: float, block: int) -> int:
    return -int(-size // block) * block
