"""S6: who may do what, as one table over real sockets; the table is authorisation.golden, and this file writes it when run.

python -m tests.sparkd.gateway.test_authorisation_matrix > tests/sparkd/gateway/authorisation.golden
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sparkd.gateway.keys import KeyDigests, Role, digest
from sparkd.gateway.routes import EXACT
from tests.sparkd.gateway.fakes import Client, RawEngine, Running, request, serving

COMMAND = "python -m tests.sparkd.gateway.test_authorisation_matrix > tests/sparkd/gateway/authorisation.golden"
GOLDEN = Path(__file__).with_name("authorisation.golden")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
INFERENCE, ADMIN = "inference-key-0123456789", "admin-key-0123456789"
KEYS = {
    "none": "",
    "wrong": "Authorization: Bearer wrong",
    "inference": f"Authorization: Bearer {INFERENCE}",
    "admin": f"X-API-Key: {ADMIN}",
}
BODY = b'{"model":"tiny"}'

PATHS = [
    *EXACT,
    "/v1/models/tiny",
    "/v1/models/small",
    "/v1/models/nobody",
    "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel",
    "/ui/0123456789abcdef/style.css",
    "/admin/v1/models",
    "/admin/v1/models/org%2Ftiny",
    "/admin/v1/models/..x",
]
# Ways to write a path so that one reader takes it for another; all but three of them lead nowhere.
TRICKS = [
    "/nowhere",
    "//admin/v1/models",
    "/admin//v1/models",
    "/admin/v1/models/",
    "/admin/v1/./models",
    "/admin/v1/models/..",
    "/admin/v1/%2e%2e/models",
    "/admin/v1/..%2fmodels",
    "/admin/v1/models;x=1",
    "/admin/v1/models%5cx",
    "/admin/v1/models%00",
    "/admin/v1/models%0d%0ax",
    "/admin%2fv1/models",
    "/%61dmin/v1/models",
    "/ADMIN/V1/MODELS",
    "/admin/v1models",
    "/livez/../admin/v1/models",
    "/livez/..;/admin/v1/models",
    "/livez%2f..%2fadmin/v1/models",
    "/v1/models/../../admin/v1/models",
    "/v1/models/%2e%2e/%2e%2e/admin/v1/models",
    "/ui/..",
    "/ui/style.css",
    "/ui/0123456789abcdef/../../admin/v1/models",
    "/ui/0123456789abcdef/.hidden",
    "/v1/models/tiny/",
    "/v1/models/ti%6Ey",
    "/v1/models/tiny%00",
    "/v1/models?x=/livez",
    "/v1/models%3fx",
    "/v1/models#x",
    "/v1/chat/completions/",
    "/v1/chat/../chat/completions",
    "/v1/responses/..",
    "/v1/responses/a%2fcancel",
    "/v1/responses/resp.1",
    "http://localhost/admin/v1/models",
    "http://evil/v1/models",
    "/http://localhost/livez",
    "*",
    # What vLLM itself would answer and sparkd does not forward.
    "/pause",
    "/reset_prefix_cache",
    "/v1/realtime",
    "/v1/load_lora_adapter",
    "/sleep",
    "/collective_rpc",
    "/update_weights",
    "/openapi.json",
]


async def table(gateway: Running) -> list[str]:
    """A row for each path and each set of statuses: the path, the methods that have them, the status by key."""
    rows = []
    client = await gateway.open()
    for path in [*PATHS, *TRICKS]:
        methods: dict[str, list[str]] = {}
        for method in METHODS if path in PATHS else ("GET", "POST"):
            statuses = []
            for name, header in KEYS.items():
                client = await ask(gateway, client, method, path, header)
                answer = await client.answer(head_only=method == "HEAD")
                statuses.append(f"{name}={answer.status}")
            methods.setdefault(" ".join(statuses), []).append(method)
        rows += [f"{path} {','.join(same)} {statuses}" for statuses, same in methods.items()]
    return rows


async def ask(gateway: Running, client: Client, method: str, path: str, *headers: str) -> Client:
    if client.reader.at_eof():
        await client.close()
        client = await gateway.open()
    kind = "multipart/form-data; boundary=XX" if "/audio/" in path else "application/json"
    body = form() if "/audio/" in path else BODY
    lines = [header for header in headers if header]
    if method in ("POST", "PUT", "PATCH"):
        client.send(request(method, path, *lines, f"Content-Type: {kind}", f"Content-Length: {len(body)}") + body)
    else:
        client.send(request(method, path, *lines))
    return client


def form() -> bytes:
    return b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--XX--\r\n'


def keys() -> KeyDigests:
    return KeyDigests.of(inference=["another", INFERENCE], admin=[ADMIN, "a-second"])


async def test_the_table_is_the_golden_one(engine: RawEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # pytest would print the log's line of each of some 2,000 requests below a difference
    async with serving(engine, keys=keys()) as gateway:
        rows = await table(gateway)
    kept = GOLDEN.read_text().splitlines()
    changed = [line for line in difflib.unified_diff(kept, rows, "kept", "answered", lineterm="", n=0) if not line.startswith("@@")]
    assert not changed, "\n".join([f"if that is meant, write the table anew: {COMMAND}", *changed[:40]])


def test_the_golden_table_says_what_it_should() -> None:
    """The file may be written anew; these sentences may not."""
    for row in GOLDEN.read_text().splitlines():
        path, methods, none, wrong, inference, admin = row.split(" ")
        statuses = {name: int(cell.partition("=")[2]) for name, cell in zip(KEYS, (none, wrong, inference, admin), strict=True)}
        assert statuses["none"] == statuses["wrong"], row
        assert max(statuses.values()) < 500, row
        if path in TRICKS and path not in ("/v1/models?x=/livez", "/v1/models/ti%6Ey") and not path.startswith("/v1/models/"):
            assert set(statuses.values()) == {404}, row
        if path in ("/admin/v1", "/admin/v1/models") and "GET" in methods:
            assert list(statuses.values()) == [401, 401, 403, 200] and "DELETE" in methods, row
        if {"OPTIONS", "TRACE"} & {*methods.split(",")}:
            assert min(statuses.values()) >= 401, row
        if path.startswith("/v1/") and 200 in statuses.values():
            assert (statuses["none"], statuses["inference"], statuses["admin"]) == (401, 200, 200), row


async def test_missing_and_wrong_keys_get_the_same_words(engine: RawEngine) -> None:
    wrong = ("", "Authorization: Bearer wrong", "Authorization: Basic eDp5", "X-API-Key: wrong", "Authorization: Bearer", "X-API-Key:")
    async with serving(engine, keys=keys()) as gateway:
        seen = set()
        for header in wrong:
            for path in ("/v1/models", "/admin/v1/models"):
                headers = ["X-Request-Id: same"] + ([header] if header else [])
                answer = await gateway.get(path, *headers)
                assert answer.status == 401
                seen.add((answer.body, tuple(header for header in answer.headers.items() if header[0].lower() != "date")))
        assert len(seen) == 1


async def test_where_a_key_may_stand(engine: RawEngine) -> None:
    good = (
        f"Authorization: Bearer {INFERENCE}",
        f"authorization: bEARER  {INFERENCE}",
        f"X-Api-Key: {INFERENCE}",
        f"Authorization: Bearer {ADMIN}",
        "Authorization: Bearer another",
    )
    bad = (
        f"Authorization: {INFERENCE}",
        f"Authorization: Basic {INFERENCE}",
        f"Authorization: Bearer {INFERENCE}x",
        f"Authorization: Bearer {INFERENCE[:-1]}",
        f"Authorization: Bearer {INFERENCE} x",
        f"Cookie: key={INFERENCE}",
        f"Proxy-Authorization: Bearer {INFERENCE}",
        f"X_Api_Key: {INFERENCE}",
    )
    async with serving(engine, keys=keys()) as gateway:
        assert [(await gateway.get("/v1/models", header)).status for header in good] == [200] * len(good)
        assert [(await gateway.get("/v1/models", header)).status for header in bad] == [401] * len(bad)
        assert (await gateway.get(f"/v1/models?api_key={INFERENCE}")).status == 401
        twice = await gateway.get("/v1/models", f"X-Api-Key: {INFERENCE}", f"X-Api-Key: {ADMIN}")
        assert twice.status == 400


async def test_keys_may_change_while_it_runs(engine: RawEngine) -> None:
    async with serving(engine) as gateway:
        assert (await gateway.get("/v1/models")).status == 200
        gateway.edge.settings = replace(gateway.edge.settings, keys=keys())
        assert (await gateway.get("/v1/models")).status == 401
        gateway.edge.settings = replace(gateway.edge.settings, keys=KeyDigests.of(inference=["new"]))
        assert (await gateway.get("/v1/models", "X-Api-Key: new")).status == 200
        assert (await gateway.get("/admin/v1/models", "X-Api-Key: new")).status == 403


async def test_metrics_need_a_key_only_if_so_configured(engine: RawEngine) -> None:
    async with serving(engine, keys=keys(), metrics_need_key=True) as gateway:
        assert (await gateway.get("/metrics")).status == 401
        assert (await gateway.get("/metrics", f"X-Api-Key: {INFERENCE}")).status == 200
        gateway.edge.settings = replace(gateway.edge.settings, metrics_need_key=False)
        assert (await gateway.get("/metrics")).status == 200


async def test_without_keys_no_web_page_gets_in(gateway: Running) -> None:
    """A page's name may be rebound to 127.0.0.1, and a page may send a form or a plain fetch: neither may reach anything."""
    for path in ("/v1/models", "/admin/v1/models", "/metrics", "/", "/ui/"):
        for host in ("localhost", "LOCALHOST:4000", "127.0.0.1", "127.0.0.1:4000", "[::1]:4000"):
            assert (await gateway.get(path, f"Host: {host}")).status == 200, (path, host)
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:4000", "10.0.0.1", "127.0.0.2", "[::2]"):
            assert (await gateway.get(path, f"Host: {host}")).status == 403, (path, host)
        for origin in ("http://localhost", "https://localhost"):
            assert (await gateway.get(path, f"Origin: {origin}")).status == 200, (path, origin)
        for origin in (
            "http://localhost:3000",
            "http://127.0.0.1",
            "https://evil.example",
            "null",
            "http://localhost.evil.example",
            "file://",
        ):
            assert (await gateway.get(path, f"Origin: {origin}")).status == 403, (path, origin)
    assert (await gateway.get("/livez", "Host: 10.0.0.1")).status == 200
    assert (await gateway.post("/admin/v1/models", b"", "Origin: https://evil.example")).status == 403
    assert len(gateway.admin_calls) == 7


