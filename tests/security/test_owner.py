"""Root in a folder that another user can write: what that user wrote there kills, removes and makes nothing that the user could not."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.cli import join
from sparkd.cluster import membership
from sparkd.cluster.node_paths import rank_folders
from sparkd.config.config import load_config
from sparkd.doctor import fixes
from sparkd.errors import ConfigError, StateError
from sparkd.execution.as_owner import as_owner, create_below, lesser_owner, refuse_another_users
from sparkd.vllm import answer_cache
from tests.support.daemon_process import ROOT as SOURCES
from tests.support.ranks import Place, a_place
from workers.host import processes
from workers.rank import lifecycle
from workers.rank.status import remove_sockets, write_status

place = pytest.fixture(a_place)
ROOT = os.geteuid() == 0
# Only root can give a folder to another user.
LESSER = 65534 if ROOT else os.getuid()
needs_root = pytest.mark.skipif(not ROOT, reason="only root works in the folder of another user")
NODE = "192.0.2.7"
HEAD = "192.0.2.1:6379"


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


def hand_over(path: Path) -> None:
    """The lesser user's, with all that lies in it."""
    for one in (path, *path.rglob("*")):
        os.chown(one, LESSER, -1, follow_symlinks=False)


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
def test_the_work_is_done_as_the_folders_user_and_then_this_is_root_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, before = given(folder / "ours"), (os.getresuid(), os.getresgid(), os.getgroups(), os.environ["HOME"])

    def forks() -> int:
        raise AssertionError("a lock that another thread holds stays held in the child")

    monkeypatch.setattr(os, "fork", forks)

    def refused() -> None:
        raise ConfigError("no")

    assert as_owner(ours, lambda: os.getresuid()[:2]) == (LESSER, LESSER)
    assert as_owner(ours / "not" / "there", os.getuid) == LESSER
    assert as_owner(folder, os.getuid) == os.getuid()
    as_owner(ours, lambda: (ours / "file").write_text("x"))
    assert (ours / "file").stat().st_uid == LESSER and (ours / "file").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="no"):
        as_owner(ours, refused)
    with pytest.raises(StateError, match="missing"):
        as_owner(ours, (ours / "missing").read_text)
    assert (os.getresuid(), os.getresgid(), os.getgroups(), os.environ["HOME"]) == before


