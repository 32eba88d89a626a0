"""Whether an engine over nodes computes, by its own counters and its ranks' CPU time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkd import metrics
from sparkd.cluster.cluster import Cluster
from sparkd.cluster.launcher import DESTROY_TIMEOUT_S, UNSERVED_GRACE_S
from sparkd.config.config import Config
from sparkd.control.record import Attempt, Record
from sparkd.control.watchdog import ALONE, FIRST_STEP_S, TEAM, Watchdog
from sparkd.errors import EngineError, Unavailable
from sparkd.gateway.upstream import Upstream
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Desired, Progress, RankFact, Reading, Want
from tests.sparkd.control.test_decision import ALIVE
from tests.sparkd.control.test_decision_several_nodes import FIRST, SECOND
from tests.sparkd.control.test_supervisor import make_ready, stage
from tests.support.facts import lacking
from tests.support.fakes import READING, FakeClock


class Scene:
    """One model over two nodes with requests in hand. `page` is what its engine says, None for one that says nothing."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.page: str | None = page(1)
        self.record = Record("m", Desired("m", Want.RUNNING, 1, "test", 0.0), 0.0, 0.0)
        self.record.state, self.record.attempt = ModelState.READY, Attempt(0.0, rank_id="r1", nodes=("n", "o"))
        self.record.upstream, self.record.queue.in_flight = Upstream(socket_path="/x"), 2
        self.cpu(0.0)
        self.readings: dict[str, Reading] = {}
        self.asked: list[float] = []
        self.reads = 0
        self.way = asyncio.Event()
        self.way.set()
        # What the engine says to a question; None: nothing, for as long as it is waited for.
        self.answer: Callable[[], None] | None = lambda: None
        self.watchdog = Watchdog(lambda work, name: asyncio.ensure_future(work), self.ask, self.clock, self.page_of)

    async def ask(self, model: str, timeout_s: float) -> None:
        self.asked.append(self.clock())
        if self.answer is None:
            await asyncio.Event().wait()
        else:
            self.answer()

    async def page_of(self, upstream: Upstream) -> str | None:
        self.reads += 1
        # What it says when it is asked, though it may arrive later.
        said = self.page
        await self.way.wait()
        return said

    def cpu(self, used_s: float) -> None:
        ranks = [RankFact(one.handle, True, 1, None, False, Progress(), cpu_s=used_s) for one in (FIRST, SECOND)]
        self.record.observed.ranks = tuple(ranks)

    async def after(self, seconds: float, **changes: Any) -> str | None:
        for name, value in changes.items():
            setattr(self, name, value)
        self.clock.now_s += seconds
        self.watchdog.look([self.record], self.readings)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return self.watchdog.frozen(self.record)


def page(tokens: int, running: int = 1) -> str:
    return f'vllm:generation_tokens_total{{engine="0"}} {tokens}\nvllm:num_requests_running{{engine="0"}} {running}\n'


async def test_an_engine_whose_counters_stand_still_while_no_rank_computes_is_frozen() -> None:
    scene = Scene()

    assert await scene.after(0) is None
    assert await scene.after(5, page=page(2)) is None
    assert await scene.after(TEAM.idle_s - 1) is None
    told = await scene.after(1)
    assert told is not None
    assert lacking(told, "2 requests", f"{TEAM.idle_s:.0f} s", "no token", "none") == []


async def test_one_that_says_nothing_is_no_better() -> None:
    scene = Scene()

    await scene.after(0)
    assert await scene.after(TEAM.idle_s, page=None) is not None


async def test_a_rank_that_computes_has_longer() -> None:
    scene = Scene()
    await scene.after(0)
    scene.cpu(100.0)

    assert await scene.after(TEAM.busy_s - 1) is None
    assert await scene.after(1) is not None


IDLE_PAGE = page(1, running=0)


def refuse() -> None:
    raise EngineError("/v1/chat/completions answered 400")


