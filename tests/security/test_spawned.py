"""Every program that sparkd starts: none imports from the working folder, none gets a variable that only `${env.NAME}` needs."""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import os
import pickle
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sparkd.admin import pulls
from sparkd.bench import benchy
from sparkd.bench.profile import Arguments
from sparkd.bench.result import Cell
from sparkd.checkpoint import read_checkpoint
from sparkd.cli import export
from sparkd.cli.export import Chosen
from sparkd.cluster import head_probe
from sparkd.cluster.ray_head import RayHead, RayOptions
from sparkd.doctor import fixes
from sparkd.errors import ClusterError, SparkdError
from sparkd.execution import bounded_call
from sparkd.recipes import clone
from sparkd.vllm.ask import model as model_answers
from sparkd.vllm.ask import parser as parser_answers
from tests.support.architectures import PRESETS, write_qwen3_moe
from tests.support.ranks import Place
from tests.support.waiting import HUNG_S
from workers.agent.programs import Programs
from workers.guard import gpu_meter
from workers.host import bounded_child, ends_with_parent, runtime
from workers.load import input_scales
from workers.quantization.recipe import QuantizationRecipe
from workers.rank import lifecycle, ray_environment
from workers.rank.command import build_command, build_environment
from workers.rank.spec import RankSpec
from workers.vllm.ray import worker

ROOT = Path(__file__).resolve().parents[2]
SECRET = "SPARKD_TEST_SECRET"
PYTHON = os.path.realpath("/proc/self/exe")
# Calls that start another program.
STARTS = {
    "subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call", "subprocess.check_output", "subprocess.getoutput",
    "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "os.system", "os.popen", "os.execv", "os.execve", "os.execvp",
    "os.execvpe", "os.execl", "os.execle", "os.execlp", "os.posix_spawn", "os.posix_spawnp", "os.spawnv", "os.spawnve",
}  # fmt: skip
# file -> how many programs it starts. A new one needs a case in PROGRAMS below, which runs it.
SITES = {
    "sparkd/execution/bounded_call.py": 1,
    "sparkd/doctor/fixes.py": 1,
    "sparkd/cli/export.py": 1,
    "sparkd/cluster/head_probe.py": 1,
    "sparkd/execution/tool_process.py": 1,
    "sparkd/cluster/ray_head.py": 1,
    "sparkd/recipes/clone.py": 1,
    "workers/guard/gpu_meter.py": 1,
    "workers/host/bounded_child.py": 1,
    "workers/host/ends_with_parent.py": 1,
    "workers/vllm/ask/model_question.py": 1,
    "workers/rank/lifecycle.py": 1,
    "workers/vllm/ray/worker.py": 1,
    "workers/host/runtime.py": 1,
    "workers/rank/shim.py": 1,
    "workers/agent/job.py": 1,
    "workers/load/input_scales.py": 1,
}


@functools.cache
def _sources() -> list[tuple[str, ast.Module]]:
    paths = [path for folder in ("sparkd", "workers") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())) for path in paths]


@functools.cache
def _calls() -> list[tuple[str, ast.Call, str]]:
    """Every call, by its module, with the name of what is called."""
    nodes = ((path, node) for path, tree in _sources() for node in ast.walk(tree))
    return [(path, node, ast.unparse(node.func)) for path, node in nodes if isinstance(node, ast.Call)]


def test_the_programs_that_are_started_are_those_that_are_tried_here() -> None:
    assert Counter(path for path, _, name in _calls() if name in STARTS) == SITES


def test_python_goes_on_in_a_forked_child_only_where_the_program_is_its_own_and_has_one_thread() -> None:
    """A lock that another thread holds stays held in the child for ever, and Ray has many threads."""
    forks = {"os.fork", "os.forkpty", "multiprocessing.Process", "multiprocessing.Pool", "ProcessPoolExecutor"}
    found = {path for path, _, name in _calls() if name in forks}

    assert found == {"sparkd/execution/container_init.py", "workers/rank/shim.py", "workers/vllm/ask/model_answer.py"}
    assert not [path for path, call, _ in _calls() if any(keyword.arg == "preexec_fn" for keyword in call.keywords)]


def test_every_start_says_what_environment_the_program_gets() -> None:
    silent = []
    for path, call, name in _calls():
        said = any(keyword.arg == "env" for keyword in call.keywords)
        said |= name == "os.execve" and len(call.args) > 1
        if name in STARTS and not said:
            silent.append(f"{path}:{call.lineno}")
    assert not silent