@needs_root
def test_the_folders_user_has_nothing_of_roots(folder: Path) -> None:
    """Neither its processes and files, nor, in a program that the work starts, a way back."""
    code = "import os\nprint(os.getresuid(), os.getresgid(), os.getgroups())\ntry: os.setuid(0)\nexcept PermissionError: print('refused')"
    (folder / "roots").touch(mode=0o600)

    def work() -> list[str]:
        with pytest.raises(PermissionError):
            os.kill(os.getppid(), 0)
        with pytest.raises(PermissionError):
            (folder / "roots").read_text()
        python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
        return subprocess.run([python, "-IS", "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()

    ids, refused = as_owner(given(folder / "ours"), work)
    assert (ids.split(") ")[0], "0" in re.findall(r"\d+", ids), refused) == (f"({LESSER}, {LESSER}, {LESSER}", False, "refused")


@needs_root
@pytest.mark.parametrize(("mode", "sticky", "refused"), [(0o777, False, True), (0o775, False, False), (0o777, True, False)])
def test_a_folder_on_the_way_that_others_can_write_to(mode: int, sticky: bool, refused: bool, folder: Path) -> None:
    open_ = folder / "open"
    (open_ / "below").mkdir(parents=True)
    os.chown(open_, -1, 0)
    open_.chmod(mode | (0o1000 if sticky else 0))
    if refused:
        with pytest.raises(StateError):
            lesser_owner(open_ / "below")
    else:
        assert lesser_owner(open_ / "below") == 0


@needs_root
def test_a_link_on_the_way_counts_with_where_it_leads(folder: Path) -> None:
    theirs = given(folder / "theirs")
    (folder / "link").symlink_to(theirs)
    assert lesser_owner(folder / "link" / "x") == LESSER
    (theirs / "back").symlink_to(folder)
    assert lesser_owner(theirs / "back") == LESSER


@needs_root
def test_root_starts_nothing_in_a_folder_of_another_user(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = given(folder / "theirs")
    refuse_another_users(folder)
    with pytest.raises(StateError, match="nobody"):
        refuse_another_users(theirs)
    # Not `main`, which ends the process where Ray was imported.
    assert exit_code(["serve", "--state-dir", str(theirs), "--log-level", "info"]) == StateError.exit_code
    assert os.listdir(theirs) == []


class Leaving:
    """A node that has joined; what its lesser user wrote; and `sparkd leave`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state, self.run = given(folder / "state"), given(folder / "run")
        monkeypatch.setenv("SPARKD_RUNTIME_DIR", str(self.run))
        config = load_config(None, flags={"state_dir": str(self.state), "runtime_dir": str(self.run)}, environ={})
        self.ranks = rank_folders(config, NODE)[0]
        self.ranks.mkdir(parents=True)

    def record(self, **changes: Any) -> None:
        values = asdict(membership.Joined(HEAD, NODE)) | changes
        (self.state / membership.RECORD).write_text(json.dumps(values))

    def leave(self) -> int:
        hand_over(self.state)
        hand_over(self.run)
        return exit_code(["leave", "--state-dir", str(self.state)])


@pytest.fixture
def leaving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Leaving:
    return Leaving(folder, monkeypatch)


def status_of(victim: subprocess.Popen[bytes], **changes: Any) -> dict[str, Any]:
    who = processes.identity(victim.pid)
    assert who
    handle = {"rank_id": "r1", "pid": who.pid, "start_ticks": who.start_ticks, "boot_id": who.boot_id, "model": "m"} | changes
    return {"handle": handle, "state": "running", "engine_pid": who.pid, "engine_start_ticks": who.start_ticks}


@needs_root
def test_leaving_kills_no_process_and_removes_no_socket_that_a_status_file_names(
    leaving: Leaving, folder: Path, victim: subprocess.Popen[bytes]
) -> None:
    outside = folder / "outside.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(outside))
        write_status(leaving.ranks / "r1.json", status_of(victim, socket_path=str(outside)))
        leaving.record()

        assert leaving.leave() == 0
    assert victim.poll() is None and outside.exists()
    assert not leaving.ranks.exists() and not (leaving.state / membership.RECORD).exists()


@pytest.mark.parametrize("node_ip", ["../../keep", "/"])
def test_the_address_in_the_record_leads_nowhere_else(node_ip: Any, leaving: Leaving, folder: Path) -> None:
    keep = folder / "keep"
    (keep / "plugin").mkdir(parents=True)
    leaving.record(node_ip=node_ip)

    assert leaving.leave() == StateError.exit_code
    assert (keep / "plugin").is_dir()


@needs_root
def test_a_folder_that_is_a_link_takes_nothing_of_what_it_leads_to(leaving: Leaving, folder: Path) -> None:
    keep = folder / "keep"
    (keep / "plugin").mkdir(parents=True)
    (keep / "plugin" / "file").touch()
    (keep / "guard.lock").touch()
    keep.chmod(0o755)
    leaving.ranks.rmdir()
    leaving.ranks.symlink_to(keep)
    leaving.record()
    leaving.leave()

    assert sorted(one.name for one in keep.rglob("*")) == ["file", "guard.lock", "plugin"]


@needs_root
@pytest.mark.parametrize(("ticks", "code"), [(0, 4), (1, 0)], ids=["it is root's", "the number is another process's by now"])
def test_a_process_that_the_record_names_is_not_ended_unless_it_is_that_join_and_the_users_own(
    ticks: int, code: int, leaving: Leaving, victim: subprocess.Popen[bytes]
) -> None:
    who = processes.identity(victim.pid)
    assert who
    leaving.record(pid=who.pid, start_ticks=who.start_ticks + ticks, boot_id=who.boot_id)

    assert (leaving.leave(), victim.poll()) == (code, None)


@needs_root
def test_the_units_are_left_alone_where_the_folder_is_not_the_systems(leaving: Leaving, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(join, "_systemctl", lambda *words: said.append(words))
    leaving.record(unit=True, active=True)

    assert (leaving.leave(), said) == (0, [])


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


def test_a_file_is_made_through_no_link_below_its_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    create_below(root, "etc/sysctl.d/60-x.conf", "a = 1\n")
    assert (root / "etc/sysctl.d/60-x.conf").read_text() == "a = 1\n"
    with pytest.raises(FileExistsError):
        create_below(root, "etc/sysctl.d/60-x.conf", "b")
    (root / "link").symlink_to(outside)
    (root / "dangling").symlink_to(outside / "made")
    for name in ("link/60-x.conf", "link/deeper/60-x.conf", "dangling"):
        with pytest.raises(OSError):
            create_below(root, name, "b")
    assert os.listdir(outside) == []

    fix = fixes.Fix("c", "w", "link/60-x.conf", "b", (), "")
    with pytest.raises(StateError):
        fixes.apply(fix, root)
    assert os.listdir(outside) == []


@needs_root
def test_root_keeps_no_answer_in_another_users_folder_and_forks_for_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise AssertionError

    theirs, ours = given(folder / "theirs"), folder / "ours"
    (theirs / "vllm-answers").symlink_to(ours)
    monkeypatch.setattr(os, "fork", fork)
    answer_cache.keep("x", [], [theirs / "vllm-answers", theirs / "own", ours])

    assert os.listdir(theirs) == ["vllm-answers"] and os.listdir(ours) == ["x.json"]


def test_only_the_command_line_which_has_one_thread_becomes_another_user() -> None:
    imports = re.compile(r"^ *from sparkd\.execution\.as_owner import .*\bas_owner\b", re.MULTILINE)
    users = {path.relative_to(SOURCES).parts[1] for path in (SOURCES / "sparkd").rglob("*.py") if imports.search(path.read_text())}

    assert users == {"cli"}
