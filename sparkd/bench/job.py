"""The order that the daemon gives the bench's program. It has keys, so it comes by standard input."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from sparkd.bench.load_bench import LoadBench
from sparkd.bench.quality_bench import QualityBench
from sparkd.bench.speed_bench import SpeedBench

Work = SpeedBench | LoadBench | QualityBench


class Job(BaseModel):
    """
    state_dir: of the daemon, whose state.db has the result that this bench begins with.
    bench: its id.
    admin_key: for the daemon.
    key: for llama-benchy, which opens models alone.
    """

    state_dir: Path
    bench: str
    base_url: str
    admin_key: str = Field(repr=False)
    key: str = Field(repr=False)
    work: Annotated[Work, Field(discriminator="kind")]
