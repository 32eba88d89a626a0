"""Kinds of machine: the known ones, a file, and what a file may get wrong."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sparkd.errors import ConfigError
from sparkd.hardware import H200, KNOWN, SPARK, hardware_of
from tests.support.facts import lacking


def test_the_known_ones_go_by_their_names() -> None:
    assert {name: hardware_of(name) for name in KNOWN} == {"spark": SPARK, "h200": H200}
    assert SPARK.unified and not H200.unified


def test_a_file_is_a_spark_but_for_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "desk.yaml"
    file.write_text(
        "memory_bytes: 68719476736\nplatform: cpu\nbandwidth_bytes_s: 90e9\nsystem_bytes: 0\nunified: false\nlink_latency_s: 1.0e-5"
    )

    # YAML 1.1 reads 90e9 as text.
    changed = replace(SPARK, name="desk", memory_bytes=64 << 30, platform="cpu", bandwidth_bytes_s=9e10, system_bytes=0, unified=False)
    # Of a CPU no rate is a Spark's.
    assert hardware_of(str(file)) == replace(changed, link_latency_s=1e-5, disk_bytes_s=None, link_bytes_s=None)
    file.write_text("platform: cuda\nbandwidth_bytes_s: 9.0e+10")
    assert hardware_of(str(file)) == replace(SPARK, name="desk", bandwidth_bytes_s=9e10)
    file.write_text("name: mine")
    assert hardware_of(str(file)) == replace(SPARK, name="mine")
    assert all(type(value) is type(getattr(SPARK, name)) for name, value in asdict(hardware_of(str(file))).items())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("memory: 5", ["memory is 5", "name, memory_bytes"]),
        ("memory_bytes: 1.5", ["memory_bytes", "integer", "1.5"]),
        ("memory_bytes: 0", ["system_bytes", "nothing", "memory_bytes 0"]),
        ("disk_bytes_s: 0", ["disk_bytes_s", "greater than 0"]),
        ("unified: maybe", ["unified", "boolean"]),
        ("platform: tpu", ["platform", "cuda|cpu", "'tpu'"]),
        ("- a list", ["a map", "memory_bytes"]),
    ],
)
def test_a_wrong_file_is_one_sentence_with_the_key(text: str, told: list[str], tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError) as caught:
        hardware_of(str(file))
    assert lacking(caught.value.message, str(file), *told) == [] and "\n" not in caught.value.message


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for text in ("Spark", str(tmp_path), str(tmp_path / "none")):
        with pytest.raises(ConfigError, match=f"{re.escape(text)}.*spark.*h200"):
            hardware_of(text)
    with pytest.raises(ConfigError, match=r"binary.* UTF-8"):
        hardware_of(str(tmp_path / "binary"))
