from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.support.facts import facts
from workers.kv.settings import CacheSettings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, CacheSettings()),
        ({"sequences": 2, "at": 4096}, CacheSettings(sequences=2, at=4096)),
        (
            {"margin_bytes": 0, "profiles": "/p", "report": "/r", "at_most_bytes": 7},
            CacheSettings(None, None, None, None, 7, 0, "/p", "/r"),
        ),
    ],
)
def test_what_is_said_is_what_holds(given, expected):
    found = CacheSettings.parse({"SPARKD_KV": json.dumps(given)})
    assert found == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", ""),
        ('{"byte": 1}', " byte at_most_bytes margin_bytes reserved_bytes"),
        ('{"bytes": 0}', " bytes 1"),
        ('{"margin_bytes": -1}', " margin_bytes 0"),
        ('{"bytes": 1, "tokens": 2}', " bytes tokens"),
        ('{"at": 4096}', " at sequences"),
    ],
)
def test_what_is_wrong_is_named(text, says):
    with pytest.raises(ValueError, match="SPARKD_KV") as raised:
        CacheSettings.parse({"SPARKD_KV": text})
    assert facts(raised.value) == f"SPARKD_KV{says}"


@pytest.mark.parametrize(
    ("own", "vllms", "expected"),
    [({}, 5 << 30, 5 << 30), ({}, 0, None), ({"bytes": 7}, 5 << 30, 7), ({"tokens": 7}, 5 << 30, None)],
)
def test_a_size_that_vllm_was_given_holds_where_nobody_says_another(own, vllms, expected):
    assert CacheSettings(**own).or_vllms(SimpleNamespace(kv_cache_memory_bytes=vllms)).bytes == expected
    assert CacheSettings(**own).or_vllms(SimpleNamespace()) == CacheSettings(**own)


@pytest.mark.parametrize("own", [{}, {"sequences": 7, "at": 9}])
def test_vllms_blocks_go_before_every_other_size(own):
    found = CacheSettings(**own).or_vllms(SimpleNamespace(kv_cache_memory_bytes=5 << 30, num_gpu_blocks_override=12))
    assert found == CacheSettings(**own, blocks=12)
    with pytest.raises(ValueError, match=r"SPARKD_KV .*'blocks'"):
        CacheSettings.parse({"SPARKD_KV": '{"blocks": 12}'})
