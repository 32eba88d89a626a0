"""URLs in a request: what an engine fetches, by vLLM's own connector behind ours. No engine is started."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.launch import rank_fields
from sparkd.config.config import load_config, parse_model
from sparkd.errors import ConfigError
from tests.support.late import Late
from workers.rank.command import NO_HOST, build_command, build_environment
from workers.rank.spec import RankSpec
from workers.vllm import media

HOST = "pictures.test"
vllm_media = Late("vllm.multimodal.media")


class Bytes:
    """As a MediaIO of vLLM's: what was read, unread."""

    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        return base64.b64decode(data)

    def load_file(self, path: Path) -> bytes:
        return path.read_bytes()

    def get_max_bytes(self) -> int:
        return 100


@pytest.fixture
def server() -> Iterator[str]:
    """A server on this machine's loopback; `asked` of its handler says which paths were fetched."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path == "/away":
                self.send_response(302)
                self.send_header("Location", f"http://localhost:{port}/secret")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            body = b"x" * (1000 if self.path == "/large" else 10)
            self.send_response({"/missing": 404, "/broken?key=canary": 500}.get(self.path, 200))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    asked.clear()
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    port = made.server_address[1]
    yield str(port)
    made.shutdown()
    made.server_close()


asked: list[str] = []


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The addresses of each name. Any other name is unknown."""
    known = {HOST: ["127.0.0.1"], "localhost": ["127.0.0.1"]}

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [
            (socket.AF_INET6, 1, 6, "", (one, port, 0, 0)) if ":" in one else (socket.AF_INET, 1, 6, "", (one, port)) for one in known[host]
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch, names: Any) -> None:
    """Our connector in vLLM's registry, and nothing that waits before it tries again."""

    async def at_once(_: float) -> None: ...

    monkeypatch.setattr(vllm_media.MEDIA_CONNECTOR_REGISTRY, "name2class", dict(vllm_media.MEDIA_CONNECTOR_REGISTRY.name2class))
    monkeypatch.setattr("vllm.connections.time.sleep", lambda _: None)
    monkeypatch.setattr("vllm.connections.asyncio.sleep", at_once)
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    media.register()


def connector(*domains: str, **keys: Any) -> Any:
    """As vLLM makes it for a request."""
    from vllm.connections import HTTPConnection

    load = vllm_media.MEDIA_CONNECTOR_REGISTRY.load
    return load("http", connection=HTTPConnection(), allowed_media_domains=[*(domains or (NO_HOST,))], **keys)


def load(url: str, *domains: str, **keys: Any) -> bytes:
    """Both ways in which vLLM loads, which fail alike."""

    async def run() -> bytes:
        made = connector(*domains, **keys)
        try:
            found: bytes = await made.load_from_url_async(url, Bytes())
        finally:
            await (await made.connection.get_async_client()).close()
        return found

    try:
        found = asyncio.run(run())
    except ValueError as error:
        with pytest.raises(ValueError) as caught:
            connector(*domains, **keys).load_from_url(url, Bytes())
        assert str(caught.value) == str(error)
        raise
    assert connector(*domains, **keys).load_from_url(url, Bytes()) == found
    return found


def test_data_are_always_read() -> None:
    assert load(f"data:image/png;base64,{base64.b64encode(b'here').decode()}") == b"here"


@pytest.mark.parametrize(
    "address",
    ["{host}:{port}", "127.0.0.1:{port}", "[::1]:{port}", "2130706433:{port}", "127.1:{port}", "other.test@127.0.0.1:{port}",
     "127.0.0.1:{port}\\@other.test", "other.test\\@127.0.0.1:{port}", "127.0.0.1:{port}#@other.test", "127.0.0.1:{port}/@other.test",
     "127.0.0.1:{port}%2F@other.test", "{host}.:{port}", "169.254.169.254"],
)  # fmt: skip
def test_no_host_is_asked_that_is_not_named(address: str, server: str) -> None:
    url = f"http://{address.format(host=HOST, port=server)}/x"
    for domains in ((), ("other.test",)):
        with pytest.raises(ValueError) as caught:
            load(url, *domains)
        assert str(caught.value) == media.FAILED
    assert asked == []