@pytest.mark.parametrize("world", [1, 2], ids=["one node", "two nodes"])
@pytest.mark.parametrize("answer", [lambda: None, refuse], ids=["an answer", "an error"])
async def test_what_has_nothing_in_hand_is_asked_a_question_and_lives_if_it_answers(answer: Callable[[], None], world: int) -> None:
    """Its client may be slow to take what was said long ago."""
    scene = Scene()
    scene.record.attempt = replace(scene.record.attempt, nodes=("n", "o")[:world])
    scene.answer = answer
    question_s = ALONE.question_s if world == 1 else TEAM.question_s
    await scene.after(0, page=IDLE_PAGE)
    await scene.after(ALONE.ask_every_s)
    for rounds in range(1, 4):
        await scene.after(question_s)
        assert await scene.after(ALONE.ask_every_s) is None
        assert len(scene.asked) >= rounds
    assert await scene.after(1000) is None, "a daemon that was held up for long has asked nothing yet"


@pytest.mark.parametrize(
    ("world", "question_s", "answer_s", "idle_s"),
    [(1, ALONE.question_s, ALONE.answer_s, ALONE.idle_s), (2, TEAM.question_s, TEAM.answer_s, TEAM.idle_s)],
    ids=["one node", "two nodes"],
)
async def test_one_that_hung_before_anybody_asked_has_nothing_in_hand_and_does_not_answer(
    world: int, question_s: float, answer_s: float, idle_s: float
) -> None:
    scene = Scene()
    scene.record.attempt = replace(scene.record.attempt, nodes=("n", "o")[:world])
    scene.answer = None
    await scene.after(0, page=IDLE_PAGE)
    if world == 1:
        await scene.after(ALONE.ask_every_s)
    assert (await scene.after(question_s - 1), scene.asked) == (None, [])
    assert (await scene.after(ALONE.ask_every_s), len(scene.asked)) == (None, 1)
    assert await scene.after(answer_s - 1) is None
    told = await scene.after(idle_s)
    assert told is not None and lacking(told, "question") == []
    assert len(scene.asked) == 1


@pytest.mark.parametrize(("world", "looks"), [(2, 1), (1, 1 + round(ALONE.question_s / ALONE.ask_every_s))])
async def test_while_its_question_is_not_answered_it_is_doubted(world: int, looks: int) -> None:
    scene = Scene()
    scene.record.attempt = replace(scene.record.attempt, nodes=("n", "o")[:world])
    scene.answer = None
    await scene.after(0, page=IDLE_PAGE)
    for _ in range(looks):
        assert scene.asked == []
        assert scene.watchdog.doubt(scene.record) is None
        assert await scene.after(ALONE.ask_every_s) is None
    assert scene.asked
    assert await scene.after(1) is None
    silent_s = scene.clock() - scene.watchdog._progress["m"].at_s
    assert silent_s > TEAM.question_s and lacking(scene.watchdog.doubt(scene.record), f"{silent_s:.0f} s", "question", " 1 s") == []
    # A step, and it is doubted no more.
    await scene.after(ALONE.ask_every_s, page=page(2, running=0))
    assert scene.watchdog.doubt(scene.record) is None


async def test_one_that_answers_or_is_gone_is_not_doubted() -> None:
    scene = Scene()
    await scene.after(0, page=IDLE_PAGE)
    await scene.after(TEAM.question_s)
    assert len(scene.asked) == 1 and scene.watchdog.doubt(scene.record) is None
    scene.answer = None
    await scene.after(TEAM.question_s)
    assert len(scene.asked) == 2 and scene.watchdog.doubt(scene.record) is not None
    scene.record.state = ModelState.STOPPING
    assert scene.watchdog.doubt(scene.record) is None


