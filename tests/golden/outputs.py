"""Each kind of output as one text: the command lines behind it, run in a folder of its own, and what they print."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.main import get_command

from sparkd import errors
from sparkd.__main__ import command_line, exit_code
from sparkd.config.config import load_config
from sparkd.daemon.console import Console as ServeConsole
from sparkd.errors import SparkdError
from sparkd.fabric.report import report
from sparkd.render import fabric as show_fabric
from sparkd.render import models as show
from tests.golden import refusals, widths
from tests.support import doctor_tree
from tests.support.checkpoints import mixture
from tests.support.checkpoints import write as write_model
from tests.support.fabric_tree import readings
from tests.support.published_tensors import tensors_of

FOLDER = Path(__file__).parent
GIB = 1 << 30
VLLM = importlib.metadata.version("vllm")


def outputs(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every golden file. folder: empty, for what the commands read; its path is written as FOLDER."""
    for name, text in KINDS.items():
        with _alone(folder):
            made = folder / name
            made.mkdir()
            yield f"{name}.txt", _of_any_machine(text(made).replace(str(made), "FOLDER"))


def _of_any_machine(text: str) -> str:
    text = text.replace(sys.executable, "PYTHON").replace(VLLM, "VLLM_VERSION")
    text = re.sub(r'"engine": "[0-9a-f]{24}"', '"engine": "DIGEST"', text)
    return re.sub(r"\b(MAX_JOBS|FLASHINFER_NVCC_THREADS)=\d+", r"\1=N", text)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A terminal of 80 columns, and no setting, daemon or cache of the machine that runs it."""
    kept = dict(os.environ)
    for name in [name for name in kept if name.startswith(("SPARKD_", "HF_", "VLLM_", "NCCL_"))]:
        del os.environ[name]
    os.environ |= {
        "SPARKD_URL": "http://127.0.0.1:9",
        "HF_HUB_CACHE": str(folder / "hub"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "COLUMNS": "80",
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _run(*words: object, columns: int = 80) -> str:
    """The command line, what it prints on both streams, and its exit code where that is not 0."""
    os.environ["COLUMNS"] = str(columns)
    output = io.StringIO()
    argv = [*map(str, words)]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = exit_code(argv)
    ended = f"(exit code {code})\n" if code else ""
    return f"$ sparkd {' '.join(argv)}\n{output.getvalue()}{ended}\n"


def _drawn(title: str, draw: Callable[[Console], None], columns: int = 120) -> str:
    output = io.StringIO()
    draw(Console(file=output, width=columns))
    return f"$ {title}\n{output.getvalue()}\n"


def _help(_folder: Path) -> str:
    verbs = get_command(command_line()).commands  # type: ignore[attr-defined]
    below = [(name, each) for name, command in verbs.items() for each in getattr(command, "commands", ())]
    return _run("-h") + "".join(_run(*words, "-h") for words in [*((name,) for name in verbs), *below])


def _plan(folder: Path) -> str:
    config = mixture(max_position_embeddings=4096)
    model = write_model(folder / "tiny-moe", config, tensors_of(config))
    config = mixture(architectures=["NobodysForCausalLM"])
    unknown = write_model(folder / "unknown", config, tensors_of(config))
    broken = [(folder / name, config) for name in ("no-config", "cut-off")]
    (no_config, _), (cut_off, _) = [(write_model(path, shape, tensors_of(shape)), shape) for path, shape in broken]
    (no_config / "config.json").unlink()
    (shard,) = cut_off.glob("*.safetensors")
    os.truncate(shard, 100_000)
    lines = [
        (model,),
        (model, "--margin", "121"),
        (unknown, "--ctx", "1024"),
        (folder / "nothing",),
        (no_config,),
        (cut_off,),
        (model, "--ctx", "5000"),
        (model, "--nodes", 0),
    ]
    return "".join(_run("plan", "--quick", "--hardware", "spark", *words, columns=120) for words in lines)


def _tables(_folder: Path) -> str:
    views = _views()
    events = [
        {"seq": 1, "at_s": 0.0, "kind": "ready", "model": "a", "node": None, "level": "info", "message": "The model answers after 61.0 s."},
    ]
    return (
        _drawn("sparkd ps", lambda console: show.resident(views, console, now_s=100.0))
        + _drawn("sparkd ps --wide", lambda console: show.resident(views, console, now_s=100.0, wide=True), 200)
        + _drawn("sparkd ls", lambda console: show.known(views, console))
        + _drawn("sparkd events", lambda console: [show.event_line(event, console) for event in events] and None)
        + "".join(f"{state}: {show.stage(state, progress)}\n" for state, progress in _PROGRESS)
        + _endings()
    )


def _endings() -> str:
    """What `sparkd serve` says on a terminal when it ends: with and without its engines, and while requests run."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        console = ServeConsole("http://127.0.0.1:4000", None, None, needs_key=False)  # type: ignore[arg-type]
        for stop_engines in (True, False):
            console.say_ending(stop_engines)
            console.say_ended(stop_engines)
        console.say_ending(True, 1, 60.0)
        console.say_ending(False, 2, 30.0)
    return f"\n$ sparkd serve\n{output.getvalue()}"


