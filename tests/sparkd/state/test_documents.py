"""Documents of state.db: kept beside the supervisor's tables, by any process of this user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkd.errors import StateError
from sparkd.state.documents import Documents
from sparkd.state.nouns import Machine
from sparkd.state.rows import noun_of
from sparkd.state.store import Store


def machines(folder: Path) -> Documents[Machine]:
    return Documents(folder, "machines", lambda document: noun_of(Machine, document))


def test_a_document_is_kept_replaced_and_removed_beside_the_daemons_own_tables(tmp_path: Path) -> None:
    kept = machines(tmp_path)
    assert (kept.all(), kept.get("a"), [*tmp_path.iterdir()]) == ({}, None, []), "reading makes no file"
    store = Store(tmp_path / "state.db")
    kept.put("b", {"host": "spark-b", "of_a_later_release": 1})
    kept.put("a", {"host": "old"})
    kept.put("a", {"host": "spark-a", "uptime_s": 1.5})
    assert machines(tmp_path).all() == {"a": Machine("spark-a", 1.5), "b": Machine("spark-b")}
    kept.remove("b")
    assert (kept.get("a"), kept.get("b")) == (Machine("spark-a", 1.5), None)
    store.close()


def test_a_verb_may_make_the_database_before_the_first_daemon(tmp_path: Path) -> None:
    machines(tmp_path / "state").put("a", {"host": "spark-a"})
    Store(tmp_path / "state" / "state.db").close()
    assert machines(tmp_path / "state").all() == {"a": Machine("spark-a")}


def test_a_document_that_cannot_be_read_is_logged_and_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = machines(tmp_path)
    for key, document in (("a", {}), ("b", {"host": "spark-b"}), ("c", "text")):
        kept.put(key, document)
    assert kept.all() == {"b": Machine("spark-b")}
    assert ["the row of a " in caplog.text, "the row of c " in caplog.text, "table machines" in caplog.text] == [True] * 3
    caplog.clear()
    assert kept.all() == {"b": Machine("spark-b")} and not caplog.records


def test_a_document_of_another_kind_is_dropped_like_one_that_cannot_be_read(tmp_path: Path) -> None:
    rates = Documents(tmp_path, "rates", float)
    rates.put("disk", 1e9)
    Documents(tmp_path, "rates", float).put("bandwidth", [1])
    assert rates.all() == {"disk": 1e9} == rates.all()


def test_a_database_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"this is no database, but long enough to be one" * 50)
    for use in (machines(tmp_path).all, lambda: machines(tmp_path).put("a", {})):
        with pytest.raises(StateError, match=r"state\.db, table machines, .*not a database"):
            use()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_root_opens_no_database_in_another_users_folder(tmp_path: Path) -> None:
    machines(tmp_path).put("a", {"host": "spark-a"})
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(StateError, match="sudo -u"):
        machines(tmp_path).all()
