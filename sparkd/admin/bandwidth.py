"""Measures the rate between nodes on request, one pair after the other, within a limit of bytes and time, and keeps the results."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any

from sparkd.admin.bodies import chosen_nodes
from sparkd.admin.jobs import Jobs, Tell
from sparkd.cluster.cluster import Cluster
from sparkd.config.config import Config
from sparkd.control.journal import Journal
from sparkd.errors import BadRequest, ClusterError, Conflict, RankError
from sparkd.fabric.checks import FAIL
from sparkd.fabric.environment import environment, rdma_devices, settings, wants_rdma
from sparkd.fabric.interfaces import LAN, Fabric, fabrics_of, traffic
from sparkd.fabric.nccl_log import judge, parse
from sparkd.fabric.rates import GLOO, NCCL, Rate, RateBook, finding
from sparkd.state.model_state import RESIDENT, STARTING
from sparkd.state.nouns import Operation, Progress
from sparkd.state.snapshot import Snapshot

KIND = "measure"
# The most that a measurement may cost: bytes of both nodes together, seconds for each pair.
MOST_BYTES = 512 << 20
LIMIT_S = 60.0
POLL_S = 0.3
ASK_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 60.0
# The least share of the busiest device's RDMA traffic that another one must have carried.
IDLE_SHARE = 0.01
_PASSED_ON = ("NCCL_", "GLOO_", "UCX_", "CUDA_", "LD_LIBRARY_PATH")

Pair = tuple[str, str]


class Bandwidth:
    def __init__(
        self,
        nodes: Cluster,
        journal: Journal,
        jobs: Jobs,
        config: Callable[[], Config],
        snapshot: Callable[[], Snapshot],
        rates: RateBook,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._nodes, self._journal, self._jobs, self._config, self._snapshot = nodes, journal, jobs, config, snapshot
        self.rates, self._wall = rates, wall

    async def start(self, nodes: Sequence[str] | str, *, force: bool = False) -> Operation:
        """Measure between each two of these nodes, one pair after the other.

        force: also while a model uses one of the nodes.
        Raises BadRequest for an unknown node or fewer than two, and Conflict for a second measurement or a node that a model uses.
        """
        await self._jobs.wait_for_cancelled(KIND)
        chosen = self._chosen(nodes)
        self._jobs.refuse_second(KIND, "measurement")
        if not force and (models := self._using(chosen)):
            problem = f"{', '.join(models)} would be slowed, and would distort the measurement"
            raise Conflict(f"{problem}: run `sparkd unload` first, or measure anyway with --force.")
        return self._jobs.start(KIND, " - ".join(chosen), partial(self._measure, list(combinations(chosen, 2))))

    def _using(self, nodes: Collection[str]) -> list[str]:
        """Models that are on one of these nodes, or may come to be."""
        names = []
        for view in self._snapshot().models.values():
            on = {rank.node_id for rank in view.ranks}
            if (view.state in RESIDENT and on & set(nodes)) or (view.state in STARTING and not on):
                names.append(view.name)
        return names

    def _chosen(self, nodes: Sequence[str] | str) -> list[str]:
        there = self._nodes.in_sight()
        chosen = chosen_nodes(nodes, there)
        if len(chosen) < 2:
            raise BadRequest(f"A rate is measured between two nodes: name two or more of {', '.join(there)}, or `all`.")
        return chosen

    async def _measure(self, pairs: Sequence[Pair], tell: Tell) -> str:
        """Measure every pair; return a sentence for each."""
        sentences = []
        for number, pair in enumerate(pairs):
            rate = await self._pair(pair, partial(_tell, tell, number, len(pairs)))
            judged = finding(rate)
            sentences.append(f"{judged.node}: {judged.evidence}")
            self.rates.keep(rate)
            self._journal.say(KIND, None, f"{judged.node}: {judged.evidence}. {judged.cure}".strip(), verdict=judged.verdict)
        return "; ".join(sentences)

    async def _pair(self, pair: Pair, tell: Callable[[str, int, int], None]) -> Rate:
        """Raises ClusterError with the nodes, the reason and what helps."""
        a, b = pair
        engine = self._config().engine
        interpreter = str(engine.runtime or sys.executable)
        tell(f"preparing {a} - {b}", 0, MOST_BYTES)
        probed = [await self._nodes.ask(node, "runtime", interpreter, timeout_s=PROBE_TIMEOUT_S) for node in pair]
        platforms = {probe["platform"] if engine.platform == "auto" else engine.platform for probe in probed}
        backend = NCCL if platforms == {"cuda"} else GLOO
        configured = {name: value.get_secret_value() for name, value in engine.env.items()}
        before = await self._fabrics(pair)
        rdma = wants_rdma("cuda" if backend == NCCL else "cpu", configured)
        env = {node: environment(settings(before[node], [before[_other(node, pair)]], rdma=rdma, configured=configured)) for node in pair}
        passed_on = {name: value for name, value in configured.items() if name.startswith(_PASSED_ON)}
        port = await self._nodes.ask(a, "free_port", timeout_s=ASK_TIMEOUT_S)
        order = {"world": 2, "host": a, "port": port, "backend": backend, "limit_s": LIMIT_S, "total_bytes": MOST_BYTES}
        jobs: list[tuple[str, str]] = []
        try:
            for rank, node in enumerate(pair):
                own = {name: value for name, value in env[node].items() if name.startswith(_PASSED_ON)} | passed_on
                job = await self._nodes.ask(node, "rate", interpreter, order | {"rank": rank}, own, timeout_s=ASK_TIMEOUT_S)
                jobs.append((node, job))
            ended = await self._watched(jobs, tell)
        finally:
            await asyncio.shield(self._end(jobs))
        transport = parse(ended["nccl"])
        expected = rdma_devices(env[a].get("NCCL_IB_HCA", "")) if rdma else ()
        idle = _idle(traffic(before[a], (await self._fabrics(pair))[a]), expected)
        meeting = next((interface for interface in before[a].interfaces if interface.name == env[a].get("GLOO_SOCKET_IFNAME")), None)
        network = transport.network if backend == NCCL else None
        lan, real = meeting is not None and meeting.kind == LAN, meeting is not None and meeting.physical
        gb_s, sent_bytes = float(ended["gb_s"]), int(ended["sent_bytes"])
        return Rate(a, b, gb_s, backend, network, len(expected), idle, lan, real, sent_bytes, self._wall())

    async def _fabrics(self, pair: Pair) -> dict[str, Fabric]:
        readings = await self._nodes.fabric()
        read = {node: raw for node in pair if (raw := readings.get(node)) is not None and not raw["trouble"]}
        if blind := [node for node in pair if node not in read]:
            raise RankError(f"The network of {' and '.join(blind)} cannot be read: `sparkd fabric` says why.")
        return fabrics_of(read)

    async def _watched(self, jobs: Sequence[tuple[str, str]], tell: Callable[[str, int, int], None]) -> dict[str, Any]:
        """Rank 0's measurement, once all have ended: each by its own limit at the latest."""
        between = " and ".join(node for node, _ in jobs)
        while True:
            states = [await self._nodes.ask(node, "job_state", job, timeout_s=ASK_TIMEOUT_S) for node, job in jobs]
            for (node, _), state in zip(jobs, states, strict=True):
                if "error" in state:
                    wrong = [verdict for verdict in judge(parse(state.get("nccl", ())), (), node) if verdict.verdict == FAIL]
                    cause = f"; {wrong[0].evidence}: {wrong[0].cure}" if wrong else ""
                    raise RankError(f"The rate between {between} is not known: {node}: {state['error']}{cause}")
            tell(between, int(states[0].get("done_bytes", 0)), MOST_BYTES)
            if all(state.get("ended") for state in states):
                return dict(states[0])
            await asyncio.sleep(POLL_S)

    async def _end(self, jobs: Iterable[tuple[str, str]]) -> None:
        for node, job in jobs:
            with suppress(ClusterError):
                await self._nodes.ask(node, "end_job", job, timeout_s=ASK_TIMEOUT_S)


def _tell(tell: Tell, number: int, pairs: int, what: str, done: int, total: int) -> None:
    which = f"measuring {what}" + (f" ({number + 1} of {pairs} pairs)" if pairs > 1 else "")
    tell(which, Progress(phase="measuring", fraction=(number + done / total) / pairs, bytes_done=done, bytes_total=total))


def _other(node: str, pair: Pair) -> str:
    return pair[1] if node == pair[0] else pair[0]


def _idle(moved_bytes: Mapping[str, int], expected: Sequence[str]) -> tuple[str, ...]:
    """RDMA devices that carried nothing while another did; none where none carries at all, which is sockets."""
    most = max((moved_bytes.get(name, 0) for name in expected), default=0)
    return tuple(name for name in expected if moved_bytes.get(name, 0) < IDLE_SHARE * most)
