"""What the daemon asks of its configuration before it starts: address, keys, folders, reserve, and what `sparkd check` says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sparkd.cli.config_check import check
from sparkd.config.config import Config, check_bind, is_loopback, load_config
from sparkd.errors import ConfigError
from tests.support.facts import lacking

KEY = "sk-canary-0123456789"
GIB = 1024**3


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str) -> Config:
        file = tmp_path / "sparkd.yaml"
        file.write_text(text)
        return load_config(file, environ={})

    return load


@pytest.mark.parametrize(
    ("listen", "host", "port", "loopback"),
    [
        ("localhost:80", "127.0.0.1", 80, True),
        ("[::1]:4000", "::1", 4000, True),
        ("[::ffff:127.0.0.1]:1", "::ffff:127.0.0.1", 1, True),
        ("0.0.0.0:4000", "0.0.0.0", 4000, False),
        ("192.168.100.10:4000", "192.168.100.10", 4000, False),
        ("[fe80::1%enP7s7]:4000", "fe80::1%enP7s7", 4000, False),
        ("localhost.example.org:1", "localhost.example.org", 1, False),
    ],
)
def test_only_the_loopback_needs_no_key(load, listen: str, host: str, port: int, loopback: bool) -> None:
    config = load(f"listen: '{listen}'")

    assert (config.host, config.port, is_loopback(config.host)) == (host, port, loopback)
    if loopback:
        check_bind(config, {})
        return
    with pytest.raises(ConfigError, match=f"^listen: {re.escape(listen)} "):
        check_bind(config, {})
    check_bind(load(f"listen: '{listen}'\nkeys: {{inference: [{KEY}]}}"), {})
    check_bind(load(f"listen: '{listen}'\nkeys: {{admin: [{KEY}]}}"), {})


@pytest.mark.parametrize("listen", ["a:65536", "::1:4000", "a:1\n", "[fe80::1%]:1", "[fe80::1%a/b]:1"])
def test_what_is_no_address(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"(host:port|65536)\b"):
        load_config(None, flags={"listen": listen}, environ={})


def test_every_web_page_needs_a_key(load) -> None:
    every, some = "cors: {origins: ['*']}", "cors: {origins: ['https://Chat.example', 'http://localhost:3000']}"
    with pytest.raises(ConfigError, match=r"cors\.origins"):
        check_bind(load(every), {})
    check_bind(load(f"{every}\nkeys: {{inference: [{KEY}]}}"), {})
    check_bind(load(some), {})
    assert load(some).cors.origins == ("https://chat.example", "http://localhost:3000")


@pytest.mark.parametrize("origin", ["app://obsidian.md", "chrome-extension://abcdefghijklmnop", "tauri://localhost", "http://[::1]:3000"])
def test_the_origins_of_programs(load, origin: str) -> None:
    assert load(f"cors: {{origins: [{json.dumps(origin)}]}}").cors.origins == (origin,)


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "null", "https://x\ny", "file://", "1x://a", "://a"])
def test_what_is_no_origin(load, origin: str) -> None:
    with pytest.raises(ConfigError):
        load(f"cors: {{origins: [{json.dumps(origin)}]}}")


def test_one_default_at_most(load) -> None:
    models = "models: {a: {model: o/a, default: true}, b: {model: o/b%s}}"
    assert [model.default for model in load(models % "").models.values()] == [True, False]
    with pytest.raises(ConfigError, match=r"models\.b\.default"):
        load(models % ", default: true")


def test_runtime_folder_is_short_and_one_per_state_folder(tmp_path: Path) -> None:
    def runtime(**flags: str) -> str:
        return str(load_config(None, flags=flags, environ={}).runtime_path)

    deep = str(tmp_path / ("d" * 200))
    assert runtime() == "/run/sparkd"
    assert runtime(state_dir=deep, runtime_dir="/r") == "/r"
    assert re.fullmatch(r"/tmp/sparkd-\d+-[0-9a-f]{8}", runtime(state_dir=deep))
    assert runtime(state_dir=deep) == runtime(state_dir=deep + "/./")
    assert runtime(state_dir=deep) != runtime(state_dir=deep + "/x")


def test_rays_token_is_the_keys_or_the_credential_or_our_own(load, tmp_path: Path) -> None:
    config, credentials = load("state_dir: /s"), {"CREDENTIALS_DIRECTORY": str(tmp_path)}

    assert config.token_path() == Path("/s/ray.token")
    (tmp_path / "ray.token").write_text("\n")
    assert config.token_path(credentials) == Path("/s/ray.token")
    (tmp_path / "ray.token").write_text("token\n")
    assert config.token_path(credentials) == tmp_path / "ray.token"
    assert load("cluster: {token_file: /t}").token_path(credentials) == Path("/t")


@pytest.mark.parametrize(("reserve", "total_gib", "reserved_gib"), [("auto", 119, 7), ("auto", 24, 2.4), (0.5, 24, 0.5)])
def test_memory_that_no_model_is_given(load, reserve: Any, total_gib: float, reserved_gib: float) -> None:
    memory = load(f"memory: {{os_reserve_gib: {reserve}}}").memory

    assert memory.os_reserve_bytes(total_gib * GIB) == pytest.approx(reserved_gib * GIB, abs=1)


def test_check_says_what_start_would_say_and_warns(tmp_path: Path) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text(
        f"listen: 0.0.0.0:4000\nkeys: {{inference: [short, {KEY}]}}\nengine: {{runtime: /no/python}}\n"
        "models: {a: {model: /no, runtime: /no/p}}"
    )
    file.chmod(0o644)

    problems = check(file, {})
    assert {problem.severity for problem in problems} == {"warning"}
    text = "\n".join(map(str, problems))
    # A short key, no admin key, a file that every user of this machine may read, and three paths.
    assert len(problems) == 6 and lacking(text, "16", "chmod 640", "/no/python", "models.a.model", "/no/p") == []
    assert KEY not in text
    (tmp_path / "empty").mkdir()
    file.write_text(f"models: {{a: {{model: {tmp_path}/empty}}}}")
    assert [lacking(str(one), f"{tmp_path}/empty", "`model`", "owner/name") for one in check(file, {})] == [[]]