def _views() -> list[dict[str, Any]]:
    rest = {"want": "RUNNING", "since_s": 0.0, "load_s": None, "memory_gib": None, "in_flight": 0, "queued": 0, "ranks": [], "node": None,
            "progress": None, "message": None, "reason": None, "retry_in_s": None, "turn": None, "doubt": None, "aliases": [],
            "source": "/models/m", "max_model_len": None}  # fmt: skip
    kv = {"phase": "ready", "pool_bytes": 8 * GIB, "sequences": 8.5, "bytes_per_token": 131072.0, "margin_bytes": GIB,
          "slack_bytes": GIB // 2, "source": "profile", "why": "rank 1 has the least left",
          "source_why": "rank 1 has no profile of this engine", "peak_why": "a batch took 5.00 GiB"}  # fmt: skip
    ready = {"state": "READY", "load_s": 61.0, "memory_gib": 24.0, "in_flight": 12, "queued": 3, "node": "10.0.0.12",
             "max_model_len": 32768, "ranks": [{"node": "10.0.0.12", "pid": 4711}], "aliases": ["gpt-4o"],
             "progress": {"phase": "serving", "kv_tokens": 65536, "source": "cache", "kv": kv},
             "parsers": {"tool": "hermes", "reasoning": None}}  # fmt: skip
    stock = {"phase": "stock", "why": "this vLLM has no x"}
    loading = {"phase": "loading", "fraction": 0.5, "bytes_done": 2 * GIB, "bytes_total": 4 * GIB, "format": "fp8", "eta_s": 9.0}
    unkept = {"phase": "serving", "cache_state": "skipped", "cache_why": "the disk has 3 GiB left"}
    changes: Mapping[str, dict[str, Any]] = {
        "a": ready,
        "b": {"state": "LOADING", "memory_gib": 4.0, "progress": loading},
        "c": {"state": "READY", "memory_gib": 4.0, "progress": unkept},
        "d": {"state": "STOPPED", "turn": 1, "queued": 3, "message": "It waits for memory, 60 GiB: a may stay for another 20 s."},
        "e": {"state": "FAILED", "reason": "WrongModel", "message": "It is too large.", "retry_in_s": 12.0},
        "f": {"state": "READY", "memory_gib": 4.0, "in_flight": 1, "doubt": "No token came for 9 s."},
        "g": {"state": "DRAINING", "memory_gib": 4.0, "in_flight": 1, "doubt": "No token came for 9 s."},
        "h": {"state": "READY", "memory_gib": 4.0, "progress": {"phase": "serving", "kv_tokens": 5, "kv": stock}},
        "i": {"state": "PLANNED", "last_failure": {"reason": "EngineExited", "message": "Its engine ended (exit code 1).", "at_s": 40.0}},
    }
    return [{"name": name, **rest, **change} for name, change in changes.items()]


