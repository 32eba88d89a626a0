"""The page's files as they are served: their names, types, tags and compressed forms."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"
ROOT = "/ui/"
INDEX = "index.html"
# In index.html: the folder of all other files.
FOLDER_MARK = b"{folder}"
DIGEST_CHARACTERS = 16

RawHeaders = list[tuple[bytes, bytes]]

_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".png": b"image/png",
    ".LICENSE": b"text/plain; charset=utf-8",
}
_COMPRESSED = (b"text/", b"image/svg")
# `blob:` and `data:` show a picture that the user chose for a chat; the page sets its styles through the CSSOM alone.
_POLICY = b"default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; base-uri 'none'"
_ALWAYS: RawHeaders = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"vary", b"accept-encoding"),
]
_FOR_EVER = (b"cache-control", b"public, max-age=31536000, immutable")
_ASK_AGAIN = (b"cache-control", b"no-cache")


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """An answer without its date and request id."""

    status: int
    headers: RawHeaders
    body: bytes


@dataclass(frozen=True, slots=True)
class _File:
    """
    tag: of its content.
    packed: compressed with gzip, None where that saves nothing.
    """

    kind: bytes
    content: bytes
    tag: bytes
    packed: bytes | None


class PageFiles:
    """The files of one folder. All but index.html lie below a name that their digest gives, so a browser may keep them for ever, and the
    modules of one release never meet those of another."""

    def __init__(self, folder: Path = STATIC) -> None:
        contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.suffix in _TYPES}
        self.digest = _digest(contents)
        index = contents.pop(INDEX).replace(FOLDER_MARK, self.digest.encode())
        self._files = {f"{ROOT}{self.digest}/{name}": _file(name, content) for name, content in contents.items()}
        self._files[ROOT] = _file(INDEX, index)

    def answer(self, path: str, headers: Mapping[bytes, bytes]) -> PageAnswer | None:
        """The answer to a GET of a path, None where there is no such file."""
        if path == ROOT.rstrip("/"):
            return PageAnswer(308, [*_ALWAYS, (b"location", ROOT.encode()), (b"content-length", b"0")], b"")
        file = self._files.get(path)
        if file is None:
            return None
        packed = file.packed if b"gzip" in headers.get(b"accept-encoding", b"") else None
        tag = b'"%s"' % file.tag if packed is None else b'"%s-gzip"' % file.tag
        always = [*_ALWAYS, _ASK_AGAIN if path == ROOT else _FOR_EVER, (b"etag", tag)]
        if headers.get(b"if-none-match") == tag:
            return PageAnswer(304, always, b"")
        body = file.content if packed is None else packed
        about = [(b"content-type", file.kind), (b"content-length", b"%d" % len(body))]
        return PageAnswer(200, [*always, *about, *([(b"content-encoding", b"gzip")] if packed is not None else [])], body)


@cache
def page_files() -> PageFiles:
    """The page's files that come with sparkd, read once."""
    return PageFiles()


def _digest(contents: Mapping[str, bytes]) -> str:
    whole = hashlib.sha256()
    for name, content in sorted(contents.items()):
        whole.update(b"%s\0%d\0%s" % (name.encode(), len(content), content))
    return whole.hexdigest()[:DIGEST_CHARACTERS]


def _file(name: str, content: bytes) -> _File:
    kind = _TYPES[Path(name).suffix]
    # mtime: the same bytes at every start.
    packed = gzip.compress(content, 9, mtime=0) if kind.startswith(_COMPRESSED) else content
    tag = hashlib.sha256(content).hexdigest()[:DIGEST_CHARACTERS].encode()
    return _File(kind, content, tag, packed if len(packed) < len(content) else None)
