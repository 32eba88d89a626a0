"""/proc/meminfo and /proc/pressure/memory of real Sparks, to the byte, and how a sample becomes a Reading."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.cluster.node_tracker import reading
from sparkd.state.nouns import Reading
from workers.host.meminfo import mem_total_bytes, parse_meminfo, parse_pressure, sample

FIXTURES = Path(__file__).parents[2] / "fixtures" / "meminfo"
KIB = 1024
# MemTotal, MemAvailable, MemFree, Cached, SwapTotal, SwapFree in kB as the files give them; what a file leaves out is 0.
CAPTURES = {
    "three-models-resident": (127535224, 23135528, 4510768, 20448480, 16777212, 16723228),
    "one-model-swap-off": (127533828, 80573984, 36820016, 44875144, 0, 0),
    "page-cache-flood": (127535056, 115340268, 3325224, 109316412, 16777212, 16613372),
    "tight-pool": (127535272, 7479680, 1118800, 11188896, 16777212, 12681216),
    "after-unload": (127601452, 115669068, 45557560, 0, 0, 0),
    "one-model-and-desktop": (127600524, 28904408, 4024100, 0, 16777212, 10853772),
    "idle": (127535084, 120000000, 102000000, 17000000, 0, 0),
    "almost-dead": (127600592, 3987200, 121964, 0, 0, 0),
    "with-cma-fields": (127535084, 14386092, 1234567, 0, 33554428, 0),
    # Not /proc/meminfo at all: nothing in them may be taken for a field of it.
    "free-h-idle": (0, 0, 0, 0, 0, 0),
    "cache-flood-scenario": (0, 0, 0, 0, 0, 0),
}
FIELDS = ("mem_total_bytes", "mem_available_bytes", "mem_free_bytes", "cached_bytes", "swap_total_bytes", "swap_free_bytes")


def test_every_capture_is_in_the_table() -> None:
    assert {path.stem for path in FIXTURES.glob("*.txt")} == CAPTURES.keys() | {"pressure-idle"}


def test_every_field_to_the_byte() -> None:
    found = {name: parse_meminfo((FIXTURES / f"{name}.txt").read_text()) for name in CAPTURES}

    assert {name: tuple(values[field] // KIB for field in FIELDS) for name, values in found.items()} == CAPTURES
    others = {name: {field: value for field, value in values.items() if field not in FIELDS} for name, values in found.items()}
    assert others.pop("with-cma-fields") == {"cma_total_bytes": 131072 * KIB, "cma_free_bytes": 69320 * KIB}
    assert not any(others.values())


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("MemFree:\t  7 kB", "mem_free_bytes", 7 * KIB),
        ("SwapCached:      3 kB", "swap_free_bytes", 0),
        ("MemFree:      many kB", "mem_free_bytes", 0),
    ],
)
def test_odd_lines(line: str, field: str, value: int) -> None:
    assert parse_meminfo(f"junk\n\n{line}\n")[field] == value


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ((FIXTURES / "pressure-idle.txt").read_text(), {"psi_some_avg10": 0.0, "psi_full_avg10": 0.0}),
        (
            "some avg10=12.34 avg60=5.00 avg300=1.00 total=99\nfull avg10=1.50 avg60=0.00 avg300=0.00 total=9\n",
            {"psi_some_avg10": 12.34, "psi_full_avg10": 1.5},
        ),
        ("some avg10=1.00 avg60=0.00 avg300=0.00 total=0\n", {"psi_some_avg10": 1.0}),
        ("", {}),
    ],
)
def test_pressure(text: str, found: dict[str, float]) -> None:
    assert parse_pressure(text) == found


def test_a_sample_has_psi_where_the_kernel_has_it(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text((FIXTURES / "tight-pool.txt").read_text())
    assert not {"psi_some_avg10", "psi_full_avg10"} & sample(tmp_path).keys()

    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "memory").write_text((FIXTURES / "pressure-idle.txt").read_text())
    assert sample(tmp_path)["psi_full_avg10"] == 0.0


def test_a_sample_becomes_a_reading_with_its_age_by_the_nodes_own_clock() -> None:
    values = parse_meminfo((FIXTURES / "with-cma-fields.txt").read_text())
    seen: dict[str, float] = {**values, "psi_some_avg10": 2.5, "at_s": 100.0, "of_a_newer_agent": 1.0}

    assert reading("spark-1", seen, 100.5) == Reading(
        node_id="spark-1",
        at_s=100.0,
        age_s=0.5,
        mem_total_bytes=127535084 * KIB,
        mem_available_bytes=14386092 * KIB,
        mem_free_bytes=1234567 * KIB,
        cached_bytes=0,
        swap_total_bytes=33554428 * KIB,
        swap_free_bytes=0,
        cma_total_bytes=131072 * KIB,
        cma_free_bytes=69320 * KIB,
        psi_some_avg10=2.5,
        psi_full_avg10=None,
    )


def test_a_clock_that_was_set_back_does_not_make_a_reading_come_from_the_future() -> None:
    assert reading("n", {**parse_meminfo(""), "at_s": 100.0}, 40.0).age_s == 0.0


def test_the_total_is_read_alone(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text((FIXTURES / "tight-pool.txt").read_text())
    assert mem_total_bytes(tmp_path) == 127535272 * KIB == sample(tmp_path)["mem_total_bytes"]
    with pytest.raises(OSError):
        mem_total_bytes(tmp_path / "nowhere")