def test_no_command_line_has_a_module_or_a_text_for_python_and_no_flag_against_the_working_folder() -> None:
    """Whatever stands before `-m` or `-c` in a list, a tuple or a call; the words that recipes are read by are no command lines."""
    bare = []
    for path, tree in _sources():
        for node in ast.walk(tree):
            parts = node.elts if isinstance(node, ast.List | ast.Tuple) else node.args if isinstance(node, ast.Call) else []
            words = [part.value for part in parts if isinstance(part, ast.Constant)]
            first = next((at for at, word in enumerate(words) if word in ("-m", "-c")), None)
            if first is not None and not {"-P", "-I"} & set(words[:first]):
                bare.append(f"{path}: {ast.unparse(node)[:80]}")
    expected = {"sparkd/recipes/vllm_command.py"}
    assert {one.partition(":")[0] for one in bare} <= expected, bare


class Recorder:
    """An interpreter that notes what it was called with, and answers with an empty object."""

    def __init__(self, folder: Path) -> None:
        self.path, self._notes = folder / "python", folder / "notes"
        lines = (
            "import json, os, sys",
            f"with open({str(self._notes)!r}, 'a') as file:",
            "    file.write(json.dumps({'argv': sys.argv[1:], 'environ': dict(os.environ)}) + '\\n')",
            "print('{}')",
        )
        self.path.write_text(f"#!{os.path.realpath(sys.executable)} -IS\n" + "\n".join(lines) + "\n")
        self.path.chmod(stat.S_IRWXU)

    def notes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._notes.read_text().splitlines()] if self._notes.exists() else []


async def _pull(python: Path, folder: Path) -> None:
    with suppress(ClusterError, KeyError):
        await pulls._Pull(None, lambda *_: None, lambda: 0.0)._fetch("o/n", None, {})  # type: ignore[arg-type]


async def _ray(python: Path, folder: Path) -> None:
    head = RayHead(RayOptions(folder / "run", folder / "token", memory_gib=1, object_store_mib=80))
    with suppress(ClusterError):
        head.ensure()


async def _join(python: Path, folder: Path) -> None:
    head_probe.probe_head("127.0.0.1:1", folder / "token", "127.0.0.1")


async def _apart(python: Path, folder: Path) -> None:
    with suppress(pickle.UnpicklingError):
        bounded_call.call(json.loads, "{}", time_s=1)


async def _export(python: Path, folder: Path) -> None:
    with suppress(SparkdError, KeyError):
        export.run(Chosen("/m", QuantizationRecipe.parse("int4"), str(python), ""), str(folder / "out"), "cpu", lambda event: None)


async def _flags(python: Path, folder: Path) -> None:
    with suppress(SparkdError):
        parser_answers.asked(python, [])


async def _probe(python: Path, folder: Path) -> None:
    with suppress(KeyError):
        runtime.probe(str(python))


async def _copy(python: Path, folder: Path) -> None:
    with suppress(ClusterError):
        Programs().copy("source", {"manifest": {"model": "/m"}}, {})


async def _rate(python: Path, folder: Path) -> None:
    programs = Programs()
    name = programs.rate(str(python), {}, {})
    programs._jobs[name][1].process.wait(HUNG_S)
    programs.end_job(name)


async def _shim(python: Path, folder: Path) -> None:
    with suppress(ClusterError):
        lifecycle.spawn(_spec(python, folder))


async def _nvidia_smi(python: Path, folder: Path) -> None:
    bounded_child.ask([str(python), "-I"], HUNG_S)


async def _meter(python: Path, folder: Path) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "nvidia-smi").symlink_to(python)
    os.environ["PATH"] = f"{folder}/bin"
    meter = gpu_meter.GpuMeter()
    meter.want(True)
    meter._run()


async def _becomes(python: Path, folder: Path) -> None:
    """As the recorder stands where sys.executable was, the Python below it is asked to become the recorder."""
    command = ends_with_parent.command([str(python), "-I"])
    command[0] = PYTHON
    environ = ends_with_parent.environment({"PATH": os.environ["PATH"]})
    await asyncio.to_thread(subprocess.run, command, env=environ, check=True, stdout=subprocess.DEVNULL)


async def _benchy(python: Path, folder: Path) -> None:
    cell = Cell(depth=0, concurrency=1, prompt_tokens=1, output_tokens=1)
    target = benchy.BenchTarget("http://127.0.0.1:1/v1", "m", "/m", str(python), key="canary")

    async def heard(_: object) -> None:
        pass

    with suppress(ClusterError):
        await benchy.measure(target, cell, Arguments(), "a text", heard)


