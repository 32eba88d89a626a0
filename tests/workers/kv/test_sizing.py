from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkd.errors import MissingSymbol
from tests.support.facts import facts
from tests.support.waiting import HUNG_S
from workers.kv.arithmetic import GIB, CacheCosts, Demand
from workers.kv.memory import MemoryReading
from workers.kv.profiles import MeasuredProfile, Profiles, key_of
from workers.kv.request import PLENTY_BYTES
from workers.kv.settings import CacheSettings
from workers.kv.sizing import RanOut, Sizing

BLOCK = GIB // 256
NEED = CacheCosts(per_request=GIB, least=GIB + BLOCK, max_model_len=8192)
DEMAND = Demand(graphs=GIB, peak=2 * GIB, weights=30 * GIB)
STOCK = 4711


class Machine:
    """A rehearsal whose machine has so much room, of which the cache takes its part once it is there."""

    def __init__(self, room: int, demand: Demand = DEMAND, *, missing: str = "", ran_out: str = "", sharers: int = 1) -> None:
        self.room = room
        self.sharers = sharers
        self.demand = demand
        self.missing = missing
        self.ran_out = ran_out
        self.reserve = 0
        self.batch = 0
        self.kept = self.own = 0
        self.refuses = ""
        self.did: list[str] = []

    def warm(self) -> int:
        self.did.append("warm")
        if self.ran_out:
            raise RanOut(self.ran_out)
        return self.batch

    def rehearse(self, scale: float) -> Demand:
        self.did.append(f"rehearse {scale}")
        if self.missing:
            raise MissingSymbol("it is missing", symbol=self.missing)
        if self.ran_out:
            raise RanOut(self.ran_out)
        return self.demand

    def keep(self) -> None:
        """The allocator keeps what the largest batch took of the room."""
        if self.refuses:
            raise RanOut(self.refuses)
        self.kept += 1
        taken = max(0, self.demand.peak - self.reserve)
        self.own += taken
        self.room, self.reserve = self.room - taken * self.sharers, self.reserve + taken

    def read(self) -> MemoryReading:
        return MemoryReading(128 * GIB, self.room, self.room, 0, sharers=self.sharers)

    def watch(self) -> MemoryReading:
        return self.read()

    def taken(self) -> int:
        return self.demand.weights + 3 * GIB + self.own

    def idle(self) -> int:
        return self.reserve

    def mark(self) -> None: ...

    def taken_by_batch(self) -> int:
        return self.batch


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.kv.sizing.WINDOW_S", 0.0)
    monkeypatch.setattr("workers.kv.sizing.KNOWN_WINDOW_S", 0.0)


def start(machine: Machine, folder: Path, leave: Callable[[int], None] = lambda _code: None, **settings: Any) -> tuple[Sizing, int]:
    (folder / "profiles").mkdir(exist_ok=True)
    known = CacheSettings(**{"margin_bytes": GIB, "profiles": str(folder / "profiles"), "report": str(folder / "report"), **settings})
    sizing = Sizing(machine, known, lambda: NEED, lambda: {"model": "m"}, leave=leave)
    return sizing, sizing.determine(lambda _limit: STOCK)


def serve(sizing: Sizing, machine: Machine, size: int, graphs: int) -> None:
    """The cache is allocated, graphs are captured."""
    machine.room -= size + graphs
    machine.own += size + graphs
    sizing.allocated((size - BLOCK) / NEED.per_request)
    sizing.ready()


