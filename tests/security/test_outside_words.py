"""Names, numbers and lines that come from a client, a node, a hub or an engine: none leads elsewhere, and none ends who reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sparkd.admin.bodies import Pulling
from sparkd.checkpoint.hub import Hub
from sparkd.config.config import parse_model
from sparkd.errors import ConfigError, RankError
from workers.files.manifest import ModelManifest
from workers.host.hub_cache import is_hub_id, is_revision, snapshot_of
from workers.rank.log_parser import Parser

ELSEWHERE = ["/etc", "../../etc", "a/../../..", ".", "a\0b", "a" * 2000, "-a", "é"]
REVISIONS = ["refs/pr/3", "0123456789abcdef0123456789abcdef01234567", "feature/x_y.z"]


@pytest.mark.parametrize("revision", ELSEWHERE)
def test_a_revision_never_leads_out_of_the_cache(revision: str, tmp_path: Path) -> None:
    assert not is_revision(revision)
    assert snapshot_of("o/m", revision, {"HF_HUB_CACHE": str(tmp_path)}) is None
    with pytest.raises(ConfigError):
        parse_model("m", {"model": "o/m", "revision": revision}, over_admin=False)
    with pytest.raises(ConfigError):
        Hub("o/m", revision, {})
    with pytest.raises(ValidationError):
        Pulling(revision=revision)


@pytest.mark.parametrize("revision", REVISIONS)
def test_what_the_hub_calls_a_revision_passes(revision: str) -> None:
    assert parse_model("m", {"model": "o/m", "revision": revision}, over_admin=True).revision == revision
    assert Pulling(revision=revision).revision == revision


def test_a_folder_that_is_there_is_not_reached_by_a_revision(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    (cache / "models--o--m" / "snapshots" / "abc").mkdir(parents=True)
    (cache / "models--o--m" / "refs").mkdir()
    (cache / "models--o--m" / "refs" / "main").write_text("abc")
    (cache / "models--o--m" / "refs" / "evil").write_text("../../../")
    environ = {"HF_HUB_CACHE": str(cache)}

    assert snapshot_of("o/m", None, environ) == cache / "models--o--m" / "snapshots" / "abc"
    assert snapshot_of("o/m", str(tmp_path), environ) is None
    assert snapshot_of("o/m", "evil", environ) is None


@pytest.mark.parametrize("hub_id", ["/etc", "../b", "a/..", "a/b/c", "a//b", "a\0b", "a/b\n", ""])
def test_no_hub_id_leads_out_of_the_cache(hub_id: str, tmp_path: Path) -> None:
    assert not is_hub_id(hub_id)
    assert snapshot_of(hub_id, None, {"HF_HUB_CACHE": str(tmp_path)}) is None


MANIFEST: dict[str, Any] = {"model": "o/m", "revision": None, "commit": "abc", "root": "/r", "files": []}


@pytest.mark.parametrize("key", ["model", "revision", "commit"])
def test_no_name_in_it_leads_elsewhere(key: str) -> None:
    with pytest.raises(RankError):
        ModelManifest.from_dict(MANIFEST | {key: "../.."})


# Lines of an engine's start.

LINES = [
    "Loading safetensors checkpoint shards:  50% Completed | {}/{} [00:01<00:01]",
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  4%|  | {}/{} [00:01<00:01]",
    "Model loading took {} GiB memory and {} seconds", "Available KV cache memory: {} GiB", "GPU KV cache size: {} tokens",
    "GPU KV cache size: 1 tokens, Maximum concurrency for {} tokens per request: {}x", "Explicitly set ({}/1) GiB for KV cache",
    "reserved {} GiB memory for KV Cache as specified", "init engine (profile, create kv cache, warmup model) took {} s",
    "Worker proc VllmWorker-0 died unexpectedly (exit code: -{}), shutting down",
    "Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore': -{}}}", "{}", "RuntimeError: {} {}",
]  # fmt: skip
NUMBERS = ["9" * 5000, "9" * 400 + ".5", ",", "-1", "1e999", "٣", ""]


@pytest.mark.parametrize("number", NUMBERS)
def test_no_number_in_a_line_of_the_log_ends_who_reads_it(number: str) -> None:
    parser = Parser()
    for line in LINES:
        for text in (line.format(number, number), line.format("1", number), line.format(number, "1")):
            parser.feed(text, 1.0)

        json.dumps(parser.progress, allow_nan=False)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.text(), st.builds(lambda line, a, b: line.format(a, b), st.sampled_from(LINES), st.text(), st.text()))))
def test_no_line_at_all_does(lines: list[str]) -> None:
    parser = Parser()
    for at, line in enumerate(lines):
        parser.feed(line, float(at))

    json.dumps(parser.progress, allow_nan=False)
