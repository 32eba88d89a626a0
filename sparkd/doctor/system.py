"""The doctor's findings on kernel, driver, GPU and firmware of one node.

Which releases fail, and how, is what owners of DGX Sparks reported: eugr's spark-vllm-docker (issues 389 and 392), NV-Kernels pull requests
590 and 591, open-gpu-kernel-modules issue 1358, NVIDIA's forum (366026, 383023).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from sparkd.doctor.host import Host
from sparkd.fabric.checks import FAIL, WARN, Finding
from sparkd.units import gib
from workers.rank.signatures import Diagnosis, diagnose

PANICS = "6.17.0-1008"
GOOD_KERNEL = "6.17.0-1032"
# Two GPU figures tell the latched low-power state: 611 to 799 MHz, and about 19.5 W, under load.
BUSY_PERCENT = 90
LATCHED_MHZ = 850
DEADLOCK_W = 30
FULL_MHZ = 3003
GOOD_BIOS = datetime(2026, 4, 1)
_DRIVER = re.compile(r"\b(\d{3}\.\d{2,3}(?:\.\d{1,3})?)\b")
# Lines of the kernel log that need a word only where they are there; a few out-of-memory lines appear in runs that go well.
_HARMLESS = 3


def findings(host: Host) -> Iterator[Finding]:
    yield from _platform(host)
    yield from _kernel(host)
    yield from _driver(host)
    yield from _gpu(host)
    yield from _kernel_log(host)


def _platform(host: Host) -> Iterator[Finding]:
    product = host.text("sys/class/dmi/id/product_name").strip()
    releases = re.findall(r'DGX_(?:SWBUILD|OTA)_VERSION="?([\w.]+)', host.text("etc/dgx-release"))
    system = re.search(r'PRETTY_NAME="?([^"\n]+)', host.text("etc/os-release"))
    memory = gib(host.total_bytes) if host.total_bytes else ""
    parts = [product, f"DGX OS {releases[-1]}" if releases else system[1] if system else "", memory]
    if any(parts):
        yield host.fine("platform", "machine", ", ".join(part for part in parts if part))
    if not host.is_spark:
        return
    label = host.text("sys/class/dmi/id/bios_date").strip()
    try:
        dated = datetime.strptime(label, "%m/%d/%Y")
    except ValueError:
        return
    told_bios = f"BIOS {host.text('sys/class/dmi/id/bios_version').strip() or '?'} of {dated:%Y-%m}"
    if dated < GOOD_BIOS:
        command = "sudo fwupdmgr update"
        cure = f"Update it (`{command}`): before April 2026 the network card's second half ran with two PCIe lanes."
        yield host.find("firmware", WARN, "BIOS", told_bios, cure, command)
    else:
        yield host.fine("firmware", "BIOS", told_bios)


def _kernel(host: Host) -> Iterator[Finding]:
    release = host.text("proc/sys/kernel/osrelease").strip()
    total, free = host.meminfo.get("CmaTotal"), host.meminfo.get("CmaFree")
    shown = release or "not readable"
    # NV-Kernels 590: memory that the kernel keeps for its contiguous allocator is counted as free, and none of it can be pinned.
    if total is not None and free is not None and free > total:
        evidence = f"{shown}, CmaFree {gib(free)} is more than CmaTotal {gib(total)}"
        cure = (
            f"Add kho=off to GRUB_CMDLINE_LINUX in /etc/default/grub, `sudo update-grub`, restart; or boot kernel {GOOD_KERNEL}. Else "
            "NCCL's buffers cannot be pinned once memory is low (ibv_reg_mr_iova2: ENOMEM)."
        )
        yield host.find("kho", FAIL, "kernel", evidence, cure)
    if release.startswith(PANICS):
        yield host.find("kernel", FAIL, "kernel", f"{shown}, which panics on a Spark", f"Install and boot {GOOD_KERNEL} or a later 6.17.")
    elif host.is_spark and "nvidia" not in release:
        cure = "Boot NVIDIA's kernel (linux-nvidia-hwe-24.04): others lack the GB10's patches."
        yield host.find("kernel", WARN, "kernel", f"{shown} is not NVIDIA's", cure)
    else:
        yield host.fine("kernel", "kernel", shown)


def _driver(host: Host) -> Iterator[Finding]:
    text = host.text("proc/driver/nvidia/version")
    version = _DRIVER.search(text) or _DRIVER.search(host.gpu[1] if len(host.gpu) > 1 else "")
    if not text and not version:
        if host.is_spark:
            cure = "Install the driver (nvidia-driver-580-open), restart, and look at `nvidia-smi`."
            yield host.find("driver", FAIL, "NVIDIA driver", "not loaded", cure)
        else:
            yield host.fine("driver", "NVIDIA driver", "no NVIDIA GPU")
        return
    release = version[1] if version else text.splitlines()[0][:80]
    if text and "Open Kernel Module" not in text and host.is_spark:
        cure = "Install the open one of the same release (nvidia-driver-580-open): the proprietary one does not start a GB10."
        yield host.find("driver", FAIL, "NVIDIA driver", f"{release}, the proprietary module", cure)
    elif release.startswith("590."):
        cure = "Go back to 580: capturing CUDA graphs hangs with 590 on a Spark."
        yield host.find("driver", WARN, "NVIDIA driver", release, cure)
    else:
        yield host.fine("driver", "NVIDIA driver", f"{release}{', open module' if 'Open Kernel' in text else ''}")


def _gpu(host: Host) -> Iterator[Finding]:
    smi = host.program("nvidia-smi")
    if smi["hung"]:
        cure = "Its driver hangs: stop engines; if `nvidia-smi` still does not end, restart (`sudo systemctl reboot --force --force`)."
        yield host.find("nvidia-smi", FAIL, "GPU", smi["trouble"], cure)
        return
    if smi["trouble"]:
        cure = "Look at `sudo dmesg | grep NVRM`; the kernel and the driver's module must match."
        if host.is_spark or not smi["missing"]:
            yield host.find("nvidia-smi", FAIL, "GPU", smi["trouble"], cure)
        return
    if not host.gpu:
        answer = smi["text"].strip().partition("\n")[0][:80] or "nothing"
        command = "sudo dmesg | grep NVRM"
        cure = f"Look at `{command}`; in a container, start it with --gpus all."
        yield host.find("nvidia-smi", FAIL, "GPU", f"nvidia-smi names no GPU; it says: {answer}", cure, command)
        return
    busy, watts, mhz, most = (host.gpu_number(index) for index in (2, 3, 4, 5))
    evidence = f"{host.gpu[0]}, {_or(watts, 'W')}, {_or(busy, '%')} busy, {_or(mhz, 'MHz')} of {_or(most, 'MHz')}"
    if host.is_spark and busy is not None and busy >= BUSY_PERCENT and mhz is not None and mhz < LATCHED_MHZ:
        cure = "It is latched in its low-power state and serves at half speed: shut down, pull the power plug for a minute, start again."
        yield host.find("low-power", FAIL, "GPU", evidence, cure)
    elif host.is_spark and busy is not None and busy >= BUSY_PERCENT and watts is not None and watts < DEADLOCK_W:
        cure = "A busy GPU that draws so little may run a kernel that never ends. If no tokens come, unload the model and load it again."
        yield host.find("low-power", WARN, "GPU", evidence, cure)
    elif host.is_spark and most is not None and most < FULL_MHZ:
        yield host.fine("clock", "GPU", evidence, "Its clock is capped; `sudo nvidia-smi -rgc` removes the cap; the GPU then runs hotter.")
    else:
        yield host.fine("low-power", "GPU", evidence)


def _kernel_log(host: Host) -> Iterator[Finding]:
    """Findings from the kernel's log, by the table for engines' logs: each diagnosis once, with the number of its lines."""
    seen: Counter[Diagnosis] = Counter()
    for line in host.program("dmesg")["text"].splitlines():
        if fault := diagnose(line):
            seen[fault] += 1
    for fault, times in seen.items():
        verdict = WARN if fault.name == "DriverOutOfMemory" and times <= _HARMLESS else FAIL
        yield host.find("kernel-log", verdict, fault.name, f"{times} times since the start: {fault.cause}", fault.cure)


def _or(value: float | None, unit: str) -> str:
    return "?" if value is None else f"{value:g} {unit}"
