"""Measures what quantizing costs a model: perplexity, KL divergence and greedy agreement of each format against the model as stored.

Each format is a model of its own beside the configured one, which the supervisor loads and evicts like any other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field

from sparkd import __version__
from sparkd.bench.answer_logprobs import read_passage, read_tokens
from sparkd.bench.client import Client
from sparkd.bench.divergence import divergences, losses
from sparkd.bench.figures import one_line
from sparkd.bench.passages import (
    GREEDY_TOKENS,
    LOOKED_UP,
    SHIPPED,
    TOP,
    agreement,
    checked,
    passages,
    prompts,
    shipped_text,
)
from sparkd.bench.result import Cell, QualityRow, text_label
from sparkd.bench.running_bench import RunningBench
from sparkd.config.quantize import canonical, parse
from sparkd.errors import BadRequest, EngineError, RankError, SparkdError
from sparkd.gateway.routes import model_path
from workers.quantization.formats import Format

FORMATS = ("fp8", "nvfp4", "mxfp4", "int4")
ENTRY, STORED = "entry", "as stored"
ANSWER_S = 3600.0
MOST_ANSWER_BYTES = 256 << 20
_GREEDY = {"temperature": 0, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0}


@dataclass(slots=True)
class _Reference:
    """The answers of the unquantized model.

    likely: by passage, the TOP log-probabilities of each position.
    tokens: of its answers, by prompt.
    """

    likely: list[list[dict[str, float]]] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)


class QualityBench(BaseModel):
    """
    text: the name of the text.
    content: of the text.
    formats: spellings, `entry` for the mix of the entry, or empty for the entry's own or FORMATS.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["quality"] = "quality"
    text: str
    profile: str = "quality"
    content: str = Field(repr=False)
    formats: tuple[str, ...] = ()
    tool: str = f"sparkd {__version__}"
    cells: tuple[Cell, ...] = ()

    async def run(self, bench: RunningBench) -> str:
        """Measure the formats that are not measured yet, each by an engine of its own, one after another."""
        quantize = (await bench.client.model(bench.model))["quantize"]
        rows = bench.result.quality or [QualityRow(format=name) for name in (STORED, *(self.formats or _formats_of(quantize)))]
        await bench.keep(quality=[row if row.measured else QualityRow(format=row.format) for row in rows])
        reference: _Reference | None = None
        for number, row in enumerate(bench.result.quality):
            # The reference is asked again for rows that are missing: what it said is kept in memory only.
            if row.measured and not (row.format == STORED and any(not each.measured for each in bench.result.quality)):
                continue
            measured, said = await self._format(bench, number, reference)
            reference = said or reference
            quality = list(bench.result.quality)
            quality[number] = measured
            await bench.keep(quality=quality)
        rows = bench.result.quality
        failed = [row.format for row in rows if not row.measured]
        line = f"{bench.result.id}: {len(rows) - len(failed)} of {len(rows)} formats were measured."
        return f"{line} Failed: {', '.join(failed)}." if failed else line

    async def _format(self, bench: RunningBench, number: int, reference: _Reference | None) -> tuple[QualityRow, _Reference | None]:
        """The row of a format; of the reference also what it said."""
        form, client = bench.result.quality[number].format, bench.client
        count = len(bench.result.quality)

        def tell(message: str, share: float) -> None:
            bench.tell(f"{form} ({number + 1} of {count}): {message}", (number + share) / count)

        lent: str | None = None
        since_seq = await bench.newest_event()
        try:
            lent = (await client.post("/bench/copy", {"model": bench.model, "format": form}))["name"]
            tell("loading", 0)
            await bench.ready(lent, once=True)
            return await self._measured(client, lent, form, reference, tell)
        except SparkdError as error:
            why = await bench.engine_failure(lent, since_seq) if lent is not None else None
            return QualityRow(format=form, error=why or one_line(error.message)), None
        finally:
            if lent is not None:
                # An operator may have removed it already; the daemon removes what is left when the bench has ended.
                with suppress(RankError):
                    await client.delete(model_path(lent))

    async def _measured(
        self, client: Client, lent: str, form: str, reference: _Reference | None, tell: Callable[[str, float], None]
    ) -> tuple[QualityRow, _Reference | None]:
        said, divergent, lost, pieces = _Reference(), list[float](), list[float](), passages(self.content)
        for number, piece in enumerate(pieces):
            tell("reading the text", 0.5 + 0.25 * number / len(pieces))
            question: dict[str, Any] = {"prompt": piece, "max_tokens": 1, "prompt_logprobs": LOOKED_UP}
            read = read_passage(await _answer(client, lent, question))
            lost += losses(read.ids, read.likely)
            if form == STORED:
                said.likely.append([dict(sorted(position.items(), key=lambda item: -item[1])[:TOP]) for position in read.likely])
            elif reference is not None:
                divergent += divergences(reference.likely[number], read.likely, TOP)
        tell(f"{len(prompts())} prompts", 0.75)
        question = {"prompt": list(prompts()), "max_tokens": GREEDY_TOKENS, "ignore_eos": True}
        said.tokens = read_tokens(await _answer(client, lent, question))
        row = QualityRow(
            format=form,
            perplexity=math.exp(fmean(lost)),
            tokens=len(lost),
            kl=fmean(divergent) if divergent else None,
            kl_p99=quantiles(divergent, n=100, method="inclusive")[98] if len(divergent) > 1 else None,
            agreement=agreement(reference.tokens, said.tokens) if reference is not None and form != STORED else None,
        )
        return row, said if form == STORED else None


def _formats_of(quantize: Mapping[str, Any] | str | None) -> tuple[str, ...]:
    """The format of the entry, `entry` for a recipe of several, FORMATS where the entry names none."""
    if not isinstance(quantize, Mapping):
        return FORMATS
    form = quantize.get("format")
    return (form,) if isinstance(form, str) and canonical(parse(form)) == quantize else (ENTRY,)


async def _answer(client: Client, model: str, question: Mapping[str, Any]) -> bytes:
    """The body of a completion. Raises EngineError, which says nothing of the question: an engine's error may repeat it."""
    body = {"model": model, "return_token_ids": True, **_GREEDY, **question}
    answer = bytearray()
    try:
        async with asyncio.timeout(ANSWER_S), client.completion(body) as response:
            if response.status_code != 200:
                raise EngineError(f"{model} answered with status {response.status_code}: `sparkd logs {model}` may say why.")
            async for piece in response.aiter_bytes():
                answer += piece
                if len(answer) > MOST_ANSWER_BYTES:
                    raise EngineError(f"{model} answered with more than {MOST_ANSWER_BYTES >> 20} MiB: give a shorter text.")
    except httpx.HTTPError as error:
        raise EngineError(f"{model} did not answer to the end ({type(error).__name__}): resume the bench.") from None
    except TimeoutError:
        raise EngineError(f"{model} did not answer within {ANSWER_S:,.0f} s: give a shorter text.") from None
    return bytes(answer)


def check_format(form: str) -> None:
    """Raises BadRequest for a format that is none."""
    try:
        if form != ENTRY:
            Format.parse(form)
    except SparkdError as error:
        raise BadRequest(error.message, param="formats") from None


def quality_bench(formats: Sequence[str], text: str | None, text_name: str | None) -> QualityBench:
    """Raises BadRequest for a format that is none, and for a text that is too short or too long."""
    for form in formats:
        check_format(form)
    name = SHIPPED if text is None else text_name or "text"
    content = shipped_text() if text is None else checked(name, text)
    return QualityBench(text=text_label(name, content), content=content, formats=tuple(dict.fromkeys(formats)))
