"""URLs in a request: what an engine fetches, by vLLM's own connector class with ours in its place. No engine is started."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.launch_spec import rank_fields
from sparkd.config.config import load_config, parse_model
from sparkd.errors import ConfigError
from sparkd.vllm.translate import Translation
from workers import plugin
from workers.host.media_rules import CONNECTOR, CONNECTOR_VARIABLE, VARIABLE, Rules, is_public
from workers.rank.command import build_environment
from workers.rank.spec import RankSpec
from workers.vllm import media

HOST = "pictures.test"


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


@pytest.fixture(scope="module")
def vllm_media() -> Any:
    import vllm.multimodal.media as found

    return found


@pytest.fixture
def server() -> Iterator[str]:
    """A server on this machine's loopback; `asked` of its handler says which paths were fetched."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/to/"))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            body = b"x" * (1000 if self.path == "/large" else 10)
            self.send_response(404 if self.path == "/missing" else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    asked.clear()
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield str(made.server_address[1])
    made.shutdown()
    made.server_close()


asked: list[str] = []


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The addresses of each name. Any other name is unknown."""
    known = {HOST: ["127.0.0.1"], "mapped.test": ["::ffff:127.0.0.1"], "localhost": ["127.0.0.1"]}

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [
            (socket.AF_INET6, 1, 6, "", (one, port, 0, 0)) if ":" in one else (socket.AF_INET, 1, 6, "", (one, port)) for one in known[host]
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


def load(vllm_media: Any, url: str, rules: Rules, **keys: Any) -> bytes:
    made = media.connector(rules)(**keys)

    async def run() -> bytes:
        found: bytes = await made.load_from_url_async(url, Bytes())
        return found

    return asyncio.run(run())


LOCAL = Rules(frozenset({HOST, "127.0.0.1", "::1"}), local=True)


def test_vllm_loads_our_connector_by_its_name(vllm_media: Any) -> None:
    media.register({VARIABLE: '{"domains": ["A.test"], "local": false}'})
    made = vllm_media.MEDIA_CONNECTOR_REGISTRY.load(
        CONNECTOR, media_io_kwargs=None, allowed_local_media_path="", allowed_media_domains=None
    )

    assert isinstance(made, vllm_media.MediaConnector) and type(made) is not vllm_media.MediaConnector
    with pytest.raises(ValueError):
        made.load_from_url("http://b.test/x", Bytes())


@pytest.mark.parametrize("error", [ImportError, AttributeError])
def test_a_vllm_without_a_registry_reads_data_and_fetches_from_named_hosts_only(
    vllm_media: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise error("registry")

    class Args:
        """As vLLM's EngineArgs: what of it decides on media."""

        allowed_media_domains: list[str] | None = None

        def __init__(self, domains: list[str] | None = None) -> None:
            self.allowed_media_domains = domains

        def create_model_config(self) -> list[str] | None:
            return self.allowed_media_domains

    monkeypatch.setattr(media, "register", fail)
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", types.SimpleNamespace(EngineArgs=Args))
    monkeypatch.setenv(CONNECTOR_VARIABLE, CONNECTOR)
    monkeypatch.delenv(VARIABLE, raising=False)
    plugin._guard_media()

    assert CONNECTOR_VARIABLE not in os.environ, "vLLM's own connector reads a data: URL"
    closed = Args().create_model_config()
    assert closed == [media.NOWHERE]
    with pytest.raises(ValueError):
        vllm_media.MediaConnector(allowed_media_domains=closed).load_from_url("http://127.0.0.1:1/x", Bytes())
    url = f"data:image/png;base64,{base64.b64encode(b'here').decode()}"
    assert vllm_media.MediaConnector(allowed_media_domains=closed).load_from_url(url, Bytes()) == b"here"
    assert Args(["a.test"]).create_model_config() == ["a.test"]


def test_data_are_always_read(vllm_media: Any) -> None:
    url = f"data:image/png;base64,{base64.b64encode(b'here').decode()}"

    assert load(vllm_media, url, Rules()) == b"here"
    assert media.connector(Rules())().load_from_url(url, Bytes()) == b"here"


@pytest.mark.parametrize(
    "address",
    ["{host}:{port}", "127.0.0.1:{port}", "[::1]:{port}", "2130706433:{port}", "127.1:{port}", "a@127.0.0.1:{port}", "169.254.169.254"],
)  # fmt: skip
def test_nothing_is_fetched_unless_its_host_is_named(vllm_media: Any, address: str, server: str) -> None:
    url = f"http://{address.format(host=HOST, port=server)}/x"
    for rules in (Rules(), Rules(frozenset({"other.test"})), Rules(frozenset({"other.test"}), local=True)):
        with pytest.raises(ValueError) as caught:
            load(vllm_media, url, rules)
        assert "/x" not in str(caught.value) and server not in str(caught.value)
        with pytest.raises(ValueError):
            media.connector(rules)().load_from_url(url, Bytes())
    assert asked == []


@pytest.mark.parametrize("host", [HOST, "mapped.test", "[::1]", "169.254.169.254"])
def test_a_named_host_in_an_own_network_is_not_reached(vllm_media: Any, host: str, server: str) -> None:
    rules = Rules(frozenset({host.strip("[]")}))

    with pytest.raises(ValueError) as caught:
        load(vllm_media, f"http://{host}:{server}/x", rules)

    assert asked == [] and host.strip("[]") not in str(caught.value)


def test_a_named_host_is_fetched_where_local_addresses_are_allowed(vllm_media: Any, server: str) -> None:
    assert load(vllm_media, f"http://{HOST}:{server}/x", LOCAL) == b"x" * 10
    assert load(vllm_media, f"HTTP://{HOST.upper()}:{server}/x", LOCAL) == b"x" * 10
    assert media.connector(LOCAL)().load_from_url(f"http://{HOST}:{server}/x", Bytes()) == b"x" * 10
    assert load(vllm_media, f"http://127.0.0.1:{server}/y", Rules(local=True), allowed_media_domains=["127.0.0.1"]) == b"x" * 10


def test_an_answer_that_leads_on_is_judged_anew(vllm_media: Any, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "1")
    at = f"http://{HOST}:{server}"

    assert load(vllm_media, f"{at}/to//x", LOCAL) == b"x" * 10
    for elsewhere in (f"http://localhost:{server}/secret", "file:///etc/passwd", "//localhost/secret", at + "/to/" * 9 + "/x"):
        with pytest.raises(ValueError):
            load(vllm_media, f"{at}/to/{elsewhere}", LOCAL)
    assert "/secret" not in asked

    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    with pytest.raises(ValueError):
        load(vllm_media, f"{at}/to//x", LOCAL)


def test_what_fails_does_not_say_why(vllm_media: Any, server: str, names: dict[str, list[str]], caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    names["inside.test"] = ["192.168.7.7"]
    rules = Rules(frozenset({HOST, "inside.test", "unknown.test"}), local=True)
    shut = Rules(rules.domains)

    told = set()
    for url, allowed in (
        (f"http://{HOST}:{port}/canary", rules), (f"http://{HOST}:{server}/missing", rules), ("http://unknown.test/canary", rules),
        ("http://inside.test/canary", shut), (f"http://{HOST}:{server}/x", shut),
    ):  # fmt: skip
        with pytest.raises(ValueError) as caught:
            load(vllm_media, url, allowed)
        told.add(str(caught.value))
    assert len(told) == 1
    assert "canary" not in caplog.text


def test_what_is_too_large_is_not_read_to_its_end(vllm_media: Any, server: str) -> None:
    with pytest.raises(ValueError, match="100 bytes"):
        load(vllm_media, f"http://{HOST}:{server}/large", LOCAL)


def test_a_file_is_read_only_where_a_folder_is_named(vllm_media: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"a")
    (tmp_path / "out").write_bytes(b"b")
    inside, outside = f"file://{tmp_path}/in/a", f"file://{tmp_path}/in/../out"

    for url in (inside, outside, "file:///etc/passwd", "FILE:///etc/passwd", "ftp://a/b", "/etc/passwd", "", "http:"):
        with pytest.raises(ValueError):
            load(vllm_media, url, LOCAL)
    assert load(vllm_media, inside, Rules(), allowed_local_media_path=str(tmp_path / "in")) == b"a"
    with pytest.raises(ValueError):
        load(vllm_media, outside, Rules(), allowed_local_media_path=str(tmp_path / "in"))


@pytest.mark.parametrize(
    ("address", "public"),
    [("93.184.216.34", True), ("2606:2800:220:1:248:1893:25c8:1946", True), ("10.1.2.3", False), ("100.64.0.1", False),
     ("169.254.169.254", False), ("127.0.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("::1", False), ("fe80::1%eth0", False),
     ("fd00::1", False), ("::ffff:10.0.0.1", False), ("64:ff9b::a00:1", False), ("2002:7f00:1::", False), ("name", False),
     ("192.0.0.8", False), ("192.88.99.1", False), ("::127.0.0.1", False), ("::ffff:0:10.0.0.1", False), ("fec0::1", False),
     ("5f00::1", False), ("3fff::1", False), ("4000::1", False), ("2001::1", False), ("100:0:0:1::1", False)],
)  # fmt: skip
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) == public


# From an entry to an engine.


def environment(**keys: Any) -> dict[str, str]:
    config = load_config(None, environ={})
    spec = parse_model("m", {"model": "o/m", **keys}, over_admin=False)
    fields = rank_fields(config, spec, "cpu", "tests.stub", Translation((), {}), None)
    more = {"rank_id": "r", "generation": 1, "node_id": "n", "rank": 0, "run_dir": "/r", "log_path": "/l", "config_hash": "h"}
    made = RankSpec.from_dict(fields | more | {"runtime": "/usr/bin/python3", "env": dict(spec.environment(config.engine))})
    return build_environment(RankSpec.from_dict(made.to_dict()), {"VLLM_MEDIA_CONNECTOR": "http"})


def test_an_entry_tells_its_engine_where_it_may_fetch_from() -> None:
    assert environment()[CONNECTOR_VARIABLE] == CONNECTOR
    assert Rules.parse(environment()) == Rules()
    assert Rules.parse(environment(media={"domains": ["Pictures.test"]})) == Rules(frozenset({"pictures.test"}))
    assert Rules.parse(environment(media={"domains": ["a.test"], "local": True})) == Rules(frozenset({"a.test"}), local=True)


@pytest.mark.parametrize("hosts", [["http://a"], ["a:80"], "a.test"])
def test_what_is_no_host_is_refused(hosts: Any) -> None:
    with pytest.raises(ConfigError):
        parse_model("m", {"model": "o/m", "media": {"domains": hosts}}, over_admin=False)


def test_an_admin_key_opens_no_network() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model("m", {"model": "o/m", "media": {"domains": ["a.test"]}}, over_admin=True)
    assert caught.value.param == "media"
