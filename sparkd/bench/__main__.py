"""The bench's program: runs the job that it reads, as a client of the daemon. Each line that it prints tells the daemon how far it is.

The last line has `done` or `failed`. SIGINT cancels; figures that were measured are in the result.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys

from sparkd.bench.client import Client
from sparkd.bench.job import Job
from sparkd.bench.result import BenchStore, Predicted
from sparkd.bench.running_bench import RunningBench, say
from sparkd.errors import RankError, SparkdError
from workers.host import processes


def main() -> None:
    """Ends with the daemon that started it."""
    processes.prctl(processes.PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    job = Job.model_validate_json(sys.stdin.buffer.readline())
    try:
        asyncio.run(_run(job))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


async def _run(job: Job) -> None:
    result = await asyncio.to_thread(BenchStore(job.state_dir).read, job.bench)
    async with Client(job.base_url, job.admin_key) as client:
        bench = RunningBench(client, job.state_dir, result, job.base_url, job.key)
        try:
            if result.predicted is None:
                bench.tell("planning", phase="planning")
                await bench.keep(predicted=await _predicted(client, bench.model))
            end = {"done": await job.work.run(bench)}
        except SparkdError as error:
            end = {"failed": error.message}
    say(end)


async def _predicted(client: Client, model: str) -> Predicted | None:
    """The figures of the plan that `sparkd plan` shows first. A model that cannot be planned is measured all the same."""
    try:
        choice = (await client.post("/plan", {"model": model, "quick": True}))["choice"]
    except RankError:
        return None
    if choice is None:
        return None
    figures = choice["footprint"]
    return Predicted(
        decode_tokens_per_s=figures["decode_tokens_s"],
        first_load_s=figures["first_load_s"],
        next_load_s=figures["next_load_s"],
        active_bytes=figures["active_bytes"],
    )


if __name__ == "__main__":
    main()