async def test_the_snapshot_says_who_is_doubted(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await make_ready(made)
        record, watchdog = made.supervisor.registry.find("m"), made.supervisor._watchdog
        assert made.supervisor.snapshot().models["m"].doubt is None
        record.queue.in_flight = 1
        watchdog.look([record])
        watchdog._progress["m"].question_at_s = made.clock() - 2
        assert str(made.supervisor.snapshot().models["m"].doubt).endswith(" for 2 s.")
        made.supervisor.want("m", Want.STOPPED, "admin")
        await made.tick()
        view = made.supervisor.snapshot().models["m"]
        assert (view.state, view.doubt is None) == ("DRAINING", False)
        record.queue.in_flight = 0


async def test_an_engine_that_says_nothing_more_is_not_waited_for_with_a_question() -> None:
    scene = Scene()
    scene.answer = None
    await scene.after(0, page=IDLE_PAGE)
    await scene.after(1)
    await scene.after(1, page=None)
    assert await scene.after(TEAM.idle_s) is not None
    assert scene.asked == []


async def test_who_gave_up_leaves_a_question_behind() -> None:
    scene = Scene()
    scene.answer = None
    await scene.after(0, page=IDLE_PAGE)
    await scene.after(1)
    scene.record.queue.in_flight, scene.record.queue.unanswered = 0, True
    assert await scene.after(TEAM.question_s) is None
    assert len(scene.asked) == 1
    assert await scene.after(TEAM.idle_s) is not None


async def test_one_that_tells_no_counters_is_asked_where_nobody_waits_for_it() -> None:
    scene = Scene()
    scene.record.attempt = replace(scene.record.attempt, nodes=("n",))
    scene.record.queue.in_flight, scene.record.queue.unanswered = 0, True
    await scene.after(0, page=None)
    assert await scene.after(1000) is None
    assert (len(scene.asked), scene.record.queue.unanswered) == (1, False)


async def test_a_first_step_that_computes_may_compile_for_long() -> None:
    scene = Scene()
    scene.answer = None
    await scene.after(0, page=IDLE_PAGE)
    await scene.after(TEAM.question_s)
    scene.cpu(10 * FIRST_STEP_S)
    assert len(scene.asked) == 1
    assert await scene.after(FIRST_STEP_S - TEAM.question_s - 1) is None
    assert await scene.after(1) is not None


async def test_a_question_that_the_gateway_had_no_room_for_is_put_again() -> None:
    def full() -> None:
        raise Unavailable("The gateway could not put a question to m.")

    scene = Scene()
    scene.answer = full
    await scene.after(0, page=IDLE_PAGE)
    for _ in range(3):
        assert await scene.after(TEAM.idle_s) is None, "the engine's state is unknown"
    assert len(scene.asked) == 3
    scene.answer = None
    await scene.after(1)
    assert await scene.after(TEAM.answer_s) is not None


async def test_one_that_counts_nothing_is_never_asked_nor_suspected() -> None:
    """With --disable-log-stats a question might wait behind many others."""
    scene = Scene()
    await scene.after(0, page="process_cpu_seconds_total 1\n")
    await scene.after(1)
    assert await scene.after(TEAM.busy_s) is None
    assert await scene.after(TEAM.busy_s) is None
    assert scene.asked == []


async def test_a_count_that_stands_still_with_nobody_waiting_is_asked_about() -> None:
    """vLLM publishes its gauges with a step, and an abort is none: the last request that was given up counts on."""
    scene = Scene()
    await scene.after(0)
    await scene.after(1)
    scene.record.queue.in_flight, scene.record.queue.unanswered = 0, True
    assert await scene.after(TEAM.question_s) is None
    assert (len(scene.asked), scene.record.queue.unanswered) == (1, False)

    scene.record.queue.unanswered, scene.answer = True, None
    await scene.after(TEAM.question_s)
    assert await scene.after(TEAM.idle_s) is not None


async def test_its_first_question_is_watched_as_a_request_is() -> None:
    scene = Scene()
    scene.record.state, scene.record.queue.in_flight, scene.record.queue.questions = ModelState.SIZING, 0, 1
    await scene.after(0)
    told = await scene.after(TEAM.idle_s)
    assert told is not None and lacking(told, "1 requests") == []
    assert scene.asked == []


async def test_while_the_daemon_itself_is_held_no_engine_stands_still() -> None:
    scene = Scene()
    await scene.after(0)
    await scene.after(1)
    scene.clock.now_s += 10 * TEAM.busy_s
    scene.page = page(5000)
    scene.watchdog.look([scene.record])
    assert scene.watchdog.frozen(scene.record) is None, "nobody has looked yet"
    assert await scene.after(1) is None
    assert await scene.after(TEAM.idle_s) is not None


async def test_nobody_watches_an_engine_whose_clients_were_all_answered() -> None:
    scene = Scene()
    await scene.after(0, page=IDLE_PAGE)
    scene.record.queue.in_flight = 0
    assert await scene.after(1000) is None
    scene.record.queue.in_flight = 1
    assert await scene.after(1000) is None
    assert scene.asked == []


async def test_no_counter_of_an_engine_on_one_node_is_read_for_a_request_that_is_answered_within_seconds() -> None:
    scene = Scene()
    scene.record.attempt = replace(scene.record.attempt, nodes=("n",))
    for _ in range(2):
        scene.record.queue.in_flight = 1
        await scene.after(0)
        await scene.after(ALONE.ask_every_s - 1)
        assert scene.reads == 0
        scene.record.queue.in_flight = 0
        await scene.after(1000)
    scene.record.queue.in_flight = 1
    await scene.after(0)
    await scene.after(ALONE.ask_every_s)
    assert scene.reads == 1


async def test_its_first_question_is_the_supervisors() -> None:
    scene = Scene()
    scene.record.state = ModelState.SIZING
    await scene.after(0, page=IDLE_PAGE)
    await scene.after(1)
    assert await scene.after(100) is None
    assert scene.asked == []


@pytest.mark.parametrize(
    ("watts", "busy", "cpu_share", "after_s"),
    [
        (None, None, 0.0, ALONE.idle_s),
        (None, None, 1.0, ALONE.busy_s),
        (60.0, 96.0, 0.0, ALONE.busy_s),
        (17.0, 96.0, 1.0, ALONE.idle_s),
        (4.0, 0.0, 1.0, ALONE.busy_s),
    ],
    ids=["nobody computes", "a rank computes", "the GPU computes", "a kernel that hangs and a rank that spins", "a compiler runs"],
)
async def test_an_engine_on_one_node_has_longer(watts: float | None, busy: float | None, cpu_share: float, after_s: float) -> None:
    scene = Scene()
    scene.record.attempt = replace(scene.record.attempt, nodes=("n",))
    scene.readings = {"n": replace(READING, gpu_power_w=watts, gpu_busy_percent=busy)}
    await scene.after(0)
    await scene.after(ALONE.ask_every_s)
    scene.cpu(cpu_share * (after_s - 1))

    assert await scene.after(after_s - 1) is None
    told = await scene.after(1)
    assert told is not None and lacking(told, "hangs") == []


async def test_a_gpu_that_tells_nothing_is_said_to_and_is_no_evidence() -> None:
    scene = Scene()
    scene.record.attempt = replace(scene.record.attempt, nodes=("n",))
    scene.readings = {"n": replace(READING, device_trouble="nvidia-smi did not answer within 4 s"), "o": READING}
    assert scene.watchdog.conditions == ()
    await scene.after(0)
    assert [(one.reason, one.node) for one in scene.watchdog.conditions] == [("GpuSilent", "n")]
    await scene.after(ALONE.ask_every_s)
    assert await scene.after(ALONE.idle_s) is not None, "the ranks' own idleness still counts"


async def test_a_node_that_no_guard_watches_is_said_to() -> None:
    scene = Scene()
    scene.readings = {node: replace(READING, guarded=guarded) for node, guarded in (("n", False), ("o", True), ("p", None))}
    await scene.after(0)
    assert [(one.reason, one.node) for one in scene.watchdog.conditions] == [("GuardAbsent", "n")]


async def test_the_third_stall_within_the_window_rests(tmp_path: Path) -> None:
    async with stage(tmp_path, backoff__jitter=0, backoff__initial_s=1) as made:
        waits = []
        for _ in range(3):
            await make_ready(made)
            made.supervisor._effects.fail(made.supervisor.registry.find("m"), "EngineFrozen", "It hangs.")
            waits.append(made.supervisor.snapshot().models["m"].retry_in_s)
            made.cluster.ranks = {}
            await made.tick(2)
        assert waits == [1, 2, 900]
        message = made.supervisor.registry.find("m").attempt.message or ""
        assert lacking(message, "3 times", "15 minutes") == []


async def test_an_operator_ends_the_rest(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await make_ready(made)
        for _ in range(3):
            made.supervisor._effects.fail(made.supervisor.registry.find("m"), "EngineFrozen", "It hangs.")
        made.cluster.ranks = {}
        await made.tick(2)
        assert made.state() == "FAILED"
        made.supervisor.want("m", Want.RUNNING, "admin")
        await made.tick(2)
        assert made.state() != "FAILED"


async def test_an_engine_on_one_node_that_stands_still_is_taken_down_and_started_again(tmp_path: Path) -> None:
    async with stage(tmp_path, backoff__jitter=0, backoff__initial_s=1) as made:
        await make_ready(made)
        pages = [page(1)]

        async def said(upstream: Upstream) -> str | None:
            return pages[-1]

        made.supervisor._watchdog._page_of = said
        stalls = metrics.WATCHDOG_STALLS.labels("m")._value.get()
        async with made.supervisor.lease("m"):
            await made.tick(3, seconds=ALONE.ask_every_s)
            pages.append(page(2))
            await made.tick(2, seconds=ALONE.ask_every_s)
            await made.tick(seconds=ALONE.idle_s - 2 * ALONE.ask_every_s)
            assert made.state() == "READY", "it moved less than that ago"
            await made.tick(2, seconds=ALONE.ask_every_s)
            assert made.supervisor.snapshot().models["m"].reason == "EngineFrozen"
            assert metrics.WATCHDOG_STALLS.labels("m")._value.get() == stalls + 1
            await made.tick(2)
        assert made.cluster.log[2:] == ["kill m", "release m", "place m", "spawn m"], "without its grace"


@pytest.mark.parametrize(("reason", "how"), [("EngineFrozen", "kill m"), ("RankHangs", "kill m"), ("WrongModel", "destroy m")])
async def test_an_unload_does_not_wait_for_an_engine_that_hangs_either(tmp_path: Path, reason: str, how: str) -> None:
    async with stage(tmp_path, backoff__jitter=0, backoff__initial_s=60) as made:
        await make_ready(made)
        made.supervisor._effects.fail(made.supervisor.registry.find("m"), reason, "It is of no use.")
        made.supervisor.want("m", Want.STOPPED, "admin")
        await made.tick(3)

        assert (made.state(), made.cluster.log[2:]) == ("STOPPED", [how, "release m"])


@pytest.mark.parametrize(
    ("server_up", "hangs", "grace_s"),
    [(True, False, 30.0), (True, True, 0.0), (False, False, UNSERVED_GRACE_S), (False, True, 0.0)],
    ids=["it serves", "it hangs", "it never served", "it hangs and never served"],
)
async def test_the_grace_between_its_order_and_its_kill(tmp_path: Path, server_up: bool, hangs: bool, grace_s: float) -> None:
    cluster, asked = Cluster(Config(state_dir=tmp_path, runtime_dir=tmp_path), {}), list[tuple[object, ...]]()
    cluster._here.guard.stop()

    async def ask(node_ip: str, method: str, *arguments: object, timeout_s: float) -> dict[str, object]:
        asked.append((node_ip, method, arguments[1], timeout_s))
        return {"gone": True, "survivors": []}

    cluster.launcher._ask = ask
    fact = replace(ALIVE, progress=Progress(phase="serving", server_up=server_up))

    assert await cluster.launcher.destroy(fact, hangs=hangs) == (), "an agent of an earlier release says nothing of what is left"
    assert asked == [("n", "destroy", grace_s, grace_s + DESTROY_TIMEOUT_S)]


async def test_an_answer_that_was_on_its_way_while_the_daemon_was_held_ends_no_engine() -> None:
    scene = Scene()
    await scene.after(0)
    scene.way.clear()
    await scene.after(1)
    scene.clock.now_s += TEAM.idle_s + 2
    scene.page = page(200)
    scene.way.set()

    assert [await scene.after(0) for _ in range(6)] == [None] * 6
    assert await scene.after(TEAM.idle_s - 1) is None
    assert await scene.after(1) is not None
