"""Root in a folder that another user can write: what that user wrote there kills, removes and makes nothing that the user could not."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.cli.folder_owner import refuse_another_users
from sparkd.errors import StateError
from sparkd.vllm.ask import cache as answer_cache
from tests.support.ranks import Place, a_place
from workers.host import processes
from workers.rank import lifecycle
from workers.rank.status import remove_sockets, write_status

place = pytest.fixture(a_place)
ROOT = os.geteuid() == 0
# Only root can give a folder to another user.
LESSER = 65534 if ROOT else os.getuid()
needs_root = pytest.mark.skipif(not ROOT, reason="only root works in the folder of another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the lesser user reaches: pytest's own is closed to others."""
    made = Path(tempfile.mkdtemp(prefix="owner-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def given(path: Path) -> Path:
    """A folder of the lesser user."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chown(path, LESSER, -1)
    return path


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user, which for root is out of the lesser user's reach."""
    code = "import signal\nprint(1, flush=True)\nsignal.pause()"
    process = subprocess.Popen([sys.executable, "-IS", "-c", code], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


@needs_root
def test_a_link_on_the_way_counts_with_where_it_leads(folder: Path) -> None:
    theirs = given(folder / "theirs")
    (folder / "link").symlink_to(theirs)
    (theirs / "below").mkdir()
    for path in (theirs, theirs / "below", theirs / "not" / "there", folder / "link" / "x"):
        with pytest.raises(StateError, match="sudo -u"):
            refuse_another_users(path)
    for path in (folder, folder / "not" / "there"):
        refuse_another_users(path)


@needs_root
def test_a_link_of_another_user_leads_root_nowhere(folder: Path) -> None:
    """Also where it leads to a folder of root's, and where a link of root's leads to it."""
    theirs, ours = given(folder / "theirs"), folder / "ours"
    (theirs / "quantized").symlink_to("/etc")
    (folder / "link").symlink_to(theirs / "quantized")
    ours.mkdir(mode=0o755)
    (folder / "loop").symlink_to("loop")
    (folder / "fine").symlink_to("ours")
    os.symlink(ours, folder / "given")
    os.chown(folder / "given", LESSER, -1, follow_symlinks=False)
    for path in (theirs / "quantized", folder / "link", folder / "given" / "x"):
        with pytest.raises(StateError, match="sudo -u"):
            refuse_another_users(path)
    for path in (folder / "fine", folder / "loop"):
        refuse_another_users(path)


@needs_root
def test_root_works_in_no_folder_that_others_may_write_to(folder: Path) -> None:
    """In one like /tmp they add what is missing, and replace nothing that is there."""
    (folder / "there").mkdir()
    (folder / "link").symlink_to(folder)
    for mode, group in ((0o777, 0), (0o775, LESSER), (0o1777, 0)):
        os.chown(folder, -1, group)
        folder.chmod(mode)
        for path in (folder, folder / "missing", folder / "link", *([] if mode == 0o1777 else [folder / "there"])):
            with pytest.raises(StateError, match="chmod go-w"):
                refuse_another_users(path)
    refuse_another_users(folder / "link" / "there")
    os.chown(folder, -1, 0)
    folder.chmod(0o775)
    refuse_another_users(folder)


@needs_root
@pytest.mark.parametrize("verb", [["serve"], ["join", "192.0.2.1", "--token", "-"], ["leave"], ["token"]])
def test_root_does_nothing_in_a_folder_of_another_user(
    verb: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = given(folder / "theirs")
    monkeypatch.setenv("SPARKD_STATE_DIR", str(theirs))
    # Not `main`, which ends the process where Ray was imported.
    assert exit_code(verb) == StateError.exit_code
    assert "sudo -u" in capsys.readouterr().err
    assert os.listdir(theirs) == []


def status_of(victim: subprocess.Popen[bytes], **changes: Any) -> dict[str, Any]:
    who = processes.identity(victim.pid)
    assert who
    handle = {"rank_id": "r1", "pid": who.pid, "start_ticks": who.start_ticks, "boot_id": who.boot_id, "model": "m"} | changes
    return {"handle": handle, "state": "running", "engine_pid": who.pid, "engine_start_ticks": who.start_ticks}


def test_stopping_a_rank_ends_no_stranger_that_its_status_names(place: Place, victim: subprocess.Popen[bytes]) -> None:
    """As whoever owns the folder: a number, a start time and a boot are for everybody to read; the mark is not for everybody to have."""
    os.makedirs(place.run_dir)
    write_status(Path(place.run_dir, "r1.json"), status_of(victim))

    assert lifecycle.verify_gone("r1", place.run_dir) == []
    assert lifecycle.stop({"rank_id": "r1"}, run_dir=place.run_dir, grace_s=0.1)["gone"]
    assert lifecycle.stop(status_of(victim)["handle"], run_dir=place.run_dir, grace_s=0.1)["gone"]
    assert victim.poll() is None


def test_only_a_socket_in_the_run_directory_itself_is_removed(place: Place) -> None:
    os.makedirs(place.run_dir)
    (place.root / "link").symlink_to(place.run_dir)
    with socket.socket(socket.AF_UNIX) as inside, socket.socket(socket.AF_UNIX) as outside:
        inside.bind(f"{place.run_dir}/in.sock")
        outside.bind(f"{place.root}/out.sock")
        Path(place.run_dir, "file").touch()
        for name in (f"{place.root}/out.sock", f"{place.run_dir}/../out.sock", f"{place.root}/link/in.sock", f"{place.run_dir}/file"):
            remove_sockets(place.run_dir, "r1", name)
        assert Path(f"{place.root}/out.sock").exists() and sorted(os.listdir(place.run_dir)) == ["file", "in.sock"]
        remove_sockets(place.run_dir, "r1", f"{place.run_dir}/in.sock")
        assert os.listdir(place.run_dir) == ["file"]


@needs_root
def test_root_keeps_no_answer_in_another_users_folder(folder: Path) -> None:
    theirs, ours = given(folder / "theirs"), folder / "ours"
    (theirs / "vllm-answers").symlink_to(ours)
    answer_cache.keep("x", [], [theirs / "vllm-answers", theirs / "own", ours])

    assert os.listdir(theirs) == ["vllm-answers"] and os.listdir(ours) == ["x.json"]
