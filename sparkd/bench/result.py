"""The result of a bench, and the results that are kept."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sparkd.errors import NotFound
from sparkd.state.documents import Documents

# In the state folder: the environment of llama-benchy.
FOLDER = "bench"

CellState = Literal["waiting", "running", "done", "failed"]
BenchState = Literal["running", "done", "failed", "cancelled"]
Kind = Literal["speed", "load", "quality"]
LoadWay = Literal["first", "cached", "swap", "back"]


class Value(BaseModel):
    model_config = ConfigDict(frozen=True)


class Cell(Value):
    """One point of a profile."""

    depth: int = Field(ge=0, description="Tokens of context before the prompt")
    concurrency: int = Field(ge=1, description="Requests at once")
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)

    @property
    def name(self) -> str:
        """As llama-benchy names its tests."""
        return f"pp{self.prompt_tokens} tg{self.output_tokens} @ d{self.depth} (c{self.concurrency})"


class Energy(Value):
    """The energy of all GPUs of the model's nodes. Joules a token are of the power above idle; null: too short a phase to tell."""

    mean_w: float
    peak_w: float
    joules: float = Field(description="Integral over the cell, idle power included")
    joules_per_prompt_token: float | None
    joules_per_output_token: float | None


class EngineFigures(Value):
    """The engine's own counts of a cell's requests. null: it does not count that."""

    requests: int | None = Field(default=None, description="Requests whose first token came meanwhile")
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    kv_use_peak: float | None = Field(default=None, description="Share of the KV cache, 0 to 1")
    prefix_hit_share: float | None = Field(default=None, description="Share of the prompts' tokens that came from the prefix cache")
    preemptions: int | None = None
    drafted_tokens: int | None = None
    accepted_share_by_position: list[float] | None = Field(default=None, description="Share of the drafts accepted at each position")


class MachineFigures(Value):
    """The extremes of the nodes during a cell."""

    celsius_peak: float | None = None
    throttled: list[str] = Field(default=[], description="The reasons that held the clock down; a cell that throttled is not comparable")
    memory_peak_bytes: int | None = Field(default=None, description="Most memory of the model's engine, host and device together")


class CellResult(Value):
    """rows: llama-benchy's own, as it wrote them (`benchmarks` of its JSON): tokens a second, ms; mean, std, values."""

    cell: Cell
    state: CellState = "waiting"
    error: str | None = None
    started_s: float | None = None
    seconds: float | None = None
    rows: list[dict[str, Any]] = []
    prompt_tokens: int | None = Field(default=None, description="Sum over the measured requests by the tool's count; cached ones included")
    output_tokens: int | None = Field(default=None, description="Sum over the measured requests by the tool's count")
    others_tokens: int | None = Field(
        default=None, description="Tokens of others' requests that the engine read or made meanwhile; a cell that has any is not comparable"
    )
    energy: Energy | None = None
    engine: EngineFigures = EngineFigures()
    machine: MachineFigures = MachineFigures()

    @property
    def distorted(self) -> str | None:
        """Why the figures are not the model's alone; None where they are."""
        if self.others_tokens:
            return f"requests of others ran beside it, {self.others_tokens:,} tokens"
        return f"the clock was held down ({', '.join(self.machine.throttled)})" if self.machine.throttled else None


class Published(Value):
    """A figure of the recipe that was published elsewhere.

    what: its key in the recipe, such as decode_tokens_per_s.
    to: the end of a range.
    when: the conditions, in the source's words.
    """

    what: str
    value: float
    to: float | None = None
    unit: str
    when: str | None = None
    source: str


class Predicted(Value):
    """The figures of `sparkd plan` for the model before it was measured. null: the rates of this node were not known.

    first_load_s, next_load_s: to read the weights, and the first time to quantize them. active_bytes: of weights that a token reads.
    """

    decode_tokens_per_s: float | None = None
    first_load_s: float | None = None
    next_load_s: float | None = None
    active_bytes: int | None = None


class BenchSubject(Value):
    """The model that was measured.

    entry: its keys as configured, secrets masked.
    format: of the weights as they run.
    driver: NVIDIA's.
    """

    model: str
    source: str
    checkpoint: str | None = None
    entry: dict[str, Any] = {}
    format: str | None = None
    vllm: str | None = None
    sparkd: str = ""
    driver: str | None = None
    gpu: str | None = None
    nodes: list[str] = []


