"""Measures how fast two nodes exchange data: a few timed all-reduces, in a program of its own. Never loads a model, never runs on.

Started by workers.agent.programs in the engine's own interpreter. Its order is one line of JSON on stdin, what it says are lines of JSON on
stdout:
{"done_bytes", "total_bytes"} as it goes, then {"ended", "gb_s", "sent_bytes", "nccl"}, or {"error"}. It ends when stdin does, and at its
time limit whatever hangs: SIGALRM kills it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

# The bytes that both nodes send together, the first exchange included, which connects and is not timed.
MOST_BYTES = 512 << 20
MESSAGE_BYTES = 32 << 20
LINES, LINE_CHARS = 400, 600

Say = Callable[[Mapping[str, Any]], None]


def main() -> None:
    # NCCL and its plugins write to stdout too.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(event: Mapping[str, Any]) -> None:
        # The reader may be gone: then stdin is closed too.
        with suppress(OSError):
            answers.write(json.dumps(event) + "\n")
            answers.flush()

    order = json.loads(sys.stdin.readline())
    signal.alarm(max(1, int(order["limit_s"])))
    threading.Thread(target=_watch, name="rate stdin", daemon=True).start()
    with tempfile.NamedTemporaryFile("r", prefix="sparkd-nccl-", errors="replace") as lines:
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": lines.name}
        try:
            say(measure(order, say) | {"ended": True, "nccl": _nccl(lines)})
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            say({"error": reason, "nccl": _nccl(lines)})
    # A communicator whose peer has gone may wait for it at the interpreter's end.
    os._exit(0)


def measure(order: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """order: rank, world, host, port, backend (`nccl` or `gloo`), limit_s, total_bytes (of all ranks together).

    gb_s: 10^9 bytes per second of bus bandwidth, 2 (n - 1) / n of a message's size over its time (nccl-tests, doc/PERFORMANCE.md); the
    median of the exchanges. Raises ValueError for an order beyond MOST_BYTES or an exchange whose sum is wrong.
    """
    import torch
    import torch.distributed as dist

    world, total = int(order["world"]), int(order["total_bytes"])
    if world < 2 or not 0 < total <= MOST_BYTES:
        raise ValueError(f"{total} bytes between {world} nodes cannot be exchanged: up to {MOST_BYTES}, between two or more.")
    device = torch.device("cuda", 0) if order["backend"] == "nccl" else torch.device("cpu")
    message_bytes = min(MESSAGE_BYTES, total // (2 * world) // 4 * 4)
    times = total // (world * message_bytes)
    where = f"tcp://{order['host']}:{order['port']}"
    left = timedelta(seconds=float(order["limit_s"]))
    dist.init_process_group(order["backend"], init_method=where, rank=int(order["rank"]), world_size=world, timeout=left)
    numbers = torch.ones(message_bytes // 4, dtype=torch.float32, device=device)
    took_s = []
    for done in range(times):
        began_s = time.perf_counter()
        dist.all_reduce(numbers)
        if device.type == "cuda":
            torch.cuda.synchronize()
        took_s.append(time.perf_counter() - began_s)
        say({"done_bytes": (done + 1) * world * message_bytes, "total_bytes": times * world * message_bytes})
    if not bool((numbers == float(world) ** times).all()):
        raise ValueError("What was exchanged arrived changed: a cable, a card or a driver corrupts it.")
    dist.destroy_process_group()
    gb_s = 2 * (world - 1) / world * message_bytes / statistics.median(took_s[1:]) / 1e9
    return {"gb_s": gb_s, "sent_bytes": times * world * message_bytes}


def _watch() -> None:
    sys.stdin.read()
    os._exit(0)


def _nccl(lines: Any) -> list[str]:
    """The lines about the network; workers.rank.log selects the same from a rank's log."""
    return [line[:LINE_CHARS].rstrip("\n") for line in lines if "NCCL" in line or "ibv_" in line][:LINES]


if __name__ == "__main__":
    main()
