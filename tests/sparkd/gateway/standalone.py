"""The gateway as a process of its own in front of an engine's socket, so that its memory can be measured. Never starts the engine.

python -m tests.sparkd.gateway.standalone ENGINE_SOCKET    prints its port, ends with its standard input
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sparkd.gateway import ClientLimits
from tests.sparkd.gateway.fakes import RawEngine, serving


async def main(engine_socket: str) -> None:
    limits = ClientLimits(body_bytes=8 << 20, client_write_s=0.2, linger_s=0.2)
    async with serving(RawEngine(Path(engine_socket)), limits=limits, own_time=False) as gateway:
        print(gateway.port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