class BenchSample(Value):
    """at_s: since the bench began."""

    at_s: float
    power_w: float | None = None
    memory_bytes: int | None = None
    celsius: float | None = None


class Phase(Value):
    """A phase of a load."""

    phase: str
    seconds: float
    bytes: int | None = None


class LoadRow(Value):
    """One load. way: `first`, `cached`, `swap` from the other model, or `back` to it. Seconds begin with the request, or with the order to
    unload the other model."""

    way: LoadWay
    model: str = Field(default="", description="The model that was loaded: the other one where way is `back`")
    seconds: float = Field(description="Until the model is READY")
    first_answer_s: float | None = Field(default=None, description="Until the first token of a streamed answer")
    phases: list[Phase] = []
    bytes_per_s: float | None = Field(default=None, description="Rate at which the load read")
    disk_bytes_per_s: float | None = Field(default=None, description="Rate of the disk alone, past the page cache, before the first load")


class QualityRow(Value):
    """A format against the model as it is stored. null: not measured; all null without an error: not measured yet."""

    format: str = Field(description="A format, `entry` for a recipe of the entry with several, or `as stored` for the reference")
    error: str | None = None
    perplexity: float | None = None
    tokens: int | None = Field(default=None, description="Positions of the text that perplexity and KL are taken over")
    kl: float | None = Field(default=None, description="KL(reference || format), mean over the positions, nats a token")
    kl_p99: float | None = Field(default=None, description="Its 99th percentile over the positions, nats a token")
    agreement: float | None = Field(
        default=None,
        description="Greedy tokens that equal the reference's up to the first difference, as a share of 32, mean over 32 prompts. "
        "After a difference the contexts differ, so equal tokens there say nothing",
    )

    @property
    def measured(self) -> bool:
        return self.perplexity is not None


class BenchResult(Value):
    """predicted_bytes: what `sparkd plan` said the engine would hold."""

    version: Literal[1] = 1
    id: str
    kind: Kind = "speed"
    state: BenchState
    error: str | None = None
    subject: BenchSubject
    profile: str
    tool: str
    text: str | None = Field(default=None, description="The text that the prompts came from: its name, and a hash of its bytes")
    started_s: float
    ended_s: float | None = None
    latency_mode: str | None = Field(default=None, description="llama-benchy's way to measure the latency that it subtracts")
    idle_w: float | None = Field(default=None, description="Median before the first cell, the model loaded and no request running")
    predicted_bytes: int | None = None
    predicted: Predicted | None = None
    published: list[Published] = []
    cells: list[CellResult] = []
    loads: list[LoadRow] = []
    quality: list[QualityRow] = []
    samples: list[BenchSample] = []

    @property
    def done(self) -> int:
        """Cells that were measured."""
        return sum(cell.state == "done" for cell in self.cells)

    @property
    def failed(self) -> list[str]:
        """The names of the cells and formats that have no figures because they failed."""
        return [cell.cell.name for cell in self.cells if cell.state == "failed"] + [row.format for row in self.quality if row.error]


def text_label(name: str, text: str) -> str:
    """As a result names a text: with the first digits of the SHA-256 of its bytes."""
    return f"{name} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


class BenchStore:
    """The results. Its methods block, and raise StateError where the database cannot be used."""

    def __init__(self, state_dir: Path) -> None:
        self._kept = Documents(state_dir, "benches", BenchResult.model_validate)

    def write(self, result: BenchResult) -> None:
        self._kept.put(result.id, result.model_dump(mode="json"))

    def read(self, bench_id: str) -> BenchResult:
        """Raises NotFound."""
        if (result := self._kept.get(bench_id)) is None:
            raise NotFound(f"There is no bench {bench_id[:128]!r}. `sparkd bench ls` lists them.")
        return result

    def all(self) -> list[BenchResult]:
        """Newest first."""
        return [*reversed(self._kept.all().values())]

    def remove(self, bench_id: str) -> None:
        self._kept.remove(bench_id)
