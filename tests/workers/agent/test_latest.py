"""One job of a kind at a time: the new one ends the one before, and a name that is not the newest one's is not known."""

from __future__ import annotations

import pytest

from sparkd.errors import RankError
from workers.agent.latest import Latest


class Job:
    def __init__(self, others: list[Job]) -> None:
        self.began_alone = all(other.is_over for other in others)
        self.is_over = False
        others.append(self)

    def end(self) -> None:
        self.is_over = True


def test_a_new_job_ends_the_one_before_first() -> None:
    jobs: list[Job] = []
    latest: Latest[Job] = Latest("Unknown.")
    first = latest.begin(lambda: Job(jobs))
    assert latest.find(first) is jobs[0] and not jobs[0].is_over
    second = latest.begin(lambda: Job(jobs))
    assert jobs[0].is_over and jobs[1].began_alone and latest.find(second) is jobs[1]
    latest.end(first)
    assert not jobs[1].is_over
    with pytest.raises(RankError, match="Unknown"):
        latest.find(first)
    latest.end(second)
    latest.end(second)
    assert jobs[1].is_over
    with pytest.raises(RankError):
        latest.find(second)


def test_where_no_job_can_begin_there_is_none() -> None:
    def fails() -> Job:
        raise RankError("Failed.")

    jobs: list[Job] = []
    latest: Latest[Job] = Latest("Unknown.")
    first = latest.begin(lambda: Job(jobs))
    with pytest.raises(RankError, match="Failed"):
        latest.begin(fails)
    assert jobs[0].is_over
    with pytest.raises(RankError, match="Unknown"):
        latest.find(first)
    with pytest.raises(RankError, match="Unknown"):
        latest.find("")
