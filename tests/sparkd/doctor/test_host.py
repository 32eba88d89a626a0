"""What a check may look at on a node."""

from __future__ import annotations

import pytest

from sparkd.doctor.host import Host

RAW = {"files": {"etc/os-release": "x", "etc/secret": "y"}, "paths": [".dockerenv"]}


def test_a_file_that_is_read_is_its_text_and_empty_where_the_node_has_none() -> None:
    host = Host("n", RAW)

    assert (host.text("etc/os-release"), host.text("proc/swaps")) == ("x", "")
    assert (host.has(".dockerenv"), host.has("dev/watchdog")) == (True, False)


def test_a_path_that_nobody_reads_is_refused_by_name() -> None:
    """Else a new check would find nothing on any node, and nobody would notice."""
    host = Host("n", RAW)
    for look in (host.text, host.number, host.has):
        with pytest.raises(LookupError, match="etc/secret"):
            look("etc/secret")
