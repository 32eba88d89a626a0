"""The bundles that the guard leaves: on the disk before anybody is told, and found by whoever asks later."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.memory_hog import show
from workers.guard import incidents
from workers.guard.guard import Guard

RANK = "m-1-0123abcd"


def bundle(number: int = 0, rank_id: str = RANK) -> dict[str, Any]:
    return {"id": incidents.new_id(1e9 + number, rank_id), "at_s": 1e9 + number, "rank_id": rank_id, "why": "0.9 GiB were left"}


def test_a_bundle_is_on_the_disk_before_its_name_is_and_its_name_before_anybody_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, steps = tmp_path / "incidents", []

    def fsync(fd: int) -> None:
        steps.append(("synced", Path(os.readlink(f"/proc/self/fd/{fd}"))))

    replace = os.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda old, new: (steps.append(("named", Path(old))), replace(old, new)))
    incidents.write(folder, bundle())

    (synced, fresh), (named, named_from), last = steps
    assert (synced, named, last) == ("synced", "named", ("synced", folder))
    assert fresh == named_from


def test_a_disk_that_is_full_keeps_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        incidents.write(tmp_path, bundle())
    assert list(tmp_path.iterdir()) == []


def test_the_newest_bundle_of_a_rank_is_found_among_others(tmp_path: Path) -> None:
    for number, rank_id in enumerate((RANK, f"x-{RANK}", RANK, "other")):
        incidents.write(tmp_path, bundle(number, rank_id))

    assert incidents.of_rank(tmp_path, RANK) == bundle(2)
    assert incidents.of_rank(tmp_path, "nobody") is None


def test_a_kill_of_another_guard_is_known_once_its_bundle_is_there(tmp_path: Path) -> None:
    """That one writes it some seconds after the kill, and meanwhile this one is asked with every look."""
    show(tmp_path / "proc", 9.9)
    guard_module = Guard("n", str(tmp_path / "run"), str(tmp_path / "log"), tmp_path / "proc", 0.5, {})
    assert guard_module.killed(RANK) is None

    incidents.write(guard_module.folder, bundle())

    sentence = guard_module.killed(RANK)
    assert sentence is not None and bundle()["id"] in sentence


def test_after_a_clock_was_set_back_the_newest_bundles_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incidents, "KEPT", 3)
    now_s = time.time()
    written = [bundle(int(now_s - 1e9) + later_s) for later_s in (86_400, 86_401, 86_402, -20, -10)]
    for each in written:
        incidents.write(tmp_path, each)

    assert [row["id"] for row in incidents.summaries(tmp_path)] == [each["id"] for each in written[2:]]
    assert incidents.of_rank(tmp_path, RANK) == written[-1]