def told(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report").read_text())["cache"]
    return found


def learned_in(folder: Path) -> MeasuredProfile:
    profile = Profiles(str(folder / "profiles")).find(key_of({"model": "m"}))
    assert profile is not None
    return profile


@pytest.mark.parametrize(("settings", "kept"), [({}, 1), ({"bytes": 10 * GIB}, 1)])
def test_ready_means_that_the_largest_batch_has_fitted(tmp_path, settings, kept):
    machine = Machine(40 * GIB)
    sizing, size = start(machine, tmp_path, **settings)
    serve(sizing, machine, size, DEMAND.graphs)
    assert (machine.kept, told(tmp_path)["phase"]) == (kept, "ready")


def test_an_engine_may_grow_by_what_a_real_batch_takes_beyond_the_kept_one(tmp_path):
    machine = Machine(40 * GIB)
    sizing, size = start(machine, tmp_path)
    serve(sizing, machine, size, DEMAND.graphs)
    assert told(tmp_path)["growth_bytes"] == int(DEMAND.peak * 1.25) - DEMAND.peak

    other = tmp_path / "other"
    other.mkdir()
    machine = Machine(60 * GIB)
    machine.keep = lambda: None  # type: ignore[method-assign]
    sizing, size = start(machine, other, bytes=10 * GIB)
    serve(sizing, machine, size, DEMAND.graphs)
    assert told(other)["growth_bytes"] == PLENTY_BYTES, "no batch was rehearsed"


@pytest.mark.parametrize("error", [MissingSymbol("it is missing", symbol="_dummy_run"), TypeError("unexpected keyword"), AssertionError()])
def test_a_release_that_runs_no_largest_batch_on_the_real_cache_is_ready_all_the_same(tmp_path, caplog, monkeypatch, error):
    machine = Machine(40 * GIB)
    sizing, size = start(machine, tmp_path)

    def keep() -> None:
        raise error

    monkeypatch.setattr(machine, "keep", keep)
    serve(sizing, machine, size, DEMAND.graphs)
    assert told(tmp_path)["phase"] == "ready"
    assert type(error).__name__ in caplog.text


def test_a_device_that_refuses_the_largest_batch_on_the_real_cache_is_not_ready(tmp_path):
    machine = Machine(40 * GIB)
    sizing, size = start(machine, tmp_path)
    machine.refuses = "CUDA out of memory. Tried to allocate 2.00 GiB"
    with pytest.raises(ValueError, match=re.escape(machine.refuses)):
        serve(sizing, machine, size, DEMAND.graphs)
    assert told(tmp_path)["phase"] == "refused"
    following = Machine(40 * GIB)
    start(following, tmp_path)
    assert following.did == ["rehearse 0.5"]


def test_the_first_start_rehearses_and_the_second_remembers(tmp_path):
    first = Machine(40 * GIB)
    sizing, size = start(first, tmp_path)
    assert size == int((40 - 1 - 2.5 - 1) * GIB)
    assert first.did == ["rehearse 1.0"]
    assert (told(tmp_path)["phase"], told(tmp_path)["source"]) == ("sized", "rehearsal")
    serve(sizing, first, size, GIB)
    report = told(tmp_path)
    assert (report["phase"], report["slack_bytes"]) == ("ready", int(3.5 * GIB))
    assert report["tokens"] == int((size - BLOCK) / GIB * 8192)
    profile = learned_in(tmp_path)
    assert (profile.demand, profile.slack, profile.error) == (DEMAND, report["slack_bytes"], 0)

    second = Machine(50 * GIB)
    _, larger = start(second, tmp_path)
    assert larger == size + 10 * GIB
    assert second.did == ["warm"]
    assert told(tmp_path)["source"] == "profile"


@pytest.fixture(autouse=True)
def _heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM, where another test has imported it, keeps its loggers' lines to itself."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def test_a_profile_that_turned_out_wrong_is_corrected_and_said_so(tmp_path, caplog):
    caplog.set_level(logging.INFO, "vllm.sparkd.kv")
    first = Machine(40 * GIB)
    serve(*_sized(first, tmp_path), GIB)
    second = Machine(40 * GIB)
    sizing, size = start(second, tmp_path)
    serve(sizing, second, size, 4 * GIB)  # the graphs took 3 GiB more
    assert "0.50 3.50 " in facts(caplog.text) and "corrected" in caplog.text
    assert told(tmp_path)["error_bytes"] == -3 * GIB
    assert learned_in(tmp_path).demand == replace(DEMAND, graphs=4 * GIB)

    third = Machine(40 * GIB)
    sizing, smaller = start(third, tmp_path)
    assert smaller == size - 3 * GIB
    caplog.clear()
    serve(sizing, third, smaller, 4 * GIB)
    assert "corrected" not in caplog.text
    assert told(tmp_path)["slack_bytes"] == int(3.5 * GIB)


def test_a_gpus_own_memory_is_the_engines_alone_and_what_its_driver_takes_corrects_the_profile(tmp_path, monkeypatch):
    """The engine's own counters do not show the driver's part of a graph."""
    machine = Machine(40 * GIB)
    monkeypatch.setattr(machine, "read", lambda: MemoryReading(128 * GIB, 0, 0, 0, device_free=machine.room, device_total=128 * GIB))
    sizing, size = start(machine, tmp_path)
    machine.room -= 3 * GIB
    serve(sizing, machine, size, DEMAND.graphs)
    assert told(tmp_path)["error_bytes"] == -3 * GIB
    assert learned_in(tmp_path).demand == replace(DEMAND, graphs=4 * GIB)


@pytest.mark.parametrize("others", [3 * GIB, -3 * GIB])
def test_what_others_took_or_gave_back_corrects_nothing_and_is_not_said_to(tmp_path, caplog, others):
    caplog.set_level(logging.INFO, "vllm.sparkd.kv")
    machine = Machine(40 * GIB, Demand(graphs=2 * GIB, peak=GIB))
    sizing, size = start(machine, tmp_path)
    machine.room += others
    serve(sizing, machine, size, 2 * GIB)
    assert told(tmp_path)["error_bytes"] == others
    assert "other processes" in caplog.text and "corrected" not in caplog.text
    assert learned_in(tmp_path).demand == machine.demand


def _sized(machine: Machine, folder: Path) -> tuple[Sizing, Machine, int]:
    sizing, size = start(machine, folder)
    return sizing, machine, size


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"bytes": 5 * GIB}, 5 * GIB),
        ({"tokens": 16384}, 2 * GIB + BLOCK),
        ({"sequences": 3}, 3 * GIB + BLOCK),
        ({"sequences": 4, "at": 4096}, 2 * GIB + BLOCK),
        ({"sequences": 2, "at": 1 << 20}, 2 * GIB + BLOCK),  # no request is longer than max_model_len
        ({"at_most_bytes": 6 * GIB}, 6 * GIB),
    ],
)
def test_a_cache_of_a_given_size(tmp_path, settings, expected):
    assert start(Machine(40 * GIB), tmp_path, **settings)[1] == expected


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, None),
        ({"at_most_bytes": 30 * GIB}, "30.0"),
        ({"reserved_bytes": 34 * GIB}, "memory_gib 34 3.00"),
        ({"at_most_bytes": 100 * GIB, "reserved_bytes": 100 * GIB}, None),
    ],
)
def test_the_line_of_the_log_adds_up_and_says_what_limits_it(tmp_path, caplog, settings, why):
    caplog.set_level(logging.INFO, "vllm.sparkd.kv")
    start(Machine(40 * GIB, Demand(peak=GIB)), tmp_path, **settings)
    (line,) = [one.message for one in caplog.records if "for the KV cache by" in one.message]
    size, rest = re.fullmatch(r"sparkd: ([\d.]+) GiB for the KV cache by (?:rehearsal|limit)(.*)\.", line).groups()
    because, _, terms = rest.partition(": of ")
    room, *others = (float(number) for number in re.findall(r"([\d.]+) GiB", terms))
    assert float(size) + sum(others) == pytest.approx(room, abs=0.03)
    source_why = told(tmp_path)["source_why"]
    assert because == (f" ({source_why})" if why else "")
    assert (source_why and facts(source_why)) == why


