"""A web page that somebody reads on this machine, also one of another port of it, steers nothing of a gateway without keys."""

from __future__ import annotations

import pytest

from sparkd.errors import Forbidden
from sparkd.gateway.keys import KeyDigests
from sparkd.gateway.pages import check_local
from sparkd.gateway.routes import EXACT, RouteKind
from tests.sparkd.gateway.fakes import Answer, RawEngine, Running, is_ours, post, request, serving

CHAT = "/v1/chat/completions"
BODY = b'{"model":"tiny"}'
JSON = "Content-Type: application/json"
FORM = (
    b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\ntiny\r\n--x--\r\n',
    "Content-Type: multipart/form-data; boundary=x",
)
ORDERS = ("/admin/v1/models/tiny/load", "/admin/v1/models/tiny/unload", "/admin/v1/reload")
ELSEWHERE = (
    ("Origin: http://localhost:3000",),
    ("Origin: null",),
    ("Sec-Fetch-Site: same-site",),
    ("Origin: http://localhost:4000", "Sec-Fetch-Site: cross-site"),
)
OWN = ((), ("Origin: http://localhost:4000", "Sec-Fetch-Site: same-origin"), ("Origin: http://LOCALHOST:4000",), ("Sec-Fetch-Site: none",))
HOST = "Host: localhost:4000"
# A person's page sends no header of these without asking first.
PROOFS = (JSON, "X-Sparkd-Client: curl", "Authorization: Bearer x", "X-Api-Key: x")
SIMPLE = ((), ("Content-Type: application/x-www-form-urlencoded",), ("Content-Type: text/plain; application/json",))


async def sent(gateway: Running, method: str, path: str, *headers: str, body: bytes = b"") -> Answer:
    return await gateway.ask(request(method, path, HOST, *headers, f"Content-Length: {len(body)}") + body)


def nothing_done(gateway: Running) -> bool:
    return not gateway.admin_calls and not gateway.supervisor.leased


@pytest.mark.parametrize("page", ELSEWHERE)
async def test_a_page_of_another_origin_gives_no_order(gateway: Running, page: tuple[str, ...]) -> None:
    for proof in PROOFS:
        for path in ORDERS:
            assert is_ours(await sent(gateway, "POST", path, *page, proof), 403)
        assert is_ours(await sent(gateway, "POST", CHAT, *page, proof, body=BODY), 403)
    for path in ("/admin/v1/doctor", "/admin/v1/fabric", "/v1/models"):
        assert is_ours(await sent(gateway, "GET", path, *page), 403)
    assert nothing_done(gateway)


@pytest.mark.parametrize("simple", SIMPLE)
async def test_what_a_page_may_send_without_asking_gives_no_order(gateway: Running, simple: tuple[str, ...]) -> None:
    for path in ORDERS:
        assert is_ours(await sent(gateway, "POST", path, *simple), 403)
    assert is_ours(await sent(gateway, "POST", CHAT, *simple, body=BODY), 403)
    body, content_type = FORM
    assert is_ours(await sent(gateway, "POST", "/v1/audio/transcriptions", content_type, body=body), 403)
    assert nothing_done(gateway)


@pytest.mark.parametrize("own", OWN)
async def test_programs_and_its_own_page_give_orders(gateway: Running, own: tuple[str, ...]) -> None:
    for proof in PROOFS:
        for path in ORDERS:
            assert (await sent(gateway, "POST", path, *own, proof)).status == 200
    assert (await sent(gateway, "POST", CHAT, *own, JSON, body=BODY)).status == 200
    assert (await sent(gateway, "POST", CHAT, *own, "X-Sparkd-Client: curl", body=BODY)).status == 200
    body, content_type = FORM
    assert (await sent(gateway, "POST", "/v1/audio/transcriptions", *own, content_type, "Authorization: Bearer x", body=body)).status == 200
    for path in ("/admin/v1/doctor", "/v1/models"):
        assert (await sent(gateway, "GET", path, *own)).status == 200
    assert (await sent(gateway, "DELETE", "/admin/v1/models/tiny", *own)).status == 200  # no page sends this without asking


def test_every_route_but_those_that_only_tell_refuses_a_page() -> None:
    page = {b"host": b"localhost:4000", b"sec-fetch-site": b"cross-site"}
    for route in EXACT.values():
        for method in route.methods:
            if route.kind in (RouteKind.ROOT, RouteKind.METRICS, RouteKind.LIVE, RouteKind.READY):
                check_local(page, method, reads_only=True, allowed_page=False)
                continue
            with pytest.raises(Forbidden):
                check_local(page, method, reads_only=False, allowed_page=False)
            check_local(page, method, reads_only=False, allowed_page=True)


async def test_with_keys_a_page_has_none_and_a_client_needs_no_proof(engine: RawEngine) -> None:
    async with serving(engine, keys=KeyDigests.of(inference=["i"], admin=["a"])) as gateway:
        assert is_ours(await sent(gateway, "POST", ORDERS[0], "Origin: http://localhost:3000"), 401)
        assert nothing_done(gateway)
        assert (await sent(gateway, "POST", ORDERS[0], "X-Api-Key: a")).status == 200
        assert (await gateway.ask(post(CHAT, BODY, "X-Api-Key: i"))).status == 200
