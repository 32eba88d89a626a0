"""The command line against a real daemon with real Ray, kept by `sparkd ray-node`, and the stub engine."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.admin.client import Client
from sparkd.cluster.ray_head import RayHead, RayOptions
from sparkd.cluster.ray_node import node_of
from sparkd.config.config import load_config
from sparkd.errors import ConfigError, RayUnavailable
from sparkd.vllm.flags import parsed
from tests.stub import stub_engine
from tests.support.daemon_process import ROOT, DaemonProcess, alive
from tests.support.facts import lacking
from tests.support.waiting import HUNG_S, until

ANSWER = "The capital of France is Paris."
MODELS = {"quick", "slow", "held", "crash"}
RECIPE = """
description: a recipe
model: {folder}
sources: {{none: none}}
settings:
  memory_gib: 1
  max_model_len: 1K
  max_num_seqs: 4
  env: {{A: 0, B: recipe}}
  extra_args: [--seed, "1", --speculative-config, '{{"method": "suffix", "num_speculative_tokens": 8}}']
"""


class Cli:
    """One daemon, its Ray node, and command lines put to it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str] | None = None) -> None:
        model = {"model": str(folder), "memory_gib": 1}
        (folder / "gate").touch()
        (folder / "recipes").mkdir()
        (folder / "recipes" / "mine.yaml").write_text(RECIPE.format(folder=folder))
        settings = {
            "recipes_dir": str(folder / "recipes"),
            "engine": stub_engine(SPARKD_STUB_RECORD=str(folder / "record.json"), SPARKD_STUB_CHUNK_INTERVAL_S="0")
            | {"stop_timeout_s": HUNG_S},
            "backoff": {"initial_s": 3600, "max_s": 3600},
            # `slow` loads until it is unloaded; an answer of `held` goes on until its client leaves, while its gate is shut.
            "models": {
                "quick": model | {"aliases": ["gpt-4o"]},
                "slow": model | {"env": {"SPARKD_STUB_LOAD_GATE": str(folder / "never")}},
                "held": model | {"env": {"SPARKD_STUB_GATE": str(folder / "gate"), "SPARKD_STUB_GATE_AFTER": "1"}},
                "crash": model | {"env": {"SPARKD_STUB_EXIT_AT": "load"}},
            },
        }
        self.folder = folder
        self.daemon = DaemonProcess(folder, settings)
        self.node = self.popen("ray-node", "--config", str(self.daemon.config), stdout=None, stderr=None)
        self.capsys = capsys

    def popen(self, *argv: str, **options: Any) -> subprocess.Popen[str]:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        environ = os.environ | {"SPARKD_URL": self.daemon.url}
        return subprocess.Popen([sys.executable, "-m", "tests.support.lone_sparkd", *argv], cwd=ROOT, env=environ, text=True, **streams)

    def run(self, *argv: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of a command line in this process."""
        if self.capsys is None:
            raise RuntimeError("no test asked")
        self.capsys.readouterr()
        return (exit_code(["--url", self.daemon.url, *argv]), *self.capsys.readouterr())

    def json(self, *argv: str) -> Any:
        code, out, err = self.run("--json", *argv)
        assert (code, err) == (0, "")
        return json.loads(out)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    made = Cli(tmp_path_factory.mktemp("cli"))
    daemon, node = made.daemon, made.node
    try:
        # From here on the daemon waits for the node's Ray and starts none of its own.
        until((daemon.runtime_dir / "ray.json").exists, "the node's record")
        daemon.start()
        daemon.settled()
        daemon.ray_connected()
        yield made
        _ends_apart(made)
    finally:
        for process in (daemon.process, node):
            if process and process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(HUNG_S)
        daemon.client.close()
    until(lambda: not daemon.leftovers(), f"nothing is left: {daemon.leftovers()}")


def _ends_apart(made: Cli) -> None:
    """The daemon uses the node's Ray and leaves it alone; the node ends it."""
    pids = [process["pid"] for process in made.daemon.status()["costs"]["ray"] if process["name"] in ("gcs_server", "raylet")]
    assert made.daemon.end(signal.SIGINT) == 0
    assert len(pids) == 2 and all(map(alive, pids))
    made.node.send_signal(signal.SIGTERM)
    assert made.node.wait(HUNG_S) == 0
    assert not any(map(alive, pids))


@pytest.fixture
def cli(running: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    monkeypatch.setattr(sys, "stdin", StringIO(""))
    running.capsys = capsys
    yield running
    assert running.run("unload", "--all")[0] == 0


def test_a_reload_says_what_changed_and_what_is_wrong_with_the_file(cli: Cli) -> None:
    before = cli.daemon.config.read_text()
    assert cli.run("reload")[::2] == (0, "")
    try:
        more = f"global_ttl_s: 900\ncluster: {{port: 6400}}\n{before}".replace("models:\n", f"models:\n  more: {{model: {cli.folder}}}\n")
        cli.daemon.config.write_text(more)
        code, out, err = cli.run("reload")
        assert (code, err) == (0, "")
        added, now, later = out.splitlines()
        assert lacking(added, "more") + lacking(now, "global_ttl_s") + lacking(later, "cluster") == []
        cli.daemon.config.write_text(before + "modles: {}\n")
        code, out, err = cli.run("reload")
        assert (code, out) == (2, "")
        assert "modles" in err
        assert "ConfigRefused" in cli.run("status")[1]
    finally:
        cli.daemon.config.write_text(before)
        assert cli.json("reload")["removed"] == ["more"]


def test_load_look_and_unload(cli: Cli) -> None:
    code, out, err = cli.run("load", "gpt-4o")
    assert (code, out.startswith("quick: "), "quick: " in err) == (0, True, True)

    code, out, _ = cli.run("ps")
    header, row = out.splitlines()
    assert (code, header.split()[:2], row.split()[:2]) == (0, ["MODEL", "STATE"], ["quick", "READY"])
    shown = cli.json("ps")["models"]
    assert [(model["name"], model["state"]) for model in shown] == [("quick", "READY")] and str(shown[0]["ranks"][0]["pid"]) in row
    assert {model["name"] for model in cli.json("ls")["models"]} == MODELS
    assert "gpt-4o" in cli.run("ls")[1]
    assert lacking(cli.run("status")[1], "serving", "Ray", "raylet", f"127.0.0.1:{cli.daemon.port}") == []
    assert cli.json("status")["cluster"]["connected"]
    assert len(cli.json("events", "-n", "3")["events"]) == len(cli.run("events", "-n", "3")[1].splitlines()) == 3
    assert lacking(cli.json("logs", "quick")["text"], "startup complete") == []

    assert cli.run("unload", "quick")[1].startswith("quick: ")
    assert cli.json("ps") == {"models": []}
    assert "quick" not in cli.run("ps")[1]


def test_operations_and_answers_are_json_too(cli: Cli) -> None:
    (loaded,) = cli.json("load", "quick")["operations"]
    assert (loaded["state"], loaded["kind"], loaded["model"]) == ("SUCCEEDED", "load", "quick")
    assert cli.json("run", "quick", "-p", "hi")["answer"] == ANSWER
    assert cli.json("run", "quick")["base_url"] == f"{cli.daemon.url}/v1"
    assert [one["kind"] for one in cli.json("unload", "--all")["operations"]] == ["unload"]


def test_run_brings_a_model_in_with_its_arguments(cli: Cli) -> None:
    extra = ["--max-num-seqs", "8", "--max-model-len=4k", "--optimization-level", "2"]
    code, out, _ = cli.run("run", str(cli.folder), "--name", "guest", "-p", "What?", "--", *extra)
    assert (code, out) == (0, f"{ANSWER}\n")
    argv = " ".join(json.loads((cli.folder / "record.json").read_text())["argv"])
    assert "--max-model-len 4000 --max-num-seqs 8 --optimization-level 2" in argv

    assert cli.run("run", "guest", "--", "--max-num-seqs", "9")[0] == 5
    assert cli.run("run", "/nowhere", "--name", "guest")[0] == 5
    assert cli.run("rm", "guest")[0] == 0
    assert cli.run("rm", "quick")[0] == 5
    until(lambda: "guest" not in {model["name"] for model in cli.json("ls")["models"]}, "guest is forgotten")


def test_run_takes_a_recipe_of_the_daemon(cli: Cli) -> None:
    argv = ["run", "mine", "-p", "What?", "--", "--seed", "2"]
    assert cli.run(*argv)[:2] == (0, f"{ANSWER}\n")
    told = json.loads((cli.folder / "record.json").read_text())
    passed = told["argv"][told["argv"].index("--max-model-len") :]
    assert passed[:4] == ["--max-model-len", "1024", "--max-num-seqs", "4"]
    assert parsed(passed)["seed"] == "2", "vLLM takes the last of two"
    assert passed[passed.index("--speculative-config") + 1] == '{"method": "suffix", "num_speculative_tokens": 8}'

    assert cli.run("run", "mine", "-p", "Again?")[0] == 0, "it is known by now"
    assert cli.run("run", "mine", "--", "--seed", "3")[0] == 5
    assert cli.run("run", "mine@nobody")[0] == 2
    assert "`sparkd recipes ls`" in cli.run("run", "nobodys-recipe")[2]
    assert cli.run("rm", "mine")[0] == 0
    until(lambda: "mine" not in {model["name"] for model in cli.json("ls")["models"]}, "it is forgotten")


def test_run_refuses_what_it_cannot_mean(cli: Cli) -> None:
    code, _, err = cli.run("run", "quikc")
    assert (code, lacking(err, "quikc", "quick")) == (5, [])
    assert cli.run("run", str(cli.folder), "--name", "evil", "--", "--host", "0.0.0.0")[0] == 2
    assert lacking(cli.run("run", "/nowhere")[2], "/nowhere", "`model`") == []
    assert cli.run("pull", "./nowhere")[2].startswith("error: ./nowhere ")
    assert {model["name"] for model in cli.json("ls")["models"]} == MODELS


def test_run_takes_a_question_from_a_pipe_and_else_tells_how_to_call(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("What is it?\n"))
    assert cli.run("run", "quick")[:2] == (0, f"{ANSWER}\n")

    monkeypatch.setattr(sys, "stdin", StringIO(""))
    told = cli.run("run", "quick")[1]
    assert f"{cli.daemon.url}/v1\n" in told and "curl " in told


def test_a_chat_on_a_terminal(cli: Cli) -> None:
    assert cli.run("load", "quick")[0] == 0
    ours, theirs = pty.openpty()
    chat = cli.popen("run", "quick", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = ""

    def until_seen(text: str) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(ours, 4096).decode()
        seen = seen.partition(text)[2]

    try:
        for said in ("hello\n", "and again\n"):
            until_seen(">>> ")
            os.write(ours, said.encode())
            until_seen(ANSWER)
        until_seen(">>> ")
        os.write(ours, b"/bye\n")
        assert chat.wait(HUNG_S) == 0
    finally:
        chat.kill()
        os.close(ours)


def test_a_failed_load_says_why_with_code_8(cli: Cli) -> None:
    code, out, err = cli.run("load", "crash")
    assert (code, out) == (8, "")
    assert err.splitlines()[-1].startswith("error: crash: ") and "sparkd logs crash" in err
    assert "out of memory" in cli.run("logs", "crash", "-n", "5")[1]
    assert "FAILED" in cli.run("ps")[1] and cli.json("ps")["models"][0]["retry_in_s"] > 0


def test_a_load_may_be_left_and_cancelled(cli: Cli) -> None:
    operation = cli.json("load", "slow", "--no-wait")["operations"][0]["id"]
    assert cli.run("load", "slow", "--timeout", "0.5")[0] == 7
    assert cli.json("cancel", operation)["state"] == "CANCELLED"
    assert cli.run("cancel", "nothing")[0] == 5


def test_ctrl_c_ends_the_waiting_and_not_the_load(cli: Cli) -> None:
    waiting = cli.popen("load", "slow")
    if waiting.stderr is None:
        raise RuntimeError("stderr is a pipe")
    assert waiting.stderr.readline().startswith("slow: ")
    waiting.send_signal(signal.SIGINT)
    _, told = waiting.communicate(timeout=HUNG_S)

    assert waiting.returncode == 130
    assert "sparkd cancel" in told and "Traceback" not in told
    assert [model["name"] for model in cli.json("ps")["models"]] == ["slow"]


def test_a_log_events_and_requests_are_followed(cli: Cli) -> None:
    assert cli.run("load", "quick")[0] == 0
    assert cli.daemon.chat("quick", "hi").status_code == 200
    events, log, requests = (
        cli.popen("--json", verb, "-f", "-n", "1", *model) for verb, *model in (("events",), ("logs", "quick"), ("requests",))
    )
    assert events.stdout is not None and log.stdout is not None and requests.stdout is not None
    number = json.loads(requests.stdout.readline())["number"]
    for later in (1, 2):
        assert cli.daemon.chat("quick", "hi").status_code == 200
        assert json.loads(requests.stdout.readline())["number"] == number + later
    before = json.loads(events.stdout.readline())
    assert json.loads(log.stdout.readline())["text"]
    cli.run("unload", "quick")
    assert json.loads(events.stdout.readline())["seq"] > before["seq"]
    while "shutdown" not in json.loads(log.stdout.readline())["text"]:
        pass  # The log may come in pieces; at its end there is no line, and so no JSON.
    for follower in (events, log, requests):
        follower.send_signal(signal.SIGINT)
        _, told = follower.communicate(timeout=HUNG_S)
        assert (follower.returncode, told) == (130, "")


def test_a_second_daemon_is_refused(cli: Cli) -> None:
    same_state, same_port = ["--port", str(cli.daemon.port + 1)], ["--state-dir", str(cli.folder / "other")]
    seconds = [cli.popen("serve", "--config", str(cli.daemon.config), *argv) for argv in (same_state, same_port)]
    for second, code in zip(seconds, (3, 2), strict=True):
        _, err = second.communicate(timeout=HUNG_S)
        assert (second.returncode, "error: " in err, "Traceback" in err) == (code, True, False)


def test_leaving_an_answer_ends_it(cli: Cli) -> None:
    assert cli.run("load", "held")[0] == 0
    gate, client = cli.folder / "gate", Client(cli.daemon.url, None)
    gate.unlink()
    try:
        pieces = client.answer("held", [{"role": "user", "content": "hi"}])
        next(pieces)
        assert client.model("held")["in_flight"] == 1
        pieces.close()
        until(lambda: client.model("held")["in_flight"] == 0, "the request has ended")
    finally:
        gate.touch()
        client.close()


def test_a_daemon_does_not_start_what_a_node_keeps(tmp_path: Path) -> None:
    (tmp_path / "ray.json").write_text('{"address": "127.0.0.1:1", "keeper": true}')
    head = RayHead(RayOptions(tmp_path, tmp_path / "token", memory_gib=1, object_store_mib=80))

    with pytest.raises(RayUnavailable, match="sparkd ray-node"):
        head.ensure()
    head.stop()
    assert head.kept_elsewhere


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"cluster.address": "192.0.2.1:6379"}, "cluster.node_ip"),
        ({"cluster.address": "192.0.2.1:6379", "cluster.node_ip": "127.0.0.1"}, "token"),
    ],
)
def test_a_node_that_cannot_join_says_why(settings: dict[str, str], told: str, tmp_path: Path) -> None:
    config = load_config(None, flags=settings | {"state_dir": str(tmp_path)}, environ={})

    with pytest.raises(ConfigError, match=told):
        node_of(config, {})


@pytest.mark.parametrize(
    ("settings", "expected", "absent"),
    [
        ({"cluster.address": "127.0.0.1:6400"}, ["--head", "--port=6400", "--node-ip-address=127.0.0.1"], "--address"),
        ({"cluster.address": "192.0.2.1:6379", "cluster.node_ip": "192.0.2.2"}, ["--address=192.0.2.1:6379"], "--head"),
    ],
)
def test_a_node_is_the_head_where_the_address_is_here(settings: dict[str, str], expected: list[str], absent: str, tmp_path: Path) -> None:
    (tmp_path / "ray.token").write_text("t" * 64)
    config = load_config(None, flags=settings | {"state_dir": str(tmp_path)}, environ={})
    command = node_of(config, {}).command()

    assert set(expected) <= set(command) and not [word for word in command if word.startswith(absent)]
    # Ray refuses these for a node that joins.
    assert ("--include-dashboard=false" in command) == ("--head" in expected)