_PROGRESS: tuple[tuple[str, dict[str, Any] | None], ...] = (
    ("PLANNED", None),
    ("LOADING", {"phase": "starting"}),
    ("LOADING", {"phase": "starting", "bytes_done": 0, "source": "calibration", "format": ""}),
    ("LOADING", {"phase": "loading", "fraction": 0.25, "bytes_done": 64 << 20, "bytes_total": 256 << 20, "bytes_per_s": 5.824e9,
                 "units_done": 3, "units_total": 644, "format": "nvfp4", "source": "checkpoint", "cache_state": "writing", "eta_s": None}),
    ("LOADING", {"phase": "loading", "fraction": 0.5, "bytes_done": 2 << 30, "bytes_total": 4 << 30, "eta_s": 9.7}),
    ("LOADING", {"phase": "loading", "fraction": 0.0, "source": "cache", "format": "int4"}),
    ("LOADING", {"phase": "loading", "fraction": 0.5, "cache_state": "writing", "cache_why": "the load waits for the disk of /q"}),
    ("WARMING", {"phase": "warming", "fraction": None, "cache_state": "written", "weights_gib": 1.5}),
    ("SIZING", {"kv": {"phase": "rehearsing"}, "weights_gib": 1.5}),
    ("SIZING", {"kv_tokens": 1024, "weights_gib": 1.5}),
    ("SIZING", {"kv": {"phase": "rehearsing", "source": "profile"}}),
    ("READY", {"phase": "serving", "kv_tokens": 5}),
)  # fmt: skip


def _doctor(folder: Path) -> str:
    faults: Mapping[str, str | None] = {
        "proc/sys/vm/swappiness": "60\n",
        "proc/sys/vm/dirty_bytes": "0\n",
        "proc/self/limits": doctor_tree.LIMITS.format("65536"),
        "run/sparkd-dropcache.sock": None,
        "captured/nvidia-smi.txt": "No devices were found\n",
        "dev/infiniband/rdma_cm": None,
    }
    roots = doctor_tree.write(folder / "good"), doctor_tree.write(folder / "faulty", faults)
    return "".join(_run("doctor", "--root", root, columns=120) for root in roots)


def _fabric(_folder: Path) -> str:
    reports = {name: report(readings(name)) for name in ("pair-different-ports", "half-trained", "no-cable-card-absent")}
    texts = [_drawn(f"sparkd fabric  # {name}", partial(show_fabric.fabric, each)) for name, each in reports.items()]
    return "".join(texts) + _drawn("sparkd fabric --env", partial(show_fabric.environment, reports["pair-different-ports"]))


def _errors(folder: Path) -> str:
    """Each class with its HTTP status, code and exit code; and the messages for configurations with one fault each."""
    rows = [f"{'CLASS':<28}{'STATUS':>6}  {'CODE':<24}{'EXIT CODE':>9}\n"]
    rows += [f"{kind.__name__:<28}{kind.status:>6}  {kind.code:<24}{kind.exit_code:>9}\n" for kind in _kinds(SparkdError)]
    fixed = [
        errors.Unauthorized(),
        errors.UnknownModel("x", ["a", "b"]),
        errors.RouteNotServed("a", "/v1/chat/completions", frozenset({"pool"})),
        errors.NoToolParser("a", "hermes"),
        errors.MethodNotAllowed("PUT", ["GET"]),
        errors.refused_by(OSError(28, "No space left on device", "/var/lib/sparkd/state.db"), "Node spark-2"),
    ]
    rows += ["\n", *(f"{type(error).__name__}: {error.message}\n" for error in fixed), "\n"]
    for text in BROKEN:
        file = folder / "sparkd.yaml"
        file.write_text(text)
        try:
            load_config(file, environ={})
        except SparkdError as error:
            rows.append(f"{text.rstrip()}\nerror: {error.message}\n\n")
    return "".join(rows) + "".join(_run(*words.split()) for words in WRONG_WORDS)


def _kinds(kind: type[SparkdError]) -> Iterator[type[SparkdError]]:
    yield kind
    for inner in kind.__subclasses__():
        if inner.__module__ == errors.__name__:
            yield from _kinds(inner)


