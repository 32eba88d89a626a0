"""Reads a node's setup, from /proc, /sys, /etc, its caches and nvidia-smi, into plain JSON. Never judges or changes it.

Under a root path other than / no program is run: the folder `captured` has files with the programs' output, so that a folder can stand
for a node.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from workers.host import cgroups, processes, regular_file
from workers.host.bounded_child import ask
from workers.host.hub_cache import hub_cache
from workers.host.identity import plugin

ROOT = Path("/")
TIMEOUT_S = 5.0
TEXT_BYTES = 64 * 1024
DMESG_BYTES = 256 * 1024
# Files that are read whole where they exist.
FILES = (
    "proc/meminfo", "proc/pressure/memory", "proc/driver/nvidia/version", "proc/self/limits", "proc/sys/kernel/osrelease",
    "proc/sys/vm/swappiness", "proc/sys/vm/dirty_bytes", "proc/sys/vm/dirty_ratio", "proc/sys/vm/min_free_kbytes",
    "sys/class/dmi/id/product_name", "sys/class/dmi/id/bios_date", "sys/class/dmi/id/bios_version", "etc/dgx-release", "etc/os-release",
    "etc/default/earlyoom",
)  # fmt: skip
# Paths of which only the existence is noted.
PATHS = (
    "run/sparkd-dropcache.sock", "dev/infiniband/rdma_cm", "dev/nvidiactl", "dev/nvidia-uvm", "dev/watchdog", ".dockerenv",
    "lib/systemd/system/sparkd-dropcache.socket", "usr/lib/systemd/system/sparkd-dropcache.socket",
    "usr/local/lib/systemd/system/sparkd-dropcache.socket", "etc/systemd/system/multi-user.target.wants/systemd-oomd.service",
    "etc/systemd/system/multi-user.target.wants/earlyoom.service",
)  # fmt: skip
SLICES = ("etc/systemd/system/user.slice.d", "usr/lib/systemd/system/user.slice.d")
DEFAULT_TARGET = ("etc/systemd/system/default.target", "usr/lib/systemd/system/default.target")
# By the name of the file below `captured` that has the output where the root is not /: the program.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "nvidia-smi": (
        "nvidia-smi",
        "--query-gpu=name,driver_version,utilization.gpu,power.draw,clocks.current.sm,clocks.max.sm",
        "--format=csv,noheader,nounits",
    ),
    "dmesg": ("dmesg", "--notime"),
}
# Caches that vLLM and its compilers keep between starts. vLLM's folder holds descriptions of models too; only compiled code counts.
CACHES = (".cache/vllm/torch_compile_cache", ".cache/vllm/deep_gemm", ".cache/flashinfer", ".triton/cache", ".tilelang")
ENGINE_NAMES = (*processes.VLLM_NAMES, "sglang", "llama-server", "ollama")


def sample(root: Path = ROOT, runtime: str | None = None, workers: Collection[int] = ()) -> dict[str, Any]:
    """The facts at this moment. Blocks, for at most two TIMEOUT_S where a program hangs. Unreadable values are left out.

    runtime: the Python of the node's engines; the age of its vLLM is compared with that of the compiled code.
    workers: pids of Ray workers of this node's ranks.

    Sizes in bytes, ages in seconds.
    """
    here = root == ROOT
    environ = dict(os.environ) if here else {}
    homes = [Path.home()] if here else [path for path in (root / "root", *_listed(root / "home")) if path.is_dir()]
    hubs = [hub_cache(environ)] if here else [home / ".cache/huggingface/hub" for home in homes]
    return {
        "host": socket.gethostname() if here else (_text(root / "etc/hostname") or root.name).strip().partition("\n")[0],
        "user": _user() if here else "",
        "root": os.geteuid() == 0,
        "files": {name: text for name in FILES if (text := _text(root / name)) is not None},
        "paths": [name for name in PATHS if os.path.lexists(root / name)],
        "target": next((os.readlink(root / name) for name in DEFAULT_TARGET if os.path.islink(root / name)), ""),
        "slice": "".join(_text(path) or "" for name in SLICES for path in _listed(root / name)),
        "rdma": [path.name for path in _listed(root / "sys/class/infiniband")],
        "verbs": [path.name for path in _listed(root / "dev/infiniband") if path.name.startswith("uverbs")],
        "unusable": [f"/dev/infiniband/{path.name}" for path in _listed(root / "dev/infiniband") if not os.access(path, os.R_OK | os.W_OK)],
        "commands": {name: _asked(root, name) for name in COMMANDS},
        "engines": list(_engines(root, workers)),
        "shared": list(_shared(root / "dev/shm")),
        "hubs": [hub for path in hubs if (hub := _hub(path, environ))],
        "caches": [cache for home in homes for name in CACHES if (cache := _cache(home / name, home))],
        "disks": [_disk(path) for path in dict.fromkeys((ROOT, *(path for path in hubs if path.is_dir())))] if here else [],
        **_installed(runtime),
        "plugin": plugin() if here else "",
        "memory_limit_bytes": min((limit for limit, _ in cgroups.limits(root / "proc")), default=None),
    }


def _asked(root: Path, name: str) -> dict[str, Any]:
    if root == ROOT:
        answer = ask(COMMANDS[name], TIMEOUT_S)
        return {"text": answer.text[-DMESG_BYTES:], "trouble": answer.trouble, "hung": answer.hung, "missing": answer.missing}
    text = _text(root / "captured" / f"{name}.txt", DMESG_BYTES)
    hung = (root / "captured" / f"{name}.hung").exists()
    trouble = f"{name} did not answer within {TIMEOUT_S:g} s" if hung else None if text is not None else f"{name} is not installed"
    return {"text": text or "", "trouble": trouble, "hung": hung, "missing": text is None and not hung}


def _engines(root: Path, workers: Collection[int]) -> Iterator[dict[str, Any]]:
    """Engine processes, sparkd's and others', by the names that they give themselves."""
    with suppress(OSError):  # no /proc below this root
        stats = processes.table(str(root / "proc"))
        ours = processes.of_ranks(stats, workers)
        engines = (stat for stat in stats.values() if stat.name.startswith(ENGINE_NAMES))
        yield from ({"pid": stat.pid, "name": stat.name, "ours": stat.pid in ours} for stat in engines)


def _shared(folder: Path) -> Iterator[dict[str, Any]]:
    """Files of shared memory, which outlive the processes that made them."""
    for path in _listed(folder):
        try:
            facts = path.lstat()
        except OSError:
            continue
        if stat.S_ISREG(facts.st_mode):
            yield {"name": path.name, "bytes": facts.st_blocks * 512, "age_s": max(0.0, time.time() - facts.st_mtime)}


def _hub(path: Path, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Facts of the hub's cache: files of other owners, incomplete downloads, and models without a ref `main`, not found offline."""
    if not path.is_dir():
        return None
    owner = path.parent.parent.stat().st_uid if path.parts[-3:-1] == (".cache", "huggingface") else os.geteuid()
    foreign, incomplete, nameless = [], 0, []
    for model in _listed(path):
        if not model.name.startswith("models--"):
            continue
        parts = [model, *(model / name for name in ("blobs", "refs", "snapshots"))]
        blobs = _listed(model / "blobs")
        facts = [entry for each in (*parts, *blobs) if (entry := _lstat(each))]
        if any(entry.st_uid != owner for entry in facts):
            foreign.append(model.name)
        incomplete += sum(entry.st_blocks * 512 for blob in blobs if blob.suffix == ".incomplete" and (entry := _lstat(blob)))
        if _listed(model / "snapshots") and not (model / "refs" / "main").is_file():
            nameless.append(model.name)
    token = path.parent / "token"
    logged_in = bool(environ.get("HF_TOKEN")) or (token.is_file() and (entry := _lstat(token)) is not None and entry.st_size > 0)
    offline = environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    return {
        "path": str(path), "foreign": foreign, "incomplete_bytes": incomplete, "nameless": nameless, "offline": offline,
        "token": logged_in, "writable": os.access(path, os.W_OK),
    }  # fmt: skip


