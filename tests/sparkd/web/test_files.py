"""The page's files as they are served: names by their digest, tags, compressed forms, and one policy on all of them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from sparkd.web.files import PageFiles

SCRIPT = b"export const answer = 42;\n" * 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app").mkdir()
    (tmp_path / "index.html").write_bytes(b'<script type="module" src="{folder}/app/main.js"></script>')
    (tmp_path / "app/main.js").write_bytes(SCRIPT)
    (tmp_path / "style.css").write_bytes(b"a{}")
    (tmp_path / "notes.txt").write_bytes(b"not served")
    return tmp_path


def test_all_names_change_with_any_content(folder: Path) -> None:
    before = PageFiles(folder)
    assert before.digest == PageFiles(folder).digest
    (folder / "style.css").write_bytes(b"b{}")
    after = PageFiles(folder)
    assert before.digest != after.digest
    assert after.answer(f"/ui/{before.digest}/app/main.js", {}) is None
    (folder / "style.css").rename(folder / "other.css")
    assert PageFiles(folder).digest not in (before.digest, after.digest)


def test_the_index_names_the_folder_and_is_asked_for_again(folder: Path) -> None:
    files = PageFiles(folder)
    answer = files.answer("/ui/", {})
    assert answer is not None
    headers = dict(answer.headers)
    assert f'src="{files.digest}/app/main.js"'.encode() in answer.body
    assert (headers[b"cache-control"], headers[b"content-type"]) == (b"no-cache", b"text/html; charset=utf-8")
    same = files.answer("/ui/", {b"if-none-match": headers[b"etag"]})
    assert same is not None
    assert (same.status, same.body, dict(same.headers)[b"etag"]) == (304, b"", headers[b"etag"])


def test_a_file_is_kept_for_ever_under_its_name(folder: Path) -> None:
    files = PageFiles(folder)
    answer = files.answer(f"/ui/{files.digest}/app/main.js", {})
    assert answer is not None
    headers = dict(answer.headers)
    assert (answer.status, answer.body, headers[b"content-type"]) == (200, SCRIPT, b"text/javascript; charset=utf-8")
    assert headers[b"cache-control"] == b"public, max-age=31536000, immutable"
    assert int(headers[b"content-length"]) == len(SCRIPT)


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [
        (b"gzip, deflate, br, zstd", True),
        (b"", False),
        (b"br", False),
    ],
)
def test_compressed_only_where_the_client_takes_it(folder: Path, accepted: bytes, packed: bool) -> None:
    files = PageFiles(folder)
    answer = files.answer(f"/ui/{files.digest}/app/main.js", {b"accept-encoding": accepted})
    assert answer is not None
    headers = dict(answer.headers)
    assert (headers.get(b"content-encoding") == b"gzip") is packed
    assert (gzip.decompress(answer.body) if packed else answer.body) == SCRIPT
    assert headers[b"etag"].endswith(b'-gzip"') is packed
    assert headers[b"vary"] == b"accept-encoding"


def test_a_file_that_compression_makes_longer_is_sent_as_it_is(folder: Path) -> None:
    files = PageFiles(folder)
    answer = files.answer(f"/ui/{files.digest}/style.css", {b"accept-encoding": b"gzip"})
    assert answer is not None
    assert answer.body == b"a{}"
    assert b"content-encoding" not in dict(answer.headers)


@pytest.mark.parametrize("path", ["/ui", "DIGEST/app/main.js"])
def test_one_policy_on_every_answer(folder: Path, path: str) -> None:
    files = PageFiles(folder)
    answer = files.answer(path.replace("DIGEST", f"/ui/{files.digest}"), {})
    assert answer is not None
    headers = dict(answer.headers)
    policy = headers[b"content-security-policy"]
    assert policy.startswith(b"default-src 'self';")
    assert b"unsafe" not in policy
    assert (headers[b"x-content-type-options"], headers[b"referrer-policy"]) == (b"nosniff", b"no-referrer")


@pytest.mark.parametrize("path", ["DIGEST/index.html", "DIGEST/notes.txt", "DIGEST/../index.html"])
def test_other_paths_are_nothing(folder: Path, path: str) -> None:
    files = PageFiles(folder)
    assert files.answer(path.replace("DIGEST", f"/ui/{files.digest}"), {}) is None


def test_the_page_that_comes_with_sparkd_has_what_its_index_names() -> None:
    files = PageFiles()
    index = files.answer("/ui/", {})
    assert index is not None
    named = [part.partition(b'"')[0].decode() for part in index.body.split(b'="')[1:] if part.startswith(files.digest.encode())]
    assert named
    for name in named:
        assert files.answer(f"/ui/{name}", {}) is not None, name
    assert b"style=" not in index.body
