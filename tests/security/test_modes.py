"""Only sparkd's user can read its files, whatever the umask and whatever mode the folder around them had before."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparkd.cluster import membership
from sparkd.cluster.ray_head import RayHead, RayOptions, make_token
from sparkd.config.config import load_config
from sparkd.daemon.daemon import _lock
from sparkd.errors import StateError
from sparkd.state.store import Store
from workers.agent.actor import Agent
from workers.guard import incidents
from workers.host.private_files import private_file, private_folder, write_private
from workers.rank.status import write_status


@pytest.fixture(autouse=True)
def careless() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def open_to_others(folder: Path) -> dict[str, str]:
    return {str(one.relative_to(folder)): oct(mode(one)) for one in folder.rglob("*") if not one.is_symlink() and mode(one) & 0o077}


def make_all(folder: Path) -> None:
    """Everything in the state folder and the runtime folder that a daemon, its agent and its Ray make."""
    config = load_config(None, flags={"state_dir": str(folder / "state"), "runtime_dir": str(folder / "run")}, environ={})
    with _lock(config.state_dir):
        store = Store(config.state_dir / "state.db")
        store.close()
    make_token(config.state_dir / "ray.token")
    membership.keep(config, membership.Membership("192.0.2.1:6379", "192.0.2.2"), "t" * 64)
    incidents.write(config.state_dir / "logs" / "incidents", {"id": "20260101-000000-r"})
    agent = Agent("127.0.0.1", str(folder / "run" / "ranks"), str(config.state_dir / "logs"))
    agent.guard.stop()
    write_status(folder / "run" / "ranks" / "r1.json", {})


def test_all_of_it_is_its_users_alone_in_a_folder_that_others_can_read(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    (tmp_path / "run").mkdir(mode=0o755)
    make_all(tmp_path)

    plugin = {name for name in open_to_others(tmp_path) if "/plugin/" in name}
    assert open_to_others(tmp_path).keys() - plugin == {"state", "run"}, "given by somebody, and theirs to close"


def test_what_an_earlier_release_left_open_is_closed(tmp_path: Path) -> None:
    make_all(tmp_path)
    paths = [tmp_path / "state" / name for name in ("state.db", "lock", "logs")] + [tmp_path / "run" / "ranks"]
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)
    (tmp_path / "state" / "state.db-wal").touch(mode=0o644)
    make_all(tmp_path)

    assert [path.name for path in paths if mode(path) & 0o077] == []


def test_rays_folder_is_closed_again(tmp_path: Path) -> None:
    head = RayHead(RayOptions(tmp_path, tmp_path / "token", memory_gib=1, object_store_mib=80))
    head.folder.mkdir(mode=0o777)
    head.keep_closed()
    assert mode(head.folder) == 0o700


@pytest.mark.parametrize(
    ("before", "keep_group", "after"),
    [
        (0o777, False, 0o700), (0o750, False, 0o700), (0o2750, True, 0o2750), (0o770, True, 0o750), (0o755, True, 0o700),
    ],
)  # fmt: skip
def test_a_folder_that_was_there_is_closed_but_for_a_group_that_an_operator_let_in(
    before: int, keep_group: bool, after: int, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").chmod(before)
    private_folder(tmp_path / "folder", keep_group=keep_group)
    assert mode(tmp_path / "folder") == after


def test_a_group_may_read_the_logs_and_nothing_else(tmp_path: Path) -> None:
    for name in ("state/logs", "run/ranks"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name).chmod(0o750)
    make_all(tmp_path)

    assert (mode(tmp_path / "state" / "logs"), mode(tmp_path / "run" / "ranks")) == (0o750, 0o700)
    assert mode(tmp_path / "state" / "logs" / "incidents") == 0o700


@pytest.mark.parametrize("take", [private_file, private_folder])
def test_a_link_in_the_place_of_a_file_is_refused_and_what_it_leads_to_is_left(take: Callable[[Path], None], tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("theirs")
    target.chmod(0o644)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(OSError):
        take(tmp_path / "link")
    assert (mode(target), target.read_text()) == (0o644, "theirs")


def test_a_link_in_the_place_of_the_lock_or_the_store_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    for name, make in (("lock", lambda folder: _lock(folder).__enter__()), ("state.db", lambda folder: Store(folder / "state.db"))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).symlink_to(target)
        with pytest.raises(StateError):
            make(folder)
    assert not target.exists()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(PermissionError):
        private_folder(tmp_path)


def test_a_private_file_is_replaced_whole_and_through_no_link(tmp_path: Path) -> None:
    path, beside, foreign = tmp_path / "record.json", tmp_path / f".record.json.{os.getpid()}", tmp_path / "foreign"
    foreign.write_text("theirs")
    beside.symlink_to(foreign)
    with pytest.raises(OSError, match=r"record\.json"):
        write_private(path, "first")
    assert (foreign.read_text(), beside.is_symlink()) == ("theirs", False)

    write_private(path, "first")
    path.chmod(0o644)
    write_private(path, "second")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("second", 0o600)

    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_private(tmp_path / "folder", "x")
    assert sorted(tmp_path.iterdir()) == sorted([path, foreign, tmp_path / "folder"])