# Files with one fault each. What vLLM has to be asked for is in test_broken_configs.py.
BROKEN = (
    "modles: {}\n",
    "listen: 127.0.0.1:99999\n",
    "listen: 0.0.0.0:4000\n",
    "log_level: loud\n",
    "engine: {platform: zpu}\n",
    "models: {a: {}}\n",
    "models: {a: {model: o/m, dytpe: auto}}\n",
    "models: {a: {model: o/m, kv_cache: 8GiB}}\n",
    "models: {a: {model: o/m, max_model_len: 0}}\n",
    "models: {a: {model: o/m, quantize: int5}}\n",
    "models: {a: {model: o/m, extra_args: [--host, 0.0.0.0]}}\n",
    "models: {a: {model: o/m, aliases: [b]}, b: {model: o/n}}\n",
    "models: {a: {model: o/m, memory_gib: -1}}\n",
    "models: {a: {model: o/m, recipe: x}}\n",
    "models: {a b: {model: o/m}}\n",
    "hooks: {on_startup: {preload: [x]}}\nmodels: {a: {model: o/m}}\n",
    "models: [a\n",
    "limits: {xyzzy: 1}\n",
    "listen: a\nlisten: b\n",
    "listen:\n",
    "limits: 5\n",
    "max_queued_requests: many\n",
    "max_queued_requests: true\n",
    "wait_for_load_s: .inf\n",
    "metrics_need_key: perhaps\n",
    "backoff: {initial_s: 9, max_s: 1}\n",
    "apiKeys: [a]\nkeys: {inference: [b]}\n",
    "engine: {env: {A: true}}\n",
    "listen: ${env.NOPE}\n",
    "models: {a: {model: -x}}\n",
    "models: {a: {model: o/m, cmd: x}}\n",
    "models: {a: {model: o/m, dtype: --host}}\n",
    "models: {a: {model: o/m, env: {RAY_X: 1}}}\n",
    "models: {a: {model: o/m, extra_args: -tp 2}}\n",
    "models: {a: {model: o/m, quantize: true}}\n",
    "models: {a: {model: o/m, quantize: fp8, load_format: auto}}\n",
    "models: {a: {model: o/m, quantize: fp8, env: {VLLM_PLUGINS: x}}}\n",
    "models: {a: {model: o/m, kv_cache: {at: 5}}}\n",
    "models: {a: {model: o/m, kv_cache: {bytes: 8GB}}}\n",
    "models: {a: {model: o/m, kv_cache: {bytes: 1, tokens: 1}}}\n",
    "models: {a: {model: o/m, kv_cache: {tokens: 1, at: 5}}}\n",
    "models: {a: {model: o/m, kv_cache: {tokens: true}}}\n",
    "models: {a: {model: o/m, kv_cache: {utilization: 0}}}\n",
    "models: {a: {model: o/m, kv_cache: auto, gpu_memory_utilization: 0.5}}\n",
    "models: {a: {recipe: gpt-oss-120b@x}}\n",
    "models: {a: {recipe: gpt-oss-120b, speculative: eagle}}\n",
)
WRONG_WORDS = (
    "lod",
    "load",
    "load m --timeout -1",
    "load m --timeout soon",
    "logs m -n 900",
    "logs m --rank one",
    "events -n 0",
    "unload",
    "unload m --all",
    "run m hello",
    "run m -- --host 0.0.0.0",
    "ps",
    "ps --nope",
    "ps --url ftp://x",
    "ps --url h:99999",
    "ps --key-file /nowhere/key",
    "serve --config /nowhere/sparkd.yaml",
    "serve --name x",
    "serve -o engine.platfrom=cpu",
    "serve -o keys.admin=k",
    "serve --listen 127.0.0.1:1 --port 2",
    "serve --port 99999",
    "ls --cached --layers m",
    "ls --quantize nvfp4",
    "doctor --root /nowhere",
    "recipes show none",
    "incidents show ../x",
    "recipes shwo x",
    "plan m --quantize {format:[}",
    "plan m --ctx 32q",
    "plan m --margin nan",
    "plan m --hardware gb11",
    "plan m --kv-dtype int4",
    "join host:99999 --token -",
    "join 127.0.0.1 --token -",
    "export unknown out",
    "recipes import /nowhere",
)
KINDS: Mapping[str, Callable[[Path], str]] = {
    "help": _help,
    "plan": _plan,
    "tables": _tables,
    "widths": widths.text,
    "doctor": _doctor,
    "fabric": _fabric,
    "errors": _errors,
    "kv": refusals.kv,
    "loader": refusals.loader,
}