async def test_with_keys_any_name_will_do(engine: RawEngine) -> None:
    async with serving(engine, keys=keys()) as gateway:
        for host in ("spark.example", "10.0.0.1:4000", "[fd00::1]:4000", "spark_1.lan"):
            assert (await gateway.get("/v1/models", f"Host: {host}", f"X-Api-Key: {INFERENCE}", "Origin: https://ui.example")).status == 200


async def test_a_host_header_cannot_name_a_path(engine: RawEngine) -> None:
    """CVE-2026-48710 and CVE-2026-49468: `Host: localhost/health?` made the URL's path another than the one that was routed."""
    hosts = ("localhost/health?", "localhost/livez#", "localhost:1/#@x", "x@localhost", "localhost?/livez", "a b", "localhost\\livez")
    async with serving(engine, keys=keys()) as gateway:
        for host in hosts:
            answer = await gateway.get("/admin/v1/models", f"Host: {host}")
            assert answer.status == 400, host
        assert gateway.admin_calls == []


def test_every_digest_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def counting(found: bytes, known: bytes) -> bool:
        compared.append(known)
        return found == known

    monkeypatch.setattr("sparkd.gateway.keys.compare_digest", counting)
    many = KeyDigests.of(inference=["0", "1", "2"], admin=["3", "4"])
    for key, role in ((b"0", Role.INFERENCE), (b"2", Role.INFERENCE), (b"3", Role.ADMIN), (b"4", Role.ADMIN), (b"x", Role.NOBODY)):
        compared.clear()
        assert many.role({b"x-api-key": key}) is role
        assert len(compared) == 5


def test_the_name_is_that_of_the_key_with_the_greatest_role() -> None:
    laptop, desk, boss = map(digest, ("laptop-key", "desk-key", "boss-key"))
    named = KeyDigests((laptop, desk), (boss,), {laptop: "laptop", desk: "desk", boss: "boss"})
    assert named.caller({b"x-api-key": b"desk-key"}) == (Role.INFERENCE, "desk")
    assert named.caller({b"authorization": b"Bearer laptop-key", b"x-api-key": b"boss-key"}) == (Role.ADMIN, "boss")
    assert named.caller({b"authorization": b"Bearer boss-key", b"x-api-key": b"laptop-key"}) == (Role.ADMIN, "boss")
    assert named.caller({b"x-api-key": b"another"}) == (Role.NOBODY, None)
    assert "laptop" not in repr(named)


async def _write() -> None:
    with TemporaryDirectory() as folder:
        engine = RawEngine(Path(folder) / "engine.sock")
        await engine.start()
        async with serving(engine, keys=keys()) as gateway:
            sys.stdout.write("\n".join(await table(gateway)) + "\n")
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(_write())
