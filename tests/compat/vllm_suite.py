"""vLLM's own tests of its HTTP API, from its sdist, against one engine twice: by its own socket, and by the gateway.

    python -m tests.compat.vllm_suite

starts `sparkd serve` with the embedded model, runs every test that asks a server for something, asks again what passed by the engine
alone, prints one table, and ends with 1 if a test still passes by the engine and not by the gateway. `--only test_models` takes the files
whose path holds that; `--gateway URL --engine SOCKET` asks a daemon that runs already.

The tests name many models; here each is the one that is served, so some fail by both ways. The engine starts with the options that they
need beyond the default (tools, tokenizer info, load).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urljoin

from deploy.embedded_model import FOLDER_NAME, is_prepared, prepare
from tests.support.daemon_process import ROOT, daemon, free_port

HOME = ROOT / ".sparkd" / "compat"
MODEL = FOLDER_NAME
# Tests that need other kinds of models, other hardware, or a server that they start themselves.
LEFT_OUT = ("/multimodal/", "/speech_to_text/", "/pooling/", "/rl/", "/launchers/", "/correctness/", "/unit_tests/", "test_uds.py")
ARGUMENTS = [
    *("--enable-tokenizer-info-endpoint", "--enable-server-load-tracking", "--enable-prompt-tokens-details", "--max-logprobs", "-1"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--enable-scale-out", "--enable-prompt-embeds"),
    # Many tests let the model talk as long as it likes, which on a CPU is long.
    *("--override-generation-config", '{"max_new_tokens": 64}'),
]
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
START_S, TEST_S = 900.0, 60
SIDE_BY_SIDE = 3
# It asks for chats until an adapter is loaded, which a server without adapters never does, and takes all memory meanwhile.
ENDLESS = "tests/entrypoints/serve/lora/test_lora_adapters.py::test_loading_invalid_adapters_does_not_break_others"
TEST_BYTES = 8 << 30
_ANTHROPIC_ALIAS = "claude-3-7-sonnet-latest"
_MODEL_NAME = re.compile(r'^(\s*\w*MODEL\w*(?:\s*:\s*\w+)?\s*=\s*)"[\w.-]+/[\w.-]+"', re.MULTILINE | re.IGNORECASE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="files whose path holds one of these")
    parser.add_argument("--gateway", help="the base URL of a daemon that runs already")
    parser.add_argument("--engine", help="its engine's Unix socket")
    parser.add_argument("--again", type=int, default=2, help="how often a difference is asked for again")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with it
    if bool(options.gateway) != bool(options.engine):
        parser.error("--gateway and --engine go together")
    suite = prepared(version("vllm").partition("+")[0])
    files = [path for path in files_of(suite) if any(part in path for part in options.only)]
    if not files:
        parser.error(f"no file's path holds {' or '.join(options.only)}")
    with contextlib.ExitStack() as stack:
        gateway, socket_path = (options.gateway, options.engine) if options.gateway else stack.enter_context(served())
        engine = stack.enter_context(by_port(socket_path))
        return compare(suite, files, engine, gateway, options.again)


def prepared(release: str) -> Path:
    """Make the folder with vLLM's tests of that release, our stand-in among them, from the parts of the sdist that they need."""
    HOME.mkdir(parents=True, exist_ok=True)
    archive = HOME / f"vllm-{release}.tar.gz"
    if not archive.is_file():
        fetch(release, archive)
    suite = HOME / f"vllm-{release}"
    shutil.rmtree(suite, ignore_errors=True)
    with tarfile.open(archive) as sdist:
        kept = (["tests", "entrypoints"], ["tests", "__init__.py"])
        wanted = [member for member in sdist.getmembers() if member.name.split("/")[1:3] in kept]
        sdist.extractall(HOME, members=wanted, filter="data")
    for ours, theirs in (("standin.py", "utils.py"), ("fixtures.py", "conftest.py")):
        shutil.copy(Path(__file__).with_name(ours), suite / "tests" / theirs)
    for path in suite.glob("tests/entrypoints/**/*.py"):
        text = _MODEL_NAME.sub(rf'\1"{MODEL}"', path.read_text())
        path.write_text(text.replace(_ANTHROPIC_ALIAS, MODEL))
    if not is_prepared(model := ROOT / ".sparkd" / "models" / FOLDER_NAME):
        prepare(model)
    (suite / MODEL).symlink_to(model)  # what a test asks transformers for by the name that it asks the server for
    (suite / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    return suite


def fetch(release: str, archive: Path) -> None:
    """The sdist, from the index that pip is configured with. `pip download` would build its metadata, which needs a compiler."""
    from pip._internal.models.index import PyPI

    asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(asked, capture_output=True, text=True, check=False)
    index = os.environ.get("PIP_INDEX_URL") or configured.stdout.strip() or PyPI.simple_url
    question = urllib.request.Request(f"{index.rstrip('/')}/vllm/", headers={"accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(question, timeout=60) as answer:
        (found,) = [file for file in json.load(answer)["files"] if file["filename"] == archive.name]
        url = urljoin(answer.url, found["url"])
    with urllib.request.urlopen(url, timeout=300) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != found["hashes"]["sha256"]:
        raise SystemExit(f"{archive.name} arrived damaged: its SHA-256 is not the index's. Try again.")
    archive.write_bytes(content)


def files_of(suite: Path) -> list[str]:
    """Every file that asks a server for something, itself or by a fixture of its folder; from the suite's folder on."""
    found = []
    for path in sorted(suite.glob("tests/entrypoints/**/test_*.py")):
        fixtures = path.with_name("conftest.py")
        text = path.read_text() + (fixtures.read_text() if fixtures.is_file() else "")
        if "RemoteOpenAIServer" in text and not any(part in str(path) for part in LEFT_OUT):
            found.append(str(path.relative_to(suite)))
    return found


@contextlib.contextmanager
def served() -> Iterator[tuple[str, str]]:
    """A daemon of our own with the one model: its URL, and its engine's socket."""
    model = {
        "model": str(ROOT / ".sparkd" / "models" / FOLDER_NAME),
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "extra_args": ARGUMENTS,
        "env": ENVIRONMENT,
        "preload": True,
    }
    with TemporaryDirectory(prefix="sparkd-suite-") as folder, daemon(Path(folder), {"models": {MODEL: model}}) as made:
        made.wait_for(MODEL, "READY")
        yield made.url, made.model(MODEL)["ranks"][0]["socket_path"]


@contextlib.contextmanager
def by_port(socket_path: str) -> Iterator[str]:
    """The engine's socket as an address, because not every client of the tests speaks to sockets. Bytes are copied as they are."""
    port, loop = free_port(), asyncio.new_event_loop()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs = await asyncio.open_unix_connection(socket_path)
        await asyncio.gather(copy(reader, theirs[1]), copy(theirs[0], writer))

    loop.run_until_complete(asyncio.start_server(join, "127.0.0.1", port))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def compare(suite: Path, files: list[str], engine: str, gateway: str, again: int) -> int:
    """Runs both, prints the table and what differs; 1 if anything does."""
    for log in HOME.glob("*.log"):
        log.unlink()
    by_engine = run(suite, files, "engine", engine, side_by_side=True)
    by_gateway = run(suite, files, "gateway", gateway, side_by_side=True)
    for _ in range(again):
        lost = [name for name in by_engine if by_engine[name] == "passed" != by_gateway.get(name)]
        if not lost:
            break
        # Sampling and load are noise by both ways: what counts passes by the engine every time, and never by the gateway.
        by_engine |= run(suite, lost, "engine", engine, side_by_side=False)
        by_gateway |= run(suite, lost, "gateway", gateway, side_by_side=False)
    lost = [name for name in by_engine if by_engine[name] == "passed" != by_gateway.get(name)]
    print(f"\n{'':30}{'ENGINE':>10}{'GATEWAY':>10}")
    counts = Counter(by_engine.values()), Counter(by_gateway.values())
    for state in ("passed", "failed", "error", "skipped"):
        print(f"{state:30}{counts[0][state]:>10}{counts[1][state]:>10}")
    print(f"{'of':30}{len(by_engine):>10}{len(by_gateway):>10}")
    for title, names in (
        ("by the engine alone", lost),
        ("by the gateway alone", [name for name in by_gateway if by_gateway[name] == "passed" != by_engine.get(name)]),
    ):
        print(f"\npassed {title}: {len(names)}", *names, sep="\n  ")
    return 1 if lost else 0


def run(suite: Path, targets: list[str], name: str, url: str, *, side_by_side: bool) -> dict[str, str]:
    """pytest's verdict on each test: passed, failed, error or skipped. name: of the log that its words go to."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Native tracebacks: for its own, pytest parses sources, which Python 3.11 may fail at in a deep stack, and all of its run ends.
        command = ["prlimit", f"--data={TEST_BYTES}", sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=native"]
        command += ["--deselect", ENDLESS, "--timeout", str(TEST_S), "--continue-on-collection-errors"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
        command += ["-n", str(SIDE_BY_SIDE), "--dist", "loadfile"] if side_by_side else []
        command += targets
        env = os.environ | {"SUITE_URL": url, "PYTHONPATH": str(suite), "HF_HUB_OFFLINE": "1"}
        with (HOME / f"{name}.log").open("a") as log:
            subprocess.run(command, cwd=suite, env=env, stdout=log, stderr=log, check=False)
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {_name(case): next((_STATES[child.tag] for child in case if child.tag in _STATES), "passed") for case in cases}


_STATES = {"failure": "failed", "error": "error", "skipped": "skipped"}


def _name(case: ElementTree.Element) -> str:
    """As pytest takes it on its command line."""
    return f"{case.get('file')}::{case.get('name')}"


if __name__ == "__main__":
    sys.exit(main())