def test_what_stands_for_no_host_can_be_no_urls_host(server: str, names: dict[str, list[str]]) -> None:
    """A search domain with a wildcard has an address for any name."""
    host = NO_HOST.rstrip("/")
    names[host] = ["127.0.0.1"]
    for spelled in (host, NO_HOST, f"{host}%2F", f"{host}\\/"):
        with pytest.raises(ValueError, match=r"^The medium behind this URL"):
            load(f"http://{spelled}:{server}/x")
    assert asked == []


def test_a_named_host_is_fetched_on_any_port(server: str) -> None:
    assert load(f"http://{HOST}:{server}/x", HOST) == b"x" * 10
    assert load(f"HTTP://{HOST.upper()}:{server}/x", "other.test", HOST) == b"x" * 10


def test_no_redirect_is_followed(server: str) -> None:
    assert load(f"http://{HOST}:{server}/away", HOST) == b""
    assert asked == ["/away", "/away"]


def test_what_fails_says_neither_its_url_nor_why(server: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    at = f"http://{HOST}:{server}"
    urls = (f"http://{HOST}:{port}/?canary", f"{at}/missing", f"{at}/broken?key=canary", "http://unknown.test/?canary", f"{at}/large")

    for url in urls:
        with pytest.raises(ValueError) as caught:
            load(url, HOST, "unknown.test")
        assert str(caught.value) == media.FAILED
        assert caught.value.__suppress_context__, "a traceback would show the URL"
    assert asked.count("/broken?key=canary") > 2, "vLLM tries again"
    assert "canary" not in caplog.text


def test_a_file_is_read_only_where_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"a")
    (tmp_path / "out").write_bytes(b"b")
    inside, outside = f"file://{tmp_path}/in/a", f"file://{tmp_path}/in/../out"

    for url in (inside, outside, "file:///etc/passwd", "FILE:///etc/passwd", "ftp://a/b", "/etc/passwd", "", "http:"):
        with pytest.raises(ValueError):
            load(url, HOST)
    assert load(inside, allowed_local_media_path=str(tmp_path / "in")) == b"a"
    with pytest.raises(ValueError):
        load(outside, allowed_local_media_path=str(tmp_path / "in"))


# From an entry to an engine.


def engine(*flags: str, **keys: Any) -> RankSpec:
    config = load_config(None, environ={})
    spec = parse_model("m", {"model": "o/m", "extra_args": flags, **keys}, over_admin=False)
    fields = rank_fields(config, spec, "cpu", "tests.stub", None)
    more = {"rank_id": "r", "generation": 1, "node_id": "n", "rank": 0, "run_dir": "/r", "log_path": "/l", "config_hash": "h"}
    made = RankSpec.from_dict(fields | more | {"runtime": "/usr/bin/python3", "env": dict(spec.environment(config.engine))})
    return RankSpec.from_dict(json.loads(json.dumps(made.to_dict())))


def parsed(spec: RankSpec) -> Any:
    """As vLLM reads the flag."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = build_command(spec)
    return EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(command[command.index("--model") :])[0].allowed_media_domains


def test_an_entry_tells_its_engine_where_it_may_fetch_from() -> None:
    assert parsed(engine()) == [NO_HOST], "an empty list would allow any host"
    assert parsed(engine(media={"domains": ["Pictures.test", "b.test"]})) == ["pictures.test", "b.test"]
    assert parsed(engine("--allowed-media-domains", "c.test")) == ["c.test"]


def test_no_environment_lets_an_engine_follow_a_redirect() -> None:
    assert build_environment(engine(), {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "1"})["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    with pytest.raises(ConfigError):
        engine(env={"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "1"})


@pytest.mark.parametrize("hosts", [["http://a"], ["a:80"], "a.test"])
def test_what_is_no_host_is_refused(hosts: Any) -> None:
    with pytest.raises(ConfigError):
        parse_model("m", {"model": "o/m", "media": {"domains": hosts}}, over_admin=False)


def test_an_admin_key_opens_no_network() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model("m", {"model": "o/m", "media": {"domains": ["a.test"]}}, over_admin=True)
    assert caught.value.param == "media"
