"""Folders that stand for a node's /, for the doctor: a Spark that is well prepared, and what each fault changes of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "fixtures"
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.142  Release Build\nGCC version: 13\n"
LIMITS = "Limit                     Soft Limit           Hard Limit           Units\nMax locked memory         {0}            {0}       "
"     bytes\n"
MEMINFO = (FIXTURES / "meminfo" / "idle.txt").read_text() + "SwapTotal: 16777212 kB\nSwapFree: 16777212 kB\n"
# Paths below the root -> text; None: the path is not there. A Spark as its owners' advice has it.
GOOD: Mapping[str, str | None] = {
    "etc/hostname": "spark-1\n",
    "etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.4 LTS"\n',
    "etc/dgx-release": (FIXTURES / "identity" / "dgx-release-asus-gx10.txt").read_text(),
    "etc/systemd/system/user.slice.d/50-sparkd.conf": "[Slice]\nMemoryMin=4G\n",
    "proc/meminfo": MEMINFO,
    "proc/pressure/memory": (FIXTURES / "meminfo" / "pressure-idle.txt").read_text(),
    "proc/driver/nvidia/version": OPEN_DRIVER,
    "proc/self/limits": LIMITS.format("unlimited"),
    "proc/sys/kernel/osrelease": "6.17.0-1032-nvidia\n",
    "proc/sys/vm/swappiness": "10\n",
    "proc/sys/vm/dirty_bytes": "268435456\n",
    "proc/sys/vm/dirty_ratio": "0\n",
    "proc/sys/vm/min_free_kbytes": "45167\n",
    "sys/class/dmi/id/product_name": "GX10\n",
    "sys/class/dmi/id/bios_date": "06/12/2026\n",
    "sys/class/infiniband/rocep1s0f1/node_type": "1: CA\n",
    "dev/infiniband/uverbs0": "",
    "dev/infiniband/rdma_cm": "",
    "dev/nvidia-uvm": "",
    "run/sparkd-dropcache.sock": "",
    "captured/nvidia-smi.txt": "NVIDIA GB10, 580.142, 0, 4.1, 208, 3003\n",
    "captured/dmesg.txt": (FIXTURES / "dmesg" / "cx7-cable-plug.txt").read_text(),
    "root/.cache/huggingface/token": "hf_0123456789abcdefghijklmnop\n",
    "root/.cache/huggingface/hub/models--a--b/refs/main": "c0ffee",
    "root/.cache/huggingface/hub/models--a--b/snapshots/c0ffee/config.json": "{}",
    "root/.cache/vllm/torch_compile_cache/x": "",
}


def write(root: Path, changes: Mapping[str, str | None] | None = None) -> Path:
    for name, text in {**GOOD, **(changes or {})}.items():
        path = root / name
        if text is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            os.symlink(text[3:], path)
        else:
            path.write_text(text)
    return root


def fixture(name: str) -> str:
    return (FIXTURES / name).read_text()
