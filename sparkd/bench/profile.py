"""The cells of a profile, read from the YAML that sparkrun's profiles have."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from itertools import islice, product
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sparkd.bench.result import Cell
from sparkd.config import yaml_file
from sparkd.errors import ConfigError

LLAMA_BENCHY = "llama-benchy"
MOST_CELLS = 1000
DEFAULT = "quick"


def _several(value: object) -> object:
    """A number alone, or numbers in one text with commas between them, is a list too."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, list) else [value]


_Counts = Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(_several), Field(min_length=1)]
_Depths = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_several), Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Arguments(_Strict):
    """llama-benchy's flags, by their names without dashes. Defaults are sparkrun's where it has one, else llama-benchy's."""

    pp: _Counts = [2048]
    tg: _Counts = [32]
    depth: _Depths = [0]
    concurrency: _Counts = [1]
    runs: int = Field(default=3, ge=1, le=100)
    # sparkrun's profiles have the short name, llama-benchy's flag the long one.
    prefix_caching: bool = Field(default=True, validation_alias=AliasChoices("prefix_caching", "enable_prefix_caching"))
    no_cache: bool = False
    exact_tg: bool = False
    latency_mode: Literal["api", "generation", "none"] = "api"
    skip_coherence: bool = False
    no_warmup: bool = False
    adapt_prompt: bool = True
    extra_body: list[str] = []


class _Entry(_Strict):
    """pp, tg: in place of those of `args`."""

    depth: int = Field(ge=0)
    concurrency: int = Field(ge=1)
    pp: _Counts | None = None
    tg: _Counts | None = None


class _File(_Strict):
    framework: str = LLAMA_BENCHY
    metadata: dict[str, Any] = {}
    args: Arguments = Arguments()
    schedule: list[_Entry] | None = None


class BenchProfile(BaseModel):
    """cells: in the order in which they are measured; each with every prompt and output length of `args`."""

    model_config = ConfigDict(frozen=True)

    name: str
    description: str
    args: Arguments
    cells: tuple[Cell, ...]


def shipped() -> list[str]:
    """The names of the profiles that come with sparkd."""
    folder = files("sparkd.bench").joinpath("profiles")
    return sorted(path.name.removesuffix(".yaml") for path in folder.iterdir() if path.name.endswith(".yaml"))


def named(name: str) -> BenchProfile:
    """Raises ConfigError for a name that no shipped profile has."""
    if name not in shipped():
        raise ConfigError(f"No profile is called {name[:80]}: there are {', '.join(shipped())}, or give a file of sparkrun's form.")
    return parsed(name, files("sparkd.bench").joinpath("profiles", f"{name}.yaml").read_text(encoding="utf-8"))


def parsed(name: str, text: str) -> BenchProfile:
    """Raises ConfigError, which names the key and the fault."""
    document = yaml_file.parse(text.encode(errors="surrogatepass"), f"The profile {name}", {}, last_counts=True)
    if document.problems:
        raise ConfigError(str(document.problems[0]))
    try:
        file = _File.model_validate(document.values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"The profile {name}: {key}: {first['msg'].lower()}.") from None
    if file.framework != LLAMA_BENCHY:
        raise ConfigError(f"The profile {name} is for {file.framework}: sparkd runs profiles of {LLAMA_BENCHY}.")
    # A client's lists of 10,000 numbers have more cells than fit into memory.
    cells = tuple(islice(_cells(file), MOST_CELLS + 1))
    if len(cells) > MOST_CELLS:
        raise ConfigError(f"The profile {name} has more than {MOST_CELLS:,} cells: shorten its lists.")
    return BenchProfile(name=name, description=str(file.metadata.get("description", "")), args=file.args, cells=cells)


def _cells(file: _File) -> Iterator[Cell]:
    args = file.args
    grid = (_Entry(depth=depth, concurrency=concurrency) for depth, concurrency in product(args.depth, args.concurrency))
    for entry in file.schedule or grid:
        for prompt, output in product(entry.pp or args.pp, entry.tg or args.tg):
            yield Cell(depth=entry.depth, concurrency=entry.concurrency, prompt_tokens=prompt, output_tokens=output)
