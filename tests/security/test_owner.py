"""Root in a folder that another user can write: it is refused there, and makes nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkd.__main__ import exit_code
from sparkd.cli.folder_owner import refuse_another_users
from sparkd.errors import StateError
from sparkd.vllm.ask import cache as answer_cache

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


@needs_root
def test_root_keeps_no_answer_in_another_users_folder(folder: Path) -> None:
    theirs, ours = given(folder / "theirs"), folder / "ours"
    (theirs / "vllm-answers").symlink_to(ours)
    answer_cache.keep("x", [], [theirs / "vllm-answers", theirs / "own", ours])

    assert os.listdir(theirs) == ["vllm-answers"] and os.listdir(ours) == ["x.json"]
