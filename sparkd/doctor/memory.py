"""The doctor's findings on memory of one node: swap, kernel settings, page cache, and the processes that hold it.

Figures: owners' measurements on DGX Sparks (the Nemotron NVFP4 32 GB guide, jschmied's setup guide, nimbus, sparkrun).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sparkd.doctor.host import Host
from sparkd.fabric.checks import FAIL, WARN, Finding
from sparkd.units import GIB, gib
from workers.host.meminfo import unaccounted_bytes

MOST_SWAP_BYTES = 64 * GIB
GOOD_SWAP_GIB = 16
MAKE_SWAP = f"sudo fallocate -l {GOOD_SWAP_GIB}G /swap.img && sudo chmod 600 /swap.img && sudo mkswap /swap.img && sudo swapon /swap.img"
MOST_SWAPPINESS = 10
GOOD_DIRTY_BYTES = 256 << 20
MOST_DIRTY_BYTES = 2 * GIB
MOST_MIN_FREE_KIB = 2 << 20
# The bytes that no line of /proc/meminfo accounts for, where no engine runs: 1.1 to 1.35 GiB on an idle Spark.
MOST_GAP_BYTES = 4 * GIB
SHARED_BYTES = GIB // 4
OLD_S = 600.0


def findings(host: Host) -> Iterator[Finding]:
    yield from _limit(host)
    yield from _swap(host)
    yield from _settings(host)
    yield from _page_cache(host)
    yield from _killers(host)
    yield from _holders(host)
    yield from _system(host)


def _limit(host: Host) -> Iterator[Finding]:
    limit = host.raw.get("memory_limit_bytes")
    if limit is None or limit >= host.total_bytes:
        return
    evidence = f"a control group allows {gib(limit)} of the machine's {gib(host.total_bytes)}"
    cure = "sparkd lends no more than that. To lend all, remove the container's memory limit, or MemoryMax= of the unit or slice."
    yield host.find("memory-limit", WARN, "memory", evidence, cure)


def _swap(host: Host) -> Iterator[Finding]:
    total, free = host.meminfo.get("SwapTotal"), host.meminfo.get("SwapFree", 0)
    if total is None:
        return
    evidence = f"{gib(total)}, {gib(total - free)} used"
    if total == 0:
        cure = f"Make {GOOD_SWAP_GIB} GiB: `{MAKE_SWAP}`, and a line in /etc/fstab. Without it a load that repacks weights is killed."
        yield host.find("swap", WARN, "swap", evidence, cure, MAKE_SWAP)
    elif total > MOST_SWAP_BYTES:
        cure = (
            f"About {GOOD_SWAP_GIB} GiB are enough: with more, the kernel swaps for hours and kills nothing. Unload every model, end the "
            "areas that are too large (`swapon --show`) by `sudo swapoff AREA`, and take them out of /etc/fstab."
        )
        yield host.find("swap", WARN, "swap", evidence, cure)
    else:
        yield host.fine("swap", "swap", evidence)


def _settings(host: Host) -> Iterator[Finding]:
    swappiness = host.number("proc/sys/vm/swappiness")
    if swappiness is not None and swappiness > MOST_SWAPPINESS:
        command = "sudo sysctl vm.swappiness=10"
        cure = f"`{command}`, and a file in /etc/sysctl.d (`sparkd doctor --fix`): an engine's host memory must not be swapped out."
        yield host.find("swappiness", WARN, "vm.swappiness", str(swappiness), cure, command)
    elif swappiness is not None:
        yield host.fine("swappiness", "vm.swappiness", str(swappiness))
    yield from _dirty(host)
    min_free_kib = host.number("proc/sys/vm/min_free_kbytes")
    if min_free_kib is not None and min_free_kib > MOST_MIN_FREE_KIB:
        command = "sudo sysctl vm.min_free_kbytes=45167"
        cure = f"`{command}`: the kernel takes this reserve out of MemAvailable, and vLLM then refuses to start."
        yield host.find("min-free", WARN, "vm.min_free_kbytes", gib(min_free_kib * 1024), cure, command)
    elif min_free_kib is not None:
        yield host.fine("min-free", "vm.min_free_kbytes", str(min_free_kib))


def _dirty(host: Host) -> Iterator[Finding]:
    # The kernel says 0 in the one of the two that does not count.
    ratio = host.number("proc/sys/vm/dirty_ratio") or 0
    most = host.number("proc/sys/vm/dirty_bytes") or host.total_bytes * ratio // 100
    if not most:
        return
    evidence = f"up to {gib(most)} may wait to be written"
    if most > MOST_DIRTY_BYTES:
        command = f"sudo sysctl vm.dirty_bytes={GOOD_DIRTY_BYTES}"
        cure = f"`{command}` (or --fix): engines cannot use memory that waits to be written."
        yield host.find("dirty", WARN, "vm.dirty_bytes", evidence, cure, command)
    else:
        yield host.fine("dirty", "vm.dirty_bytes", evidence)


def _page_cache(host: Host) -> Iterator[Finding]:
    units = [
        f"{folder}/sparkd-dropcache.socket" for folder in ("lib/systemd/system", "usr/lib/systemd/system", "usr/local/lib/systemd/system")
    ]
    if host.has("run/sparkd-dropcache.sock"):
        yield host.fine("page-cache", "helper", "the helper listens on /run/sparkd-dropcache.sock")
    elif host.raw.get("root") and not host.has(*units):
        yield host.fine("page-cache", "helper", "sparkd runs as root and drops it by itself")
    else:
        command = "sudo systemctl enable --now sparkd-dropcache.socket"
        if not host.has(*units):
            command = f"sudo make -C deploy install && {command}"
        effect = "without it the page cache is not freed before a load, and CUDA counts only MemFree."
        yield host.find("page-cache", WARN, "helper", "no helper that can drop the page cache", f"`{command}`: {effect}", command)
    free, available = host.meminfo.get("MemFree"), host.meminfo.get("MemAvailable")
    if free is not None and available is not None:
        yield host.fine("memory", "memory", f"{gib(available)} available, of which {gib(free)} free, the rest page cache")


def _killers(host: Host) -> Iterator[Finding]:
    arguments = host.text("etc/default/earlyoom")
    if host.has("etc/systemd/system/multi-user.target.wants/earlyoom.service") or arguments:
        if re.search(r"--prefer[ =].{0,200}\bpython", arguments) and "sparkd" not in arguments:
            cure = "Add sparkd and ray to its --avoid in /etc/default/earlyoom: else it kills them as Python processes."
            yield host.find("killers", WARN, "earlyoom", "it prefers to kill python", cure)
        else:
            yield host.fine("killers", "earlyoom", "installed")
    if host.has("etc/systemd/system/multi-user.target.wants/systemd-oomd.service"):
        command = "sudo systemctl disable --now systemd-oomd"
        cure = f"`{command}`: it does not see CUDA's memory, and under pressure kills the wrong session."
        yield host.find("killers", WARN, "systemd-oomd", "enabled", cure, command)


def _holders(host: Host) -> Iterator[Finding]:
    engines = host.raw.get("engines") or []
    foreign = [engine for engine in engines if not engine["ours"]]
    if foreign:
        names = ", ".join(f"{engine['name']} (process {engine['pid']})" for engine in foreign[:5])
        cure = "Stop them, or raise memory.os_reserve_gib: sparkd cannot foresee what other programs take later."
        yield host.find("others", WARN, "other engines", names, cure)
    gap = unaccounted_bytes(host.meminfo)
    if gap is not None and not engines:
        if gap > MOST_GAP_BYTES:
            # Not fuser, which reads every process's maps: those of a process that a driver holds do not come.
            command = "sudo find /proc/[0-9]*/fd -lname '/dev/nvidia*'"
            cure = f"A dead engine may have left it in the driver: `{command}` names its holders by number. Without any, restart."
            yield host.find("leak", FAIL, "memory", f"{gib(gap)} belong to no process, and no engine runs", cure, command)
        else:
            yield host.fine("leak", "memory", f"{gib(max(0, gap))} are the kernel's and the driver's")
    old = [
        file
        for file in host.raw.get("shared") or []
        if file["age_s"] > OLD_S and file["name"].startswith(("psm_", "sem.", "nccl-", "vllm", "torch_"))
    ]
    size = sum(file["bytes"] for file in old)
    if old and not engines and size > SHARED_BYTES:
        names = " ".join(f"/dev/shm/{file['name']}" for file in sorted(old, key=lambda file: -file["bytes"])[:3])
        command = f"sudo rm {names}"
        cure = f"No engine runs: `{command}`{' and the others' if len(old) > 3 else ''}. They use memory until they are removed."
        yield host.find("shared-memory", WARN, "/dev/shm", f"{len(old)} files of ended engines, {gib(size)}", cure, command)


def _system(host: Host) -> Iterator[Finding]:
    if host.is_spark and str(host.raw.get("target") or "").endswith("graphical.target"):
        command = "sudo systemctl set-default multi-user.target"
        cure = f"Without a screen: `{command}`, then restart. It gives 2 to 3 GB back."
        yield host.fine("desktop", "default.target", "a desktop starts with the machine", cure, command)
    if not host.text("proc/pressure/memory"):
        yield host.find(
            "pressure", WARN, "PSI", "/proc/pressure/memory is not there", "Add psi=1 to the kernel's command line, then restart."
        )
    if host.is_spark and "MemoryMin" not in str(host.raw.get("slice") or ""):
        command = "sudo systemctl set-property user.slice MemoryMin=4G MemoryLow=6G"
        cure = f"`{command}` (or --fix): a shell then answers under pressure."
        yield host.fine("operator", "user.slice", "no memory is kept for user sessions", cure, command)