async def _fix(python: Path, folder: Path) -> None:
    fixes.apply(fixes.Fix("a", "b", "", "", ((str(python), "-I"),), ""), Path("/"))


async def _git(python: Path, folder: Path) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "git").symlink_to(python)
    os.environ["PATH"] = f"{folder}/bin"
    with suppress(SparkdError, ValueError):
        clone.cloned(str(folder), folder)


def _spec(python: Path, folder: Path, **changes: Any) -> RankSpec:
    (folder / "rank").mkdir(exist_ok=True)
    return Place(folder / "rank").spec(runtime=str(python), entrypoint="vllm.entrypoints.cli.main", **changes)


async def _question(python: Path, folder: Path) -> None:
    with suppress(SparkdError):
        runtime = model_answers.InquiryRuntime(python, [])
        list(model_answers._run([model_answers.ModelQuestion()], model_answers.OWN, runtime, print, threading.Event(), 1 << 30))


async def _calibration(python: Path, folder: Path) -> None:
    write_qwen3_moe(folder / "model", **PRESETS["smallest"])
    input_scales.measured(read_checkpoint(folder / "model"), "a text", None)


PROGRAMS: tuple[Callable[[Path, Path], Awaitable[None]], ...] = (
    _apart, _pull, _ray, _join, _export, _flags, _question, _probe, _copy, _rate, _shim, _nvidia_smi, _meter, _becomes, _benchy,
    _fix, _git, _calibration,
)  # fmt: skip


@pytest.mark.parametrize("start", PROGRAMS, ids=lambda start: start.__name__.strip("_"))
async def test_a_program_gets_the_flag_and_the_variables_of_the_list_alone(
    start: Callable[[Path, Path], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path)
    monkeypatch.setattr(sys, "executable", str(recorder.path))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    for name in (SECRET, "LD_PRELOAD_NOT", "AWS_SECRET_ACCESS_KEY", "PYTHONSTARTUP"):
        monkeypatch.setenv(name, "canary")
    monkeypatch.setenv("PYTHONPATH", f":{tmp_path}/canary")
    await start(recorder.path, tmp_path)

    notes = recorder.notes()
    assert notes, "it was not started"
    for note in notes:
        assert {"-P", "-I"} & set(note["argv"][:2]), note["argv"]
        assert "canary" not in json.dumps(note["environ"])
        folders = note["environ"].get("PYTHONPATH", "/x").split(os.pathsep)
        assert all(map(os.path.isabs, folders)), "an empty entry is the working folder"


def test_an_engine_and_the_ranks_under_ray_have_the_flag_too(tmp_path: Path) -> None:
    python = tmp_path / "python"
    for spec in (_spec(python, tmp_path), _spec(python, tmp_path, rank=1, world=2, ray={"address": "a", "group": "g"})):
        assert build_command(spec)[:3] == [str(python), "-P", "-m"]
    assert ray_environment._WORKER.split()[1:3] == ["-P", "-m"]


def test_what_an_operator_sets_for_an_engine_reaches_it_and_the_rest_of_the_environment_does_not(tmp_path: Path) -> None:
    documented = ("HF_TOKEN", "HF_HOME", "HTTPS_PROXY", "CUDA_HOME", "NCCL_DEBUG", "VLLM_LOGGING_LEVEL", "UCX_TLS", "GLOO_SOCKET_IFNAME")
    environ = dict.fromkeys((*documented, SECRET, "AWS_SECRET_ACCESS_KEY", "RAY_ADDRESS"), "x") | {"PATH": "/bin"}
    spec = _spec(tmp_path / "python", tmp_path, env={"MY_OWN": "y"})
    made = build_environment(spec, environ)

    assert {name: made.get(name) for name in documented} == dict.fromkeys(documented, "x")
    assert made["MY_OWN"] == "y"
    assert not {SECRET, "AWS_SECRET_ACCESS_KEY", "RAY_ADDRESS"} & made.keys()


def test_a_worker_of_ray_becomes_the_engines_python_with_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda path, argv, environ: made.append(argv))
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    for name in ("setpgid", "setsid"):
        monkeypatch.setattr(os, name, lambda *_: None)
    (tmp_path / "order").write_text(json.dumps({"runtime": sys.executable, "environment": {}}))
    monkeypatch.setattr(worker, "rank_of", lambda *_: ("r0", os.getpid(), tmp_path / "order"))
    worker.main(["r0", "worker.py"], {"SPARKD_RAY_RUN_DIR": str(tmp_path)})

    assert made[0][1:] == ["-P", "worker.py"]
