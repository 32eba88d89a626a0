"""The command line without a daemon: help, addresses, keys, settings, refusals, exit codes, and where the log goes."""

from __future__ import annotations

import contextlib
import io
import json
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from sparkd import __main__, errors
from sparkd.__main__ import EXIT_CODES, command_line, exit_code
from sparkd.admin.client import admin_key, base_url, refusal
from sparkd.checkpoint.source import name_of, source_of
from sparkd.cli import config_file, serve
from sparkd.errors import ConfigError, SparkdError
from sparkd.render import models as show
from tests.support.daemon_process import ROOT, free_port
from tests.support.facts import lacking

KEY = "correct-horse-battery-staple"
COMMAND: Any = get_command(command_line())


class Answers:
    """A server that is not sparkd but answers as it was told: (status, content type, body) for every request, which it keeps."""

    def __init__(self) -> None:
        self.status, self.kind, self.body = 200, "application/json", b"{}"
        self.seen: list[tuple[str, str, str | None]] = []
        # Path -> bodies, one after the other and then the last for good; before the one body for all.
        self.by_path: dict[str, list[Any]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.seen.append((self.command, self.path, self.headers.get("authorization")))
                left = outer.by_path.get(self.path.partition("?")[0].removeprefix("/admin/v1"))
                body = outer.body if left is None else json.dumps(left.pop(0) if len(left) > 1 else left[0]).encode()
                self.send_response(outer.status)
                self.send_header("content-type", outer.kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_DELETE = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def say(self, status: int, body: Any, kind: str = "application/json") -> None:
        self.status, self.kind = status, kind
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()


@pytest.fixture
def answers() -> Iterator[Answers]:
    made = Answers()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()


def test_a_load_that_waits_says_for_what(answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    """As the daemon says it: once for each reason, however its seconds run down."""
    running = {"id": "1", "model": "m", "kind": "load", "state": "RUNNING", "message": ""}
    room = "It waits for room, 3 GiB: b may stay for another {} s."
    waits = [
        ("No Ray.", "STOPPED", {"reason": "RayStarting", "models": []}),
        (room.format(9), "STOPPED", {"reason": "Stay", "models": ["b"]}),
        (room.format(8), "STOPPED", {"reason": "Stay", "models": ["b"]}),
        ("After c.", "FAILED", {"reason": "StartedFirst", "models": ["c"]}),
        (None, "LOADING", None),
    ]
    answers.by_path = {
        "/models/m/load": [running],
        "/models/m": [{"state": state, "message": why, "reason": None, "wait": wait, "progress": None} for why, state, wait in waits],
        "/operations/1": [*([running] * 4), {**running, "state": "SUCCEEDED", "message": "Ready."}],
    }
    assert exit_code(["--url", answers.url, "load", "m"]) == 0
    out, err = capsys.readouterr()
    lines = ["m: No Ray.", f"m: {room.format(9)}", "m: failed: After c.", "m: loading"]
    assert [line.partition("  (")[0] for line in err.splitlines()] == lines
    assert out == "m: Ready.\n"


@pytest.mark.parametrize(("reason", "told"), [("DoesNotFit", False), ("WrongModel", True)])
def test_a_log_is_named_where_an_engine_was_started(answers: Answers, capsys: pytest.CaptureFixture[str], reason: str, told: bool) -> None:
    failed = {"id": "1", "model": "m", "kind": "load", "state": "FAILED", "message": "It is too large."}
    answers.by_path = {"/models/m/load": [failed], "/models/m": [{"state": "FAILED", "reason": reason}]}
    assert exit_code(["--url", answers.url, "load", "m"]) == 8
    err = capsys.readouterr().err
    assert ("`sparkd logs m`" in err) is told and "`sparkd unload m`" in err


@pytest.mark.parametrize(
    ("known", "reason", "forgotten"),
    [(None, "HubUnreachable", True), (None, "ModelUnusable", True), (None, "DoesNotFit", False), ("nope", "HubUnreachable", False)],
)
def test_a_model_that_run_added_and_that_cannot_be_reached_is_forgotten(
    answers: Answers, capsys: pytest.CaptureFixture[str], known: str | None, reason: str, forgotten: bool
) -> None:
    failed = {"id": "1", "model": "nope", "kind": "load", "state": "FAILED", "message": "Its hub does not answer."}
    answers.by_path = {
        "/entry": [{"name": "nope", "spec": {"model": "nope/nope"}, "known": known}],
        "/models": [failed],
        "/models/nope/load": [failed],
        "/models/nope": [{"state": "FAILED", "reason": reason}, {"id": "2", "state": "RUNNING"}],
        "/operations/2": [{"id": "2", "state": "SUCCEEDED"}],
    }
    assert exit_code(["--url", answers.url, "run", "nope/nope", "-p", "hi"]) == 8
    assert [path for command, path, _ in answers.seen if command == "DELETE"] == ["/admin/v1/models/nope"] * forgotten
    assert ("sparkd unload nope" in capsys.readouterr().err) is not forgotten


def kept(name: str, *used_by: str, kind: str = "quantized", node: str = "a") -> dict[str, Any]:
    row = {"kind": kind, "id": f"{name}-0123456789abcdef", "name": name.replace("-", " ", 1), "node": node, "used_by": used_by}
    return {**row, "size_bytes": 2 << 20, "used_s": 5.0, "valid": True, "fault": None}


@pytest.mark.parametrize(
    ("model", "removed"),
    [("mine", ["tiny-nvfp4"] * 2), ("gpt", ["tiny-nvfp4"] * 2), ("/models/Tiny", ["tiny-nvfp4", "tiny-fp8"] * 2), ("else", [])],
)
def test_quantized_weights_are_listed_and_removed_on_all_nodes(
    answers: Answers, capsys: pytest.CaptureFixture[str], model: str, removed: list[str]
) -> None:
    """Of a configured model those in its own format, of a folder all."""
    entries = [kept(name, "mine", node=node) for node in "ab" for name in ("tiny-nvfp4", "tiny-fp8")]
    views = [{"name": "mine", "aliases": ["gpt"], "quantize": {"format": "nvfp4"}}]
    folder = {"kind": "quantized", "path": "/q", "node": "a", "size_bytes": 4 << 20, "limit_bytes": 1 << 30}
    answers.by_path = {"/disk": [{"entries": [*entries, kept("tiny", kind="hub")], "folders": [folder]}], "/models": [{"models": views}]}
    answers.say(202, {"id": "x", "kind": "remove", "model": "x", "state": "SUCCEEDED", "message": "x was removed from a: 2.0 GiB."})

    assert exit_code(["--url", answers.url, "ls", "--cached"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 6 and out.endswith("4.0 MiB of 1.00 GiB in /q on a\n")
    assert exit_code(["--url", answers.url, "rm", "--cached", model]) == (0 if removed else 5)
    gone = [path for command, path, _ in answers.seen if command == "DELETE"]
    chosen = [entry for entry in entries if entry["id"].rpartition("-")[0] in removed]
    assert gone == [f"/admin/v1/disk/quantized/{entry['id']}?node={entry['node']}" for entry in chosen]
    assert capsys.readouterr().out.count("x was removed from a: 2.0 GiB.") == len(removed)


def test_what_goes_wrong_is_an_object_with_json(
    answers: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every verb, before the verb and after it, from the daemon and from here; with the sentence and the code that it has without."""

    def told(*argv: str) -> dict[str, Any]:
        code = exit_code([word for word in argv if word != "--json"])
        plain = capsys.readouterr()
        assert exit_code([*argv]) == code != 0
        out, err = capsys.readouterr()
        assert out == plain.out == "" and err.endswith("}\n") and err.count("\n") == 1
        body: dict[str, Any] = json.loads(err)
        assert body["exit_code"] == code and plain.err == f"error: {body['error']['message']}\n"
        assert body["error"].keys() == {"message", "type", "param", "code", "src"} and body["error"]["src"] == "sparkd"
        return body

    answers.say(404, errors.error_body(errors.UnknownModel("x", ["m"])))
    run = ["run", "x", "-p", "?", "--json", "--", "--seed=1"]
    for argv in (["--json", "load", "x"], ["logs", "--json", "x"], run):
        body = told("--url", answers.url, *argv)
        assert (body["error"]["code"], body["error"]["param"], body["exit_code"]) == ("model_not_found", "model", 5)
    loading = {"model": "m", "state": "LOADING"}
    held = [{"model": "b", "memory_gib": 3}]
    answers.say(503, errors.error_body(errors.ModelLoading("m is on its way.", loading=loading, held_by=held)))
    body = told("--url", answers.url, "ps", "--json")
    assert (body["error"]["type"], body["loading"], body["held_by"]) == ("model_loading", loading, held)
    answers.say(503, {"error": {"code": "unavailable", "message": "Later."}})
    assert "held_by" not in told("--url", answers.url, "ps", "--json")
    answers.say(401, {})
    assert told("--url", answers.url, "status", "--json")["error"]["type"] == "authentication_error"
    gone = f"http://127.0.0.1:{free_port()}"
    for argv in (["ps"], ["pull", "a/b"]):
        assert told("--json", "--url", gone, *argv)["error"]["code"] == "unavailable"
    here = tmp_path / "none"
    for argv in (
        ["plan", "--quick", str(here)],
        ["ps", "--no-such-option"],
        ["recipes", "show", "none"],
    ):
        assert told(*argv, "--json")["error"]["code"] in ("invalid_config", "checkpoint_unusable", "not_found")
    monkeypatch.setattr(show, "resident", None)
    answers.say(200, {"models": []})
    monkeypatch.setattr(show, "say_json", None)
    assert exit_code(["--url", answers.url, "ps", "--json"]) == 1
    assert lacking(json.loads(capsys.readouterr().err)["error"]["message"], "bug", "TypeError") == []
    # What stands behind -- is vLLM's.
    assert exit_code(["--url", gone, "run", "x", "-p", "?", "--", "--json"]) == 7
    assert gone in capsys.readouterr().err


def test_each_verb_is_described_once_however_many_command_lines_are_read() -> None:
    def described() -> list[int]:
        return [len(group.typer_instance.registered_commands) for group in command_line().registered_groups if group.typer_instance]

    assert described() == described() != []


def help_of(command: Any, *words: str, width: int = 80) -> str:
    with io.StringIO() as written, contextlib.redirect_stdout(written):
        command.main(args=[*words, "-h"], prog_name="sparkd", standalone_mode=False, terminal_width=width)
        return written.getvalue()


def test_the_help_names_every_verb_and_cuts_no_line() -> None:
    # typer leaves two columns of a terminal's 80 free.
    shown = help_of(COMMAND, width=78)

    assert all(re.search(rf"^  {verb} ", shown, re.MULTILINE) for verb in COMMAND.commands)
    cut = re.findall(r"^  \w.*\.\.\.$", shown, re.MULTILINE)
    assert cut == [], "`sparkd -h` cuts these: shorten the first line of the verb's docstring. A longer name of a verb shortens every line"


def test_the_help_tells_every_exit_code() -> None:
    told = {int(number) for number in re.findall(r"^ *(\d+)  ", EXIT_CODES, re.MULTILINE)}

    assert told == {0, __main__.INTERRUPTED} | {kind.exit_code for kind in _kinds(SparkdError)}


def _kinds(kind: type[SparkdError]) -> list[type[SparkdError]]:
    return [kind, *(found for inner in kind.__subclasses__() for found in _kinds(inner))]


# What is not sparkd's is code 7, whatever its status.
@pytest.mark.parametrize(
    ("status", "body", "code", "told"),
    [
        (401, {"error": {"code": "invalid_api_key", "message": "no"}}, 6, "--key-file"),
        (503, {"error": {"code": "does_not_fit", "message": "too large"}}, 4, "too large"),
        (500, {"error": {"code": "of_a_newer_release", "message": "new"}}, 1, "new"),
        (404, b"<html>nginx</html>", 7, ""),
        (404, {"error": {"message": "Not Found", "type": "NotFoundError", "code": 404}}, 7, ""),
        (200, {"object": "list", "data": []}, 7, ""),
    ],
)
def test_a_refusal_keeps_its_meaning(
    answers: Answers, status: int, body: Any, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.say(status, body)

    assert exit_code(["ps", "--url", answers.url]) == code
    assert told in capsys.readouterr().err


def test_every_code_of_the_tree_comes_back_as_its_own_class() -> None:
    for kind in _kinds(SparkdError):
        assert issubclass(kind, type(refusal(kind.code, "x")))
    assert type(refusal("ray_unavailable", "x")) is errors.RayUnavailable


@pytest.mark.parametrize("place", ["before", "after", "environment"])
def test_the_key_is_sent_and_never_shown(
    answers: Answers, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    file.write_text(f"# the admin key\n\n{KEY}\n")
    answers.say(401, {"error": {"code": "invalid_api_key", "message": "no"}})
    argv = {"before": ["--key-file", str(file), "ps"], "after": ["ps", "--key-file", str(file)], "environment": ["ps"]}[place]
    if place == "environment":
        monkeypatch.setenv("SPARKD_ADMIN_KEY", KEY)

    assert exit_code([*argv, "--url", answers.url]) == 6
    assert answers.seen == [("GET", "/admin/v1/models", f"Bearer {KEY}")]
    assert "admin key" in (told := capsys.readouterr().err) and KEY not in told


@pytest.mark.parametrize("text", ["sha256:" + "0" * 64, "two words"])
def test_what_cannot_be_a_key_is_refused_without_being_shown(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(text)

    with pytest.raises(ConfigError) as refused:
        admin_key(file, {})
    assert text not in refused.value.message


def test_the_name_of_a_key_is_not_sent(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"boss: {KEY}\nother: {KEY}-2\n")
    assert admin_key(file, {}) == KEY


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("spark1", "http://spark1:4000"),
        ("http://spark1:4001/v1", "http://spark1:4001"),
        ("https://spark1.example", "https://spark1.example"),
        ("http://spark1:80/", "http://spark1:80"),
        ("[fd00::1]", "http://[fd00::1]:4000"),
    ],
)
def test_an_address_may_be_short(text: str, url: str) -> None:
    assert base_url(text) == url


@pytest.mark.parametrize(
    "text", ["unix:/run/x", "http://u:secret@h:1", "http://u:secret@h:x", "http://u:secret@[h", "http://h:1/other", "h:65536"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        base_url(text)
    assert "secret" not in refused.value.message


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/models/SmolLM2-135M-Instruct/", "smollm2-135m-instruct"),
        ("/m/Ä b (1)", "b-1"),
    ],
)
def test_a_model_is_called_after_its_last_part(source: str, name: str) -> None:
    assert name_of(source) == name


def test_a_folder_is_told_from_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "there").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")

    found = [source_of(text) for text in ("owner/there", "owner/elsewhere", "./x", "../x", "~/x", "/x/", ".")]
    assert found == [
        f"{tmp_path}/owner/there", "owner/elsewhere", f"{tmp_path}/x", f"{tmp_path.parent}/x", "/home/me/x", "/x", str(tmp_path)
    ]  # fmt: skip


def test_settings_are_read_as_yaml() -> None:
    pairs = ["engine.platform=cpu", "metrics_need_key=true", "hooks.on_startup.preload=[a, b]", "listen=[::1]:4000"]

    assert serve.settings_of([*pairs, "limits.keep_alive_s=5"]) == {
        "engine.platform": "cpu",
        "metrics_need_key": True,
        "hooks.on_startup.preload": ["a", "b"],
        "listen": "[::1]:4000",
        "limits.keep_alive_s": 5,
    }


@pytest.mark.parametrize("pair", ["keys.admin=k", "engine.env.MY_API_KEY=t"])
def test_a_secret_is_refused_where_others_can_read_it(pair: str) -> None:
    with pytest.raises(ConfigError, match=pair.partition("=")[0]):
        serve.settings_of([pair])


def test_the_systems_file_is_used_only_when_nothing_else_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sparkd.yaml"
    monkeypatch.setattr(config_file, "CONFIG_PATH", file)
    assert config_file.config_path(None, {}, alone=True) is None
    file.touch()
    assert config_file.config_path(None, {}, alone=True) == file
    assert config_file.config_path(None, {}, alone=False) is None
    assert config_file.config_path(None, {"SPARKD_CONFIG": "/x"}, alone=False) == Path("/x")
    assert config_file.config_path(Path("/y"), {"SPARKD_CONFIG": "/x"}, alone=True) == Path("/y")


def test_check_names_file_line_and_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text("listen: 127.0.0.1:4000\nmodles: {}\n")

    assert exit_code(["check", str(file)]) == 2
    assert capsys.readouterr().out.splitlines()[0].startswith(f"{file}:2: modles")
    assert exit_code(["check", "--json", str(file)]) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["problems"][0]["line"], found["problems"][0]["severity"]) == (False, 2, "error")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["version", "--json"]) == 0
    version = json.loads(capsys.readouterr().out)["sparkd"]
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out == f"sparkd {version}\n"


def test_a_bug_is_one_sentence(monkeypatch: pytest.MonkeyPatch, answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers.say(200, {"models": [{"name": "of an unknown release"}]})

    assert exit_code(["ls", "--url", answers.url]) == 1
    err = capsys.readouterr().err
    assert re.search(r"\bKeyError at render/models\.py:\d+\b", err) and err.startswith("error: ") and err.count("\n") == 1


def test_what_ends_a_task_group_is_found_inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", [errors.StateError("The disk is gone.")])])

    monkeypatch.setattr(__main__, "command_line", fail)
    assert exit_code([]) == 3
    assert capsys.readouterr().err == "error: The disk is gone.\n"


def test_the_log_of_a_terminal_goes_to_a_private_file_and_that_of_a_service_to_stderr(tmp_path: Path) -> None:
    code = f"""
import logging, os, pathlib
from sparkd.daemon import logs
logs.set_up("info", pathlib.Path({str(tmp_path / "state")!r}))
log = logging.getLogger("sparkd.x")
log.info("one\\nline with authorization: Bearer {KEY}")
log.warning("look here")
log.debug("not this")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("a bug")
logging.getLogger("httpx").info("GET http://engine/?q=1")
os.write(2, b"native words\\n")
"""
    done = _python(code)
    file = tmp_path / "state" / "sparkd.log"
    text = file.read_text()

    assert done.stderr == "WARNING look here\nERROR a bug\n"
    assert re.search(r"ERROR sparkd.x a bug\\nTraceback .*ZeroDivisionError", text)
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO sparkd.x one\\nline with", text, re.MULTILINE)
    assert "native words" in text and KEY not in text and "not this" not in text and "httpx" not in text
    assert stat.S_IMODE(file.stat().st_mode) & 0o137 == 0

    code = 'import logging; from sparkd.daemon import logs; logs.set_up("warning", None); logging.getLogger("a").error("b\\x1b[31m")'
    assert re.fullmatch(r"\S+ \S+ ERROR a b\?\[31m\n", _python(code).stderr), "the log of a service"


def test_serve_takes_its_folder_and_address_by_o_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("sparkd.daemon.daemon.serve", lambda config, options: served.append(config))
    monkeypatch.setattr("sparkd.daemon.logs.set_up", lambda level, folder: None)

    assert exit_code(["serve", "-o", f"state_dir={tmp_path}", "-o", "listen=127.0.0.1:4321"]) == 0
    assert [(config.state_dir, config.port) for config in served] == [(tmp_path, 4321)]


def test_a_model_on_the_command_line_keeps_what_o_says_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("sparkd.daemon.daemon.serve", lambda config, options: served.append(config))
    monkeypatch.setattr("sparkd.daemon.logs.set_up", lambda level, folder: None)

    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    argv = ["--state-dir", str(tmp_path / "s"), "--model", str(tmp_path / "m"), "--name", "it", "-o", "models.it.dtype=float32"]
    assert exit_code(["serve", *argv]) == 0
    assert [(config.models["it"].dtype, config.models["it"].model) for config in served] == [("float32", str(tmp_path / "m"))]


def test_a_shell_completes_verbs_and_options() -> None:
    script = ROOT / "deploy" / "completions" / "sparkd.bash"
    words = f'source {script}; COMP_WORDS=($1); COMP_CWORD=$2; _sparkd {Path(sys.executable).parent}/sparkd; echo "${{COMPREPLY[@]}}"'

    def completed(line: str, at: int) -> list[str]:
        argv = ["bash", "-c", words, "bash", line, str(at)]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()

    assert completed("sparkd lo", 1) == ["load", "logs"]
    assert "--wide" in completed("sparkd ps --", 2)
    assert completed("sparkd requests c", 2) == ["cancel"]


def test_a_curl_survives_the_shell() -> None:
    command = show.curl("http://h:1", "m", 'What\'s "up"? $HOME', needs_key=True)
    script = f"printf '%s\\n' {command.removeprefix('curl')}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)

    assert json.loads(done.stdout.splitlines()[-1])["messages"][0]["content"] == 'What\'s "up"? $HOME'
    assert "Bearer $SPARKD_API_KEY" in command


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert show.printable("a\x1b]0;title\x07b\r\n\tc\x9b2J\u202ed\u2066") == "a]0;titleb\n\tc2Jd"


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