def test_a_start_that_does_not_rehearse_says_so_while_it_lasts(tmp_path):
    first = Machine(40 * GIB)
    serve(*_sized(first, tmp_path), GIB)
    seen = []
    for settings in ({}, {"bytes": 5 * GIB}):
        machine, folder = Machine(40 * GIB), tmp_path / str(settings.get("bytes", ""))
        folder.mkdir(exist_ok=True)
        warm = machine.warm
        machine.warm = lambda warm=warm, of=folder: seen.append((told(of)["phase"], told(of)["source"])) or warm()
        start(machine, folder, **settings)
    assert seen == [("rehearsing", "profile"), ("rehearsing", "limit")]


@pytest.mark.parametrize("other", [{}, {"bytes": 50 * GIB}, {"reserved_bytes": 34 * GIB}])
def test_vllms_own_number_of_blocks_decides_and_the_report_says_so(tmp_path, caplog, other):
    caplog.set_level(logging.INFO, "vllm.sparkd.kv")
    assert start(Machine(40 * GIB), tmp_path, blocks=512, **other)[1] == 2 * GIB
    why = facts(told(tmp_path)["source_why"])
    assert why == "--num-gpu-blocks-override 512" + (" kv_cache memory_gib" if other else "")
    assert f"2.00 {why} 40.00 " in facts(caplog.text)
    assert told(tmp_path)["source"] == "limit"


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        (50 * 256, "50.0 35.5 40.0 1.00 2.50 1.00 30.0 --num-gpu-blocks-override 9088"),
        (128, "8192 1.01 0.50 --num-gpu-blocks-override 257"),
    ],
)
def test_more_or_fewer_blocks_than_fit_are_refused_with_the_number_that_does(tmp_path, blocks, says):
    with pytest.raises(ValueError, match="KV cache") as raised:
        start(Machine(40 * GIB), tmp_path, blocks=blocks)
    assert facts(raised.value) == says
    assert told(tmp_path)["phase"] == "refused"


