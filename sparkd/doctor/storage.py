"""The doctor's findings on devices, limits, caches, disks and time-outs of one node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import PurePath

from sparkd.doctor.host import Host
from sparkd.fabric.checks import FAIL, OK, WARN, Finding
from sparkd.units import GIB, gib

LEAST_MEMLOCK_BYTES = 64 * GIB
LEAST_FREE_BYTES = 50 * GIB
LEAST_INCOMPLETE_BYTES = GIB // 2
# Sparks give 2 to 6.6 GB/s; 0.1 to 0.5 is what reading through mapped pages comes to.
SLOW_BYTES_PER_S = 1.5e9
# A first start compiles: 10 to 36 minutes were seen.
LEAST_START_S = 900
NAMES = 3


def findings(host: Host) -> Iterator[Finding]:
    yield from _limits(host)
    yield from _devices(host)
    yield from _hub(host)
    yield from _caches(host)
    yield from _disks(host)
    yield from _rate(host)
    yield from _times(host)


def _limits(host: Host) -> Iterator[Finding]:
    limit = re.search(r"^Max locked memory\s+(\d+|unlimited)\b", host.text("proc/self/limits"), re.MULTILINE)
    if limit is None:
        return
    ample = limit[1] == "unlimited" or int(limit[1]) >= LEAST_MEMLOCK_BYTES
    evidence = "unlimited" if limit[1] == "unlimited" else f"{int(limit[1]) >> 20} MiB"
    if ample:
        yield host.fine("memlock", "memlock", evidence)
        return
    cure = (
        "LimitMEMLOCK=infinity in the unit (deploy/ has it), `--ulimit memlock=-1` in a container, or `* - memlock unlimited` in "
        "/etc/security/limits.d: RDMA locks its buffers, and sparkd its own memory."
    )
    yield host.find("memlock", FAIL if host.raw.get("rdma") else WARN, "memlock", evidence, cure)


def _devices(host: Host) -> Iterator[Finding]:
    cards = host.raw.get("rdma") or []
    if cards and not (host.raw.get("verbs") and host.has("dev/infiniband/rdma_cm")):
        inside = host.has(".dockerenv")
        command = None if inside else "sudo modprobe -a ib_uverbs rdma_ucm"
        cure = f"`{command}`." if command else "Start the container with --device=/dev/infiniband."
        yield host.find("infiniband", FAIL, "/dev/infiniband", f"{len(cards)} RDMA devices, and no device file for them", cure, command)
    elif unusable := host.raw.get("unusable"):
        command = "sudo chmod 666 /dev/infiniband/*"
        cure = f"`{command}`, or a udev rule: NCCL falls back to sockets without them."
        evidence = f"{' '.join(unusable[:NAMES])} closed to {host.raw.get('user')}"
        yield host.find("infiniband", FAIL, "/dev/infiniband", evidence, cure, command)
    elif cards:
        yield host.fine("infiniband", "/dev/infiniband", " ".join(host.raw.get("verbs") or []))
    if host.text("proc/driver/nvidia/version") and not host.has("dev/nvidia-uvm"):
        inside = host.has(".dockerenv")
        command = None if inside else "sudo nvidia-modprobe -u -c=0"
        cure = f"`{command}`, or `sudo modprobe nvidia_uvm`." if command else "Start the container with --gpus all."
        yield host.find("devices", FAIL, "/dev/nvidia-uvm", "the driver is loaded and CUDA's device is missing", cure, command)


def _hub(host: Host) -> Iterator[Finding]:
    for hub in host.raw.get("hubs") or []:
        path = str(hub["path"])
        if hub["foreign"]:
            command = f"sudo chown -R $(id -u):$(id -g) {shlex.quote(path)}"
            cure = f"`{command}`: a container that ran as root fetched them."
            yield host.find("hub-cache", WARN, path, f"{_named(hub['foreign'])} belong to another user", cure, command)
        if hub["incomplete_bytes"] > LEAST_INCOMPLETE_BYTES:
            command = f"find {shlex.quote(path)} -name '*.incomplete' -delete"
            cure = f"Download it again (it resumes), or remove the parts: `{command}`."
            yield host.find("hub-cache", WARN, path, f"{gib(hub['incomplete_bytes'])} of interrupted downloads", cure, command)
        if hub["nameless"]:
            cure = "Download it once with a network, or set `revision` to its commit: without refs/main vLLM cannot load it offline."
            yield host.find("hub-cache", FAIL if hub["offline"] else WARN, path, f"{_named(hub['nameless'])} without refs/main", cure)
        if not (hub["foreign"] or hub["nameless"]):
            login = "logged in" if hub["token"] else "not logged in, so gated models are refused"
            yield host.fine("hub-cache", path, login)


def _caches(host: Host) -> Iterator[Finding]:
    installed_at_s = host.raw.get("runtime_at_s")
    for cache in host.raw.get("caches") or []:
        path = str(cache["path"])
        if cache["foreign"]:
            command = f"sudo chown -R $(id -u):$(id -g) {shlex.quote(path)}"
            cure = f"`{command}`: code that cannot be stored is compiled again at each start."
            yield host.find("compiled", WARN, path, "parts of it belong to another user", cure, command)
        elif installed_at_s and cache["newest_at_s"] < installed_at_s:
            command = f"rm -rf {shlex.quote(path)}"
            cure = f"`{command}`: code of another release has caused garbage and crashes; the next start compiles it again."
            yield host.find("compiled", WARN, path, "older than the vLLM that would use it", cure, command)
        else:
            yield host.fine("compiled", PurePath(path).name, "compiled code is kept")


def _disks(host: Host) -> Iterator[Finding]:
    for disk in host.raw.get("disks") or []:
        evidence = f"{gib(disk['free_bytes'])} of {gib(disk['total_bytes'])} free"
        low = disk["free_bytes"] < min(LEAST_FREE_BYTES, disk["total_bytes"] // 10)
        cure = "Models and their quantized copies need room: `sparkd ls --cached`, `sparkd rm --cached MODEL`." if low else ""
        yield host.find("disk", WARN if low else OK, str(disk["path"]), evidence, cure)


def _rate(host: Host) -> Iterator[Finding]:
    """Only where it was asked for: reading a disk is not free."""
    rate = host.raw.get("disk_rate")
    if not rate:
        return
    if rate.get("trouble"):
        yield host.fine("disk-rate", "disk", str(rate["trouble"]))
        return
    per_s = rate["bytes"] / max(rate["seconds"], 1e-6)
    evidence = f"{per_s / 1e9:.2f} GB/s over {gib(rate['bytes'])}{'' if rate['direct'] else ', through the page cache'}"
    slow = per_s < SLOW_BYTES_PER_S and rate["bytes"] > GIB // 4
    cure = "A Spark's own disk gives 2 to 6 GB/s: check the path, and for other programs that read there." if slow else ""
    yield host.find("disk-rate", WARN if slow else OK, str(rate["path"]), evidence, cure)


def _times(host: Host) -> Iterator[Finding]:
    for name, seconds in sorted((host.raw.get("start_s") or {}).items()):
        if host.is_spark and seconds < LEAST_START_S:
            cure = f"Raise it to {LEAST_START_S} or more: a first start compiles for 10 minutes and longer, and this limit ends it."
            yield host.find("time-outs", WARN, name, f"health_check_timeout_s is {seconds:g}", cure)


def _named(models: list[str]) -> str:
    names = [name.removeprefix("models--").replace("--", "/") for name in models]
    return ", ".join(names[:NAMES]) + (f" and {len(names) - NAMES} more" if len(names) > NAMES else "")
