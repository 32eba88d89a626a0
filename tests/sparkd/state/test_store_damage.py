"""A state database that is damaged, newer or cannot be written: a start says so by file and table, and never with a traceback."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sparkd.errors import StateError
from sparkd.state.nouns import Desired, Operation, OperationState, Progress, Want
from sparkd.state.store import SCHEMA_MAJOR, SCHEMA_VERSION, Store
from tests.sparkd.control.test_decision import HANDLE
from tests.support.fakes import scene, stage

TABLES = ("desired", "handles", "answered", "specs", "operations", "events")


def filled(path: Path) -> None:
    """Two good rows in every table."""
    store = Store(path)
    for name in ("m", "other"):
        store.wishes.save_desired(Desired(name, Want.RUNNING, 3, "admin", 12.5))
        store.wishes.save_spec(name, {"model": "/x"})
        store.history.save_operation(Operation(name, "load", name, OperationState.SUCCEEDED, "done", 1.0, 2.0, Progress(phase="serving")))
        store.history.add_event(1.0, "failed", name, "It failed.", {"reason": "EngineFrozen"})
        store.ranks.save_answered(name, 1.0, 2.0)
    store.ranks.save_handle(HANDLE)
    store.close()


def change(path: Path, sql: str, *values: Any) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA ignore_check_constraints=ON")
        db.execute(sql, values)
    db.close()


# Rows


@pytest.mark.parametrize(
    ("table", "column", "value"), [("desired", "want", "PAUSED"), ("operations", "operation", "[]"), ("events", "data", "{")]
)
def test_a_row_that_cannot_be_read_is_logged_and_dropped_and_the_others_stay(
    tmp_path: Path, table: str, column: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state" / "state.db"
    filled(path)
    change(path, f"UPDATE {table} SET {column}=? WHERE rowid=1", value)

    store = Store(path)
    left = {"desired": len(store.wishes.desired()), "operations": len(store.history.operations()), "events": len(store.history.events())}
    assert left == {name: 2 - (name == table) for name in left}
    (record,) = caplog.records
    assert str(path) in record.getMessage() and f"table {table}" in record.getMessage()
    store.close()
    caplog.clear()
    Store(path).close()
    assert not caplog.records, "it is said once"


async def test_an_added_model_that_this_release_refuses_is_a_condition_until_it_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "state" / "state.db"
    filled(path)
    change(path, "UPDATE specs SET spec=? WHERE model='other'", json.dumps({"model": "/x", "of_the_next_release": True}))
    async with stage(tmp_path) as made:
        (condition,) = made.supervisor.snapshot().conditions
        assert condition.reason == "ModelLeftOut" and "other" in condition.message
        assert "other" not in made.supervisor.snapshot().models
        made.operator.remove("other")
        assert made.supervisor.snapshot().conditions == ()
        assert set(made.store.wishes.specs()) == {"m"}


# Releases


def test_a_database_of_the_next_release_starts_and_is_left_as_new_as_it_is(tmp_path: Path) -> None:
    """The rule: a minor number more, with tables, columns and members that this release does not know."""
    path = tmp_path / "state" / "state.db"
    filled(path)
    for sql in (
        f"PRAGMA user_version={SCHEMA_VERSION + 1}",
        "CREATE TABLE tenants(name TEXT PRIMARY KEY, quota INTEGER NOT NULL)",
        "INSERT INTO tenants VALUES ('t', 5)",
        *(f"ALTER TABLE {table} ADD COLUMN of_the_next_release TEXT NOT NULL DEFAULT 'x'" for table in TABLES),
    ):
        change(path, sql)
    for table, column in (("handles", "handle"), ("operations", "operation"), ("events", "data")):
        change(path, f"UPDATE {table} SET {column}=json_set({column}, '$.of_the_next_release', json('{{\"a\": [1]}}'))")

    made = scene(tmp_path)
    assert made.supervisor.snapshot().conditions == ()
    assert [len(made.store.wishes.desired()), len(made.store.ranks.handles()), len(made.store.history.operations())] == [2, 1, 2]
    made.supervisor.want("m", Want.STOPPED, "admin")
    made.store.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION + 1,)
        assert db.execute("SELECT quota FROM tenants").fetchone() == (5,)
    db.close()


@pytest.mark.parametrize("version", [SCHEMA_MAJOR, -1])
def test_a_database_of_another_major_number_is_refused_and_left_alone(tmp_path: Path, version: int) -> None:
    path = tmp_path / "state.db"
    filled(path)
    change(path, f"PRAGMA user_version={version}")
    before = path.read_bytes()

    with pytest.raises(StateError) as refused:
        Store(path)
    assert str(path) in refused.value.message and str(version) in refused.value.message
    assert path.read_bytes() == before


# Files


def test_a_damaged_page_ends_the_start_with_the_file_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "state" / "state.db"
    filled(path)
    with sqlite3.connect(path) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name='operations'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    db.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)

    with pytest.raises(StateError) as refused:
        Store(path)
    assert f"mv {path}" in refused.value.message


READ_ONLY = """
import os, sys
from pathlib import Path
from sparkd.errors import StateError
from sparkd.state.store import Store
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
try:
    Store(Path(sys.argv[1]))