@pytest.mark.parametrize(
    ("settings", "sum_of"),
    [
        ({}, "8192 1.01 0.50 5.00 1.00 2.50 1.00 30.0 "),
        ({"bytes": 50 * GIB}, "50.0 35.5 40.0 1.00 2.50 1.00 30.0 "),
    ],
)
def test_a_refusal_has_the_arithmetic_and_is_reported(tmp_path, settings, sum_of):
    machine = Machine(5 * GIB if not settings else 40 * GIB)
    with pytest.raises(ValueError, match="KV cache") as raised:
        start(machine, tmp_path, **settings)
    assert facts(raised.value).startswith(sum_of)
    assert told(tmp_path)["phase"] == "refused"
    assert told(tmp_path)["why"] == str(raised.value)


def test_a_context_that_vllm_makes_what_fits_is_not_refused_for_the_longest(tmp_path):
    """--max-model-len -1 (vllm/v1/core/kv_cache_utils.py, _auto_fit_max_model_len)."""
    need = replace(NEED, shrinks=True)
    machine = Machine(5 * GIB)
    sizing = Sizing(machine, CacheSettings(margin_bytes=GIB, report=str(tmp_path / "report")), lambda: need, dict)
    size = sizing.determine(lambda _limit: STOCK)
    assert size == GIB // 2
    with pytest.raises(ValueError, match="KV cache") as raised:
        Sizing(Machine(5 * GIB), CacheSettings(margin_bytes=GIB), lambda: NEED, dict).determine(lambda _limit: STOCK)
    assert facts(raised.value).startswith("8192 1.01 0.50 5.00 ")
    machine.room -= size + GIB
    sizing.allocated(127 / 126, 8192 * 126 // 256)  # of 128 blocks one is vLLM's own; it took 126
    sizing.ready()
    assert (told(tmp_path)["tokens"], told(tmp_path)["bytes_per_token"]) == (4064, GIB / 8192)
    assert told(tmp_path)["pool_bytes"] == 127 * BLOCK
    with pytest.raises(ValueError, match="KV cache") as raised:
        Sizing(Machine(int(4.5 * GIB)), CacheSettings(margin_bytes=GIB), lambda: need, dict).determine(lambda _limit: STOCK)
    assert facts(raised.value).startswith("256 0.04 0.00 4.50 ")


@pytest.mark.parametrize("settings", [{"tokens": 4096}, {"bytes": GIB // 2}, {"sequences": 1, "at": 4096}])
def test_a_size_below_one_request_is_refused_where_there_is_plenty(tmp_path, settings):
    machine = Machine(40 * GIB)
    with pytest.raises(ValueError, match="KV cache") as raised:
        start(machine, tmp_path, **settings)
    # A GiB is a block short.
    assert "{bytes: 1028MiB}" in str(raised.value)
    assert machine.did == ["warm"]
    assert told(tmp_path)["why"] == str(raised.value)


def test_a_profile_that_would_refuse_is_not_believed(tmp_path):
    Profiles(str(tmp_path / "profiles")).keep(key_of({"model": "m"}), MeasuredProfile(Demand(graphs=90 * GIB), 1.0), {})
    machine = Machine(40 * GIB)
    _, size = start(machine, tmp_path)
    assert machine.did == ["warm", "rehearse 1.0"]
    assert size == int(35.5 * GIB)


def test_a_release_without_a_symbol_sizes_its_cache_itself(tmp_path, caplog):
    sizing, size = start(Machine(40 * GIB, missing="GPUModelRunner._dummy_run"), tmp_path)
    assert size == STOCK
    sizing.allocated(3.0)
    sizing.ready()
    assert "GPUModelRunner._dummy_run" in caplog.text
    assert (told(tmp_path)["phase"], facts(told(tmp_path)["why"])) == ("stock", "GPUModelRunner._dummy_run")


def test_a_model_without_a_cache_is_stocks(tmp_path):
    sizing = Sizing(Machine(GIB), CacheSettings(), lambda: None, dict)
    assert sizing.determine(lambda _limit: STOCK) == STOCK


def test_two_ranks_on_one_host_do_not_take_the_same_memory_twice(tmp_path):
    machine = Machine(40 * GIB, Demand(peak=2 * GIB), sharers=2)
    sizing, size = start(machine, tmp_path)
    assert size == 20 * GIB - int(1.25 * 2 * GIB) - GIB // 2
    serve(sizing, machine, 2 * size, 0)  # what the other rank takes is gone from the machine too
    assert told(tmp_path)["error_bytes"] == 0


def test_what_another_rank_decides_is_no_error_of_this_ones_profile(tmp_path):
    for source in ("rehearsal", "profile"):
        machine = Machine(40 * GIB)
        sizing, size = start(machine, tmp_path)
        assert (size, told(tmp_path)["source"]) == (int(35.5 * GIB), source)
        serve(sizing, machine, size - 5 * GIB, GIB)
        assert (told(tmp_path)["limited_by_other_rank"], told(tmp_path)["pool_bytes"]) == (True, size - 5 * GIB - BLOCK)
        assert abs(told(tmp_path)["error_bytes"]) <= BLOCK
        assert learned_in(tmp_path).demand == DEMAND


@pytest.mark.parametrize("text", ["", '{"v": 1}'])
def test_a_profile_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / "k.json").write_text(text)
    assert Profiles(str(tmp_path)).find("k") is None


def test_a_disk_that_refuses_half_way_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_args: Any, **_named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert Profiles(str(tmp_path)).keep("k", MeasuredProfile(DEMAND, 1.0), {}) is False
    assert list(tmp_path.iterdir()) == []


def test_profiles_that_cannot_be_kept_cost_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    assert Profiles(str(tmp_path / "file" / "x")).keep("k", MeasuredProfile(DEMAND, 1.0), {}) is False
    assert Profiles(None).keep("k", MeasuredProfile(DEMAND, 1.0), {}) is False
    kept = Profiles(str(tmp_path / "new"))
    assert kept.keep("k", MeasuredProfile(DEMAND, 1.5, 3, -7, 9), {"vllm": "0"})
    assert kept.find("k") == MeasuredProfile(DEMAND, 1.5, 3, -7, 9)


class Gone(Exception):
    """What os._exit is to a process."""


class Greedy(Machine):
    """Its rehearsal, or its compile run, takes memory until there is none, unless its batch is small."""

    def __init__(self, enough: float) -> None:
        super().__init__(40 * GIB)
        self.enough = enough
        self.left = threading.Event()

    def warm(self) -> int:
        self.rehearse(1.0)
        return 0

    def rehearse(self, scale: float) -> Demand:
        found = super().rehearse(scale)
        if scale > self.enough:
            self.room = GIB // 8
            assert self.left.wait(HUNG_S)
            raise Gone
        return found


def test_a_rehearsal_that_runs_out_of_memory_ends_and_the_next_is_smaller(tmp_path):
    codes: list[int] = []
    for expected in (1.0, 0.5, 0.25):
        machine = Greedy(enough=0.25)

        def leave(code: int, machine: Greedy = machine) -> None:
            codes.append(code)
            machine.left.set()

        if expected == 0.25:
            _, size = start(machine, tmp_path, leave)
            assert size == int(35.5 * GIB)
        else:
            with pytest.raises(Gone):
                start(machine, tmp_path, leave)
            assert told(tmp_path)["phase"] == "refused"
            assert facts(told(tmp_path)["why"]) == "0.12"
        assert machine.did == [f"rehearse {expected}"]
    assert codes == [75, 75]
    assert Profiles(str(tmp_path / "profiles")).setbacks(key_of({"model": "m"})) == 0


def test_a_device_that_refuses_memory_in_a_rehearsal_is_said_so_and_the_next_is_smaller(tmp_path):
    machine, codes = Machine(40 * GIB, ran_out="CUDA out of memory. Tried to allocate 2.00 GiB"), list[int]()
    with pytest.raises(ValueError, match=re.escape(machine.ran_out)) as raised:
        start(machine, tmp_path, codes.append)
    assert codes == [], "no other rank waits for it"
    assert facts(raised.value) == "2.00 max_num_batched_tokens max_num_seqs 4-bit"
    assert told(tmp_path)["phase"] == "refused"
    following = Machine(40 * GIB)
    assert start(following, tmp_path)[1] == int(35.5 * GIB)
    assert following.did == ["rehearse 0.5"]


WITHOUT_REHEARSAL = pytest.mark.parametrize(("learned", "settings"), [(True, {}), (False, {"sequences": 4})], ids=["profile", "limit"])


@WITHOUT_REHEARSAL
def test_a_device_that_refuses_memory_without_a_rehearsal_has_a_smaller_one_next(tmp_path, learned, settings):
    if learned:
        Profiles(str(tmp_path / "profiles")).keep(key_of({"model": "m"}), MeasuredProfile(DEMAND, 1.0), {})
    machine = Machine(40 * GIB, ran_out="CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(ValueError, match=re.escape(machine.ran_out)):
        start(machine, tmp_path, **settings)
    assert (machine.did, told(tmp_path)["phase"]) == (["warm"], "refused")
    following = Machine(40 * GIB)
    start(following, tmp_path, **settings)
    assert following.did == ["rehearse 0.5"]
    assert Profiles(str(tmp_path / "profiles")).setbacks(key_of({"model": "m"})) == 0


@WITHOUT_REHEARSAL
def test_memory_is_watched_without_a_rehearsal_too(tmp_path, learned, settings):
    if learned:
        Profiles(str(tmp_path / "profiles")).keep(key_of({"model": "m"}), MeasuredProfile(DEMAND, 1.0), {})
    machine, codes = Greedy(enough=0.25), list[int]()

    def leave(code: int) -> None:
        codes.append(code)
        machine.left.set()

    with pytest.raises(Gone):
        start(machine, tmp_path, leave, **settings)
    assert codes == [75]
    assert Profiles(str(tmp_path / "profiles")).setbacks(key_of({"model": "m"})) == 1


def test_an_engine_that_never_rehearses_promises_no_smaller_batch(tmp_path):
    """On a CPU nothing is kept of a start, so the next one would run out in the same way."""
    machine = Greedy(enough=0.25)
    known = CacheSettings(margin_bytes=GIB, report=str(tmp_path / "report"))
    leave = lambda _code: machine.left.set()  # noqa: E731
    sizing = Sizing(machine, known, lambda: NEED, lambda: {"model": "m"}, leave=leave, assumed=Demand(peak=GIB // 2))
    with pytest.raises(Gone):
        sizing.determine(lambda _limit: STOCK)
    assert told(tmp_path)["why"].startswith("memory ran out while the model was compiled")
    assert told(tmp_path)["why"].endswith("set a smaller max_num_batched_tokens")


def test_what_the_allocator_keeps_is_not_missing(tmp_path):
    machine = Machine(40 * GIB, Demand(graphs=GIB, peak=2 * GIB, reusable=GIB // 4))
    sizing, size = start(machine, tmp_path)
    machine.reserve = GIB
    serve(sizing, machine, size, GIB + GIB // 2)  # of what it takes, 1 GiB is kept for the next batch; a quarter was kept before
    assert told(tmp_path)["error_bytes"] == GIB // 4


def test_a_profile_tells_how_many_used_it_and_how_the_last_one_went(tmp_path):
    for number in range(4):
        machine = Machine(40 * GIB)
        machine.batch = 2 * GIB + number * GIB // 16
        sizing, size = start(machine, tmp_path)
        serve(sizing, machine, size, GIB + number * GIB // 16)
        known = learned_in(tmp_path)
        assert (known.starts, known.error, known.slack) == (number, -number * GIB // 16, told(tmp_path)["slack_bytes"])
        assert known.warm == (2 * GIB + GIB // 16 if number else 0), "the first start from it"


@pytest.mark.parametrize("reserve", [GIB // 2, 3 * GIB])
def test_a_start_from_a_profile_counts_the_reserve_that_it_has_itself(tmp_path, reserve):
    Profiles(str(tmp_path / "profiles")).keep(key_of({"model": "m"}), MeasuredProfile(Demand(GIB, 2 * GIB, reusable=GIB), 1.0), {})
    machine = Machine(40 * GIB)
    machine.reserve = reserve
    sizing, size = start(machine, tmp_path)
    assert told(tmp_path)["source"] == "profile"
    assert size == 40 * GIB - GIB - int(max(0, 2 * GIB - reserve) * 1.25) - GIB
    serve(sizing, machine, size, GIB)
    assert told(tmp_path)["error_bytes"] == 0


def test_nothing_is_tried_where_nothing_is_left(tmp_path):
    machine = Machine(GIB // 4)
    with pytest.raises(ValueError, match="KV cache") as raised:
        start(machine, tmp_path)
    assert facts(raised.value) == "0.50 0.25 33.0 0.25 nvfp4 23.7 sparkd plan"
    assert machine.did == []


@pytest.mark.parametrize("error", [AttributeError("no such thing"), AssertionError("is_profiling")])
def test_a_rehearsal_of_another_release_is_left_to_it(tmp_path, caplog, error):
    machine = Machine(40 * GIB)

    def rehearse(_scale: float) -> Demand:
        raise error

    machine.rehearse = rehearse  # type: ignore[method-assign]
    assert start(machine, tmp_path)[1] == STOCK
    assert told(tmp_path)["phase"] == "stock"
    assert f"{type(error).__name__}: {error}" in told(tmp_path)["why"]
    assert told(tmp_path)["why"] in caplog.text


@pytest.mark.parametrize(
    ("room", "settings", "rehearses"),
    [
        (40 * GIB, {"at_most_bytes": 2 * GIB}, False),
        (40 * GIB, {"sequences": 4}, False),
        (40 * GIB, {"at_most_bytes": 25 * GIB}, True),  # more than half of the room
        (10 * GIB, {"at_most_bytes": 2 * GIB}, True),  # less than the largest batch could need
        (40 * GIB, {}, True),
    ],
)
def test_where_there_is_plenty_nothing_is_rehearsed_and_nothing_learned(tmp_path, room, settings, rehearses):
    machine = Machine(room, Demand(graphs=GIB, peak=GIB))
    sizing, size = start(machine, tmp_path, **settings)
    assert machine.did == (["rehearse 1.0"] if rehearses else ["warm"])
    assert told(tmp_path)["source"] == ("rehearsal" if rehearses else "limit")
    assert ("peak_bytes" in told(tmp_path)) is rehearses, "what nobody measured is not told as 0"
    serve(sizing, machine, size, 3 * GIB)
    assert bool(list((tmp_path / "profiles").iterdir())) == rehearses


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 40 * GIB - GIB // 2 * 5 // 4 - GIB),
        ({"bytes": 5 * GIB}, 5 * GIB),
        ({"at_most_bytes": 2 * GIB}, 2 * GIB),
        # 33 GiB are taken.
        ({"reserved_bytes": 38 * GIB, "at_most_bytes": 9 * GIB}, 5 * GIB - GIB // 2 * 5 // 4),
    ],
)
def test_an_engine_that_never_rehearses_leaves_room_for_an_assumed_batch_and_learns_nothing(tmp_path, settings, size):
    """On a CPU."""
    for _ in range(2):
        machine = Machine(40 * GIB)
        known = CacheSettings(margin_bytes=GIB, profiles=str(tmp_path / "profiles"), report=str(tmp_path / "report"), **settings)
        sizing = Sizing(machine, known, lambda: NEED, lambda: {"model": "m"}, assumed=Demand(peak=GIB // 2))
        assert sizing.determine(lambda _limit: STOCK) == size
        assert (machine.did, told(tmp_path)["source"], "peak_bytes" in told(tmp_path)) == (["warm"], "limit", False)
        machine.demand = Demand(weights=30 * GIB)
        serve(sizing, machine, size, 0)
        assert (told(tmp_path)["phase"], told(tmp_path)["growth_bytes"]) == ("ready", GIB // 2 * 5 // 4)
    assert not (tmp_path / "profiles").exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 33 GiB are taken; a GiB of graphs, and 2.5 for a batch of 2.
        ({"reserved_bytes": 50 * GIB}, 50 * GIB - 33 * GIB - 3 * GIB - GIB // 2),
        ({"reserved_bytes": 50 * GIB, "at_most_bytes": 4 * GIB}, 4 * GIB),
        ({"reserved_bytes": 50 * GIB, "bytes": 20 * GIB}, 20 * GIB),
    ],
    ids=["exact", "less was allowed", "a size goes before it"],
)
def test_a_reservation_is_kept_by_what_the_engine_holds(tmp_path, settings, expected):
    _, size = start(Machine(90 * GIB), tmp_path, **settings)

    assert size == expected


def test_two_ranks_share_a_reservation(tmp_path):
    _, size = start(Machine(90 * GIB, sharers=2), tmp_path, reserved_bytes=53 * GIB, margin_bytes=2 * GIB)

    assert size == (53 - 33) * GIB // 2 - 3 * GIB - GIB // 2


def test_a_reservation_that_the_weights_fill_is_refused(tmp_path):
    with pytest.raises(ValueError, match="KV cache") as raised:
        start(Machine(90 * GIB), tmp_path, reserved_bytes=35 * GIB)
    assert facts(raised.value) == "8192 1.01 memory_gib 0.00 35 33.0 1.00 2.50 memory_gib 37.6"
