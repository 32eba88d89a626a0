"""A program that the agent starts: what counts of its output."""

from __future__ import annotations

import sys

from tests.support.waiting import HUNG_S
from workers.agent.job import Job


def test_a_line_of_a_library_is_none_of_the_programs_words() -> None:
    """NCCL and torch print to the same stdout. Whatever JSON such a line is, what comes after it is read."""
    program = "for line in ('NCCL version 2', '7', 'null', '[1]', '{\"ended\": true}'): print(line)"
    job = Job([sys.executable, "-c", program], {}, {}, "measures", "look at the node")
    try:
        assert job.first(HUNG_S) == {"ended": True}
        job.process.wait(HUNG_S)
        assert job.state() == {"ended": True}
    finally:
        job.end()
