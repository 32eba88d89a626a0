"""Ranks of the stub engine need each other as vLLM's do: none goes on while another gives no sign."""

from __future__ import annotations

import asyncio

from tests.stub.__main__ import CommandLine
from tests.stub.team import StubTeam
from tests.support.daemon_process import free_port
from tests.support.waiting import eventually


def of(rank: int, world: int, port: int) -> StubTeam:
    flags = ["--nnodes", str(world), "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    found = StubTeam.of(CommandLine.parse(["serve", "m", *flags]).flags)
    assert found is not None
    return found


async def test_nobody_goes_on_before_all_are_there_nor_once_one_has_gone() -> None:
    port, stop = free_port(), asyncio.Event()
    first, second, third = (of(rank, 3, port) for rank in range(3))
    waiting = [asyncio.create_task(one.meet(stop)) for one in (second, first)]
    await eventually(lambda: len(first._heard_s) == 1, "two of the three have met")
    assert not any(task.done() for task in waiting)

    await third.meet(stop)
    await asyncio.gather(*waiting)
    assert not first.stalled()
    await third.close()
    await eventually(first.stalled, "the first misses the third")
    await asyncio.gather(first.close(), second.close())


async def test_a_rendezvous_ends_with_an_order_to_stop() -> None:
    stop = asyncio.Event()
    second = of(1, 2, free_port())
    waiting = asyncio.create_task(second.meet(stop))
    stop.set()
    await waiting
    await second.close()


def test_a_rank_alone_meets_nobody() -> None:
    assert StubTeam.of(CommandLine.parse(["serve", "m"]).flags) is None