except StateError as error:
    sys.exit(0 if sys.argv[1] in error.message else error.message)
sys.exit("it was opened")
"""


def test_a_file_that_may_only_be_read_is_refused_by_name() -> None:
    # Another user, since root may write anywhere, has to come to the folder.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.db"
        filled(path)
        path.chmod(0o444)
        path.parent.chmod(0o555)
        done = subprocess.run([sys.executable, "-c", READ_ONLY, str(path)], capture_output=True, text=True, cwd="/", check=False)
        path.parent.chmod(0o755)
    assert done.returncode == 0, done.stderr


# A full disk

# argv: method, folder. Each room leaves the next file of a start without space. One line for each: the room, and what came of it.
FULL_DISK = """
import logging, os, resource, subprocess, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from sparkd.daemon import logs
from sparkd.__main__ import exit_code
from sparkd.daemon.daemon import _lock, _private_folder
from sparkd.errors import StateError
from sparkd.control.journal import Journal
from sparkd.state.store import Store

method, folder = sys.argv[1], Path(sys.argv[2])
SIZE = 16 << 20

def start(base):
    logs.set_up("info", base / "state")
    logging.getLogger("sparkd").error("x" * 500)
    with _lock(base / "state"):
        _private_folder(base / "run")
        store = Store(base / "state" / "state.db")
        journal = Journal(store, lambda: 1.0)
        for number in range(300):
            journal.say("note", None, "x" * 1000)
        store.close()
        return "StateNotSaved" if journal.trouble else "started"

if method == "limit":
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
terminal = os.dup(2)
for room in (0, 4096, 40960, 98304, 147456, 16 << 20):
    base = folder / str(room)
    base.mkdir()
    if method == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    else:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(base)], check=True)
        (base / "filler").write_bytes(b"x" * (SIZE - room))
    told = StringIO()
    with redirect_stderr(told), redirect_stdout(StringIO()):
        try:
            outcome = start(base)
        except StateError as error:
            assert str(base) in error.message, error.message
            outcome = "StateError"
        if room == 0 and method == "tmpfs":
            outcome += str(exit_code(["serve", "--state-dir", str(base / "state"), "--listen", "127.0.0.1:0"]))
    os.dup2(terminal, 2)
    assert "Traceback" not in told.getvalue() and "a bug" not in told.getvalue(), told.getvalue()
    if method == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print(room, outcome)
"""


def may_mount() -> bool:
    return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False).returncode == 0


def test_a_start_on_a_full_disk_names_the_file_that_it_cannot_write(tmp_path: Path) -> None:
    method = "tmpfs" if may_mount() else "limit"
    own = ["unshare", "-m"] if method == "tmpfs" else []
    command = [*own, sys.executable, "-c", FULL_DISK, method, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == 0, done.stderr
    outcomes = dict(line.split() for line in done.stdout.splitlines())
    assert outcomes["0"].startswith("StateError") and outcomes["0"] in ("StateError", "StateError3")
    assert outcomes[str(16 << 20)] == "started"
    assert set(outcomes.values()) <= {"StateError", "StateError3", "StateNotSaved", "started"}
    assert "StateNotSaved" in outcomes.values(), "a disk that fills up later stops nothing"