def _cache(path: Path, home: Path) -> dict[str, Any] | None:
    facts, whose = _lstat(path), _lstat(home)
    if facts is None or whose is None or not path.is_dir():
        return None
    entries = [each for entry in _listed(path) if (each := _lstat(entry))]
    newest_s = max((each.st_mtime for each in entries), default=facts.st_mtime)
    return {"path": str(path), "foreign": any(each.st_uid != whose.st_uid for each in (facts, *entries)), "newest_at_s": newest_s}


def _disk(path: Path) -> dict[str, Any]:
    space = shutil.disk_usage(path)
    return {"path": str(path), "total_bytes": space.total, "free_bytes": space.free}


def _installed(runtime: str | None) -> dict[str, Any]:
    """The vLLM in that Python's environment and the time of its installation, from its distribution's folder, because an import is slow."""
    folders = Path(runtime).parent.parent.glob("lib/python3*/site-packages/vllm*.dist-info") if runtime else ()
    versions = [(facts.st_mtime, path.name.removesuffix(".dist-info")) for path in folders if (facts := _lstat(path))]
    at_s, name = max(versions, default=(None, ""))
    return {"runtime_at_s": at_s, "vllm": name}


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


def _text(path: Path, limit: int = TEXT_BYTES) -> str | None:
    try:
        return regular_file.read(path, limit).decode(errors="replace")
    except OSError:
        return None
