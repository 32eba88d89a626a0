"""Where an engine fetches the pictures, sounds and films of a request from: the hosts that its entry names, and no address of this network.

vLLM's own connector fetches any URL, so that who may ask a model may also ask for loopback, link-local and whatever the node reaches, and
writes a URL that fails into the log. This one stands in its place (MEDIA_CONNECTOR_REGISTRY, VLLM_MEDIA_CONNECTOR): a `data:` URL always
works, http only to a named host whose address is public once it is resolved, a file only below vLLM's --allowed-local-media-path. No
message tells a URL, and one that could not be fetched does not tell why.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

from workers.host.media_rules import CONNECTOR, Rules
from workers.vllm.symbols import symbol

# A host that no name server knows (RFC 2606, section 2).
NOWHERE = "sparkd.invalid"
MAX_REDIRECTS = 5
DEFAULT_TIMEOUT_S = 30.0
DEFAULT_MEBIBYTES = 256
_CHUNK_BYTES = 64 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)


def register(environ: Mapping[str, str]) -> None:
    """Put our connector into vLLM's registry. Raises MissingSymbol."""
    symbol("MEDIA_CONNECTOR_REGISTRY").register(CONNECTOR)(connector(Rules.parse(environ)))


def close(environ: Mapping[str, str]) -> None:
    """Without a registry: let vLLM's own connector fetch from the named hosts only, as --allowed-media-domains does. An empty list would
    allow all of them (MediaConnector._assert_url_in_allowed_media_domains). Raises MissingSymbol, or
    AttributeError where it has no such setting."""
    EngineArgs = symbol("EngineArgs")

    EngineArgs.allowed_media_domains  # noqa: B018
    rules, create_model_config = Rules.parse(environ), EngineArgs.create_model_config

    @functools.wraps(create_model_config)
    def closed(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.allowed_media_domains = sorted(rules.domains.union(self.allowed_media_domains or ())) or [NOWHERE]
        return create_model_config(self, *args, **kwargs)

    EngineArgs.create_model_config = closed


def connector(rules: Rules) -> Any:
    """A class of vLLM's MediaConnector that fetches as `rules` allow; what --allowed-media-domains names is allowed, too."""
    home = symbol("connector")
    base, global_thread_pool = home.MediaConnector, home.global_thread_pool

    class GuardedConnector(base):  # type: ignore[valid-type,misc]
        def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: float | None = None) -> Any:
            if not self._is_fetched(url):
                return super().load_from_url(url, media_io, fetch_timeout=fetch_timeout)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                data = pool.submit(asyncio.run, self._fetched(url, media_io, fetch_timeout)).result()
            return media_io.load_bytes(data)

        async def load_from_url_async(self, url: str, media_io: Any, *, fetch_timeout: float | None = None) -> Any:
            if not self._is_fetched(url):
                return await super().load_from_url_async(url, media_io, fetch_timeout=fetch_timeout)
            data = await self._fetched(url, media_io, fetch_timeout)
            return await asyncio.get_running_loop().run_in_executor(global_thread_pool, media_io.load_bytes, data)

        def _is_fetched(self, url: str) -> bool:
            """False for what vLLM's own connector may read: data, and a file where a folder for them is named."""
            scheme = url.partition(":")[0].lower()
            if scheme == "data":
                return False
            if scheme == "file" and self.allowed_local_media_path is not None:
                return False
            if scheme not in ("http", "https"):
                raise ValueError("Media come in the request itself, as a data: URL, or by an http or https URL: this one is neither.")
            return True

        async def _fetched(self, url: str, media_io: Any, timeout_s: float | None) -> bytes:
            named = frozenset(map(str.lower, self.allowed_media_domains or ()))
            return await fetched(url, Rules(rules.domains | named, rules.local), _limit_bytes(media_io), timeout_s)

    return GuardedConnector


async def fetched(url: str, rules: Rules, limit_bytes: int, timeout_s: float | None = None) -> bytes:
    """The bytes behind a URL. Raises ValueError, which names neither the URL nor what stands at its end."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=timeout_s or DEFAULT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(resolver=_resolver(rules), use_dns_cache=False, force_close=True)
    try:
        # No proxy: it would resolve the name itself, past every check.
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        ) as session:
            for _ in range(MAX_REDIRECTS + 1):
                target = _checked(url, rules)
                async with session.get(target, allow_redirects=False, headers={"User-Agent": "vLLM"}) as answer:
                    if answer.status in _REDIRECTS and _follows():
                        url = str(target.join(_parsed(answer.headers.get("Location", ""))))
                        continue
                    if answer.status != 200:
                        raise ValueError("The media's URL could not be fetched.")
                    return await _body(answer, limit_bytes)
    except (aiohttp.ClientError, OSError, TimeoutError):
        raise ValueError("The media's URL could not be fetched.") from None
    raise ValueError("The media's URL leads on too often.")


async def _body(answer: Any, limit_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
        data += chunk
        if len(data) > limit_bytes:
            raise ValueError(f"The media are larger than {limit_bytes} bytes.")
    return bytes(data)


def _checked(url: str, rules: Rules) -> Any:
    """The URL as aiohttp will use it, so that nothing else is checked than what is fetched."""
    target = _parsed(url)
    host = target.host
    if target.scheme not in ("http", "https") or not host or not rules.allows(host):
        raise ValueError(
            "This model fetches no media from the URL's host: send them as a data: URL, or have the host named in its `media:`."
        )
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return target
    if not rules.reaches(host):  # aiohttp resolves no literal address
        raise ValueError("The media's URL could not be fetched.")
    return target


def _parsed(url: str) -> Any:
    from yarl import URL

    try:
        return URL(url)
    except (ValueError, TypeError):
        raise ValueError("The media's URL cannot be read.") from None


def _resolver(rules: Rules) -> Any:
    """A resolver that leaves out every address that may not be reached. The client connects to an address of its answer."""
    from aiohttp.abc import AbstractResolver
    from aiohttp.resolver import ThreadedResolver

    class Checked(AbstractResolver):
        def __init__(self) -> None:
            self._inner = ThreadedResolver()

        async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[Any]:
            addresses = await self._inner.resolve(host, port, socket.AddressFamily(family))
            allowed = [address for address in addresses if rules.reaches(address["host"])]
            if not allowed:
                raise OSError("no address that may be reached")
            return allowed

        async def close(self) -> None:
            await self._inner.close()

    return Checked()


def _follows() -> bool:
    envs = symbol("envs")

    return bool(envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS)


def _limit_bytes(media_io: Any) -> int:
    """The smaller of vLLM's limit of a download and the medium's own; releases have none, one or both."""
    envs = symbol("envs")

    mebibytes = getattr(envs, "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", None) or DEFAULT_MEBIBYTES
    own = getattr(media_io, "get_max_bytes", lambda: None)()
    return min(limit for limit in (mebibytes << 20 if mebibytes > 0 else DEFAULT_MEBIBYTES << 20, own) if limit is not None)
