"""The verb `bench`: measure a model by a profile, list what was measured, show it, compare it, export it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from sparkd.cli.options import DefaultVerb, argument, group, option
from sparkd.cli.session import NoWait, Session, verb
from sparkd.errors import ConfigError, RankError, SparkdError
from sparkd.render import models as show
from sparkd.render.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from sparkd.bench.compare import Comparison
    from sparkd.bench.result import BenchResult

# Columns of words, which go on below.
WORDS = ("WHY", "WHEN", "SOURCE", "PHASES")
NAMES = ("MODEL", "OUR CELL", "THROTTLED")
BENCH = argument(metavar="BENCH", help="Id of a bench, from `sparkd bench ls`.")


def register(app: typer.Typer) -> None:
    about = "Measure a model: tokens a second, times, watts, joules.\n\n`sparkd bench MODEL` runs a profile."
    bench = group("bench", cls=DefaultVerb, help=about)
    bench.command("run")(verb(run))
    bench.command("ls")(verb(ls))
    bench.command("show")(verb(show_one))
    bench.command("compare")(verb(compare))
    bench.command("export")(verb(export))
    bench.command("rm")(verb(rm))
    bench.command("profiles")(verb(profiles))
    app.add_typer(bench)


def run(
    session: Session,
    model: Annotated[str, argument(metavar="MODEL", help="A known name.")],
    profile: Annotated[str, option("--profile", metavar="NAME|FILE", help="See `bench profiles`; or sparkrun's YAML.")] = "quick",
    book: Annotated[Path | None, option("--book", metavar="FILE", help="A text for the prompts, in place of empty words.")] = None,
    load: Annotated[bool, option("--load", help="Measure its loads: cold, from the quantized cache, swaps.")] = False,
    times: Annotated[int, option("--times", metavar="N", min=1, max=50, help="Loads of each way, with --load.")] = 3,
    other: Annotated[str | None, option("--from", metavar="OTHER", help="The other model of the swaps, with --load.")] = None,
    quality: Annotated[bool, option("--quality", help="Measure what quantizing costs in accuracy, not the speed.")] = False,
    formats: Annotated[str | None, option("--formats", metavar="F,F", help="For --quality: fp8,nvfp4,mxfp4,int4, or others.")] = None,
    text: Annotated[Path | None, option("--text", metavar="FILE", help="Of --quality: a text of your own, 16 KiB at most.")] = None,
    resume: Annotated[str | None, option("--resume", metavar="BENCH", help="Measure what BENCH has not.")] = None,
    force: Annotated[bool, option("--force", help="Measure although others use a model.")] = False,
    no_wait: NoWait = False,
) -> None:
    """Measure a model by a profile, over the gateway.

    Runs llama-benchy for each cell of the profile, and adds the GPU's power, temperature and memory and the engine's counters. Ctrl-C stops
    waiting; `sparkd cancel OPERATION` ends the bench, and --resume goes on with it. Exits with 1 if a cell or a format failed.

    --load unloads the model and loads it again: cold, which removes its quantized weights and writes them anew, then from these, then in
    place of another model and back. In the end each model is as it was.

    --quality loads the model once as stored and once in each format, beside its own entry, and compares perplexity, KL divergence and
    greedy answers. Other models may be evicted meanwhile and are loaded again at the end.
    """
    if not quality and (formats or text):
        raise ConfigError("--formats and --text are of a quality bench: add --quality.")
    if not load and other:
        raise ConfigError("--from is of a bench of loads: add --load.")
    if load and quality:
        raise ConfigError("--load and --quality are two benches: give one of them.")
    body: dict[str, Any] = {"model": model, "profile": profile, "resume": resume, "force": force}
    if load:
        body |= {"kind": "load", "times": times, "other": other}
    elif "/" in profile or profile.endswith((".yaml", ".yml")):
        body |= {"profile": Path(profile).stem[:80], "profile_text": _text(Path(profile))}
    if book is not None:
        body |= {"book": _text(book), "book_name": book.name[:256]}
    if quality:
        body |= {"kind": "quality", "formats": [form.strip() for form in (formats or "").split(",") if form.strip()]}
    if text is not None:
        body |= {"text": _text(text), "text_name": text.name[:256]}
    started = session.client.post("/bench", body)
    running = f"{started['bench']} is running. `sparkd cancel {started['operation']}` ends it."
    if no_wait:
        session.answer(started, running)
        return
    if not session.json:
        show.say(session.err, running)
    again = ["sparkd", "bench", model]
    again += ["--load", "--times", str(times)] if load else ["--quality"] if quality else ["--profile", profile]
    flags = {"--from": other, "--book": book, "--text": text}
    again += [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    again += [] if load else ["--resume", started["bench"]]
    _ended(session, started, f"Run `{shlex.join(again)}` to {'repeat it' if load else 'go on'}.")


def _counted(cells: int) -> str:
    return "1 cell" if cells == 1 else f"{cells} cells"


def ls(session: Session) -> None:
    """List what was measured, newest first."""
    answer = session.client.get("/bench")
    session.answer(answer, lambda: _listed(answer["benches"], session.out))


def _listed(rows: list[dict[str, Any]], console: Console) -> None:
    columns = ("BENCH", "MODEL", "FORMAT", "PROFILE", "STATE", "CELLS", "TOKENS/S")
    table = Table(*columns, right={"CELLS", "TOKENS/S"}, spare=("CELLS", "PROFILE", "STATE", "FORMAT"))
    for row in rows:
        rate = "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.1f}"
        cells = f"{row['done']}/{row['cells']}"
        table.add(row["id"], row["model"], row["format"] or "-", row["profile"], row["state"], cells, rate)
    if rows:
        table.show(console)
    else:
        console.print("Nothing was measured yet: `sparkd bench MODEL`.")


def show_one(session: Session, bench_id: Annotated[str, BENCH]) -> None:
    """Show what was measured."""
    _show(session, _result(session, bench_id))


def compare(
    session: Session,
    first: Annotated[str, argument(metavar="A", help="Id of a bench.")],
    second: Annotated[str, argument(metavar="B", help="Id of the bench to judge by it.")],
    fail_over: Annotated[str | None, option("--fail-over", metavar="SHARE", help="Fail where B is worse by more, such as 5%.")] = None,
) -> None:
    """Compare two results, figure by figure.

    A change within the spread of both is no change. With --fail-over the exit code is 4 where B is worse by more than that, has a cell that
    failed, or has no figure in common with A.
    """
    from sparkd.bench import compare as comparing

    share = None if fail_over is None else _share(fail_over)
    comparison = comparing.compare(_result(session, first), _result(session, second))
    worst = None if share is None else comparison.worst(share)
    lost = () if share is None else comparison.lost
    session.answer(asdict(comparison), lambda: _compared(comparison, session.out))
    if share is not None and not comparison.changes:
        raise RankError(f"{first} and {second} have no figure in common, so none was judged: compare two benches of one kind and profile.")
    if worst is not None:
        raise RankError(f"{second} is worse than {first} by more than {fail_over}: {worst.figure} of {worst.where}.")
    if lost:
        raise RankError(f"{second} has no figures of {lost[0].where}, which {first} has: resume it with --resume {second}.")


def export(
    session: Session,
    bench_ids: Annotated[list[str], argument(metavar="BENCH...", help="Ids of benches; several for html.")],
    form: Annotated[str, option("--format", metavar="FORM", help="md, json or html.")] = "md",
    out: Annotated[Path | None, option("--out", "-o", metavar="FILE", help="A file instead of the terminal.")] = None,
) -> None:
    """Write results in another form.

    md: the arena's table and ours; json: llama-benchy's; html: a report with plots in one file.
    """
    from sparkd.bench import tables
    from sparkd.bench.report import html

    forms: dict[str, Callable[[BenchResult], str]] = {
        "md": tables.markdown,
        "json": lambda result: json.dumps(tables.benchy_json(result), indent=2) + "\n",
    }
    if form not in (*forms, "html"):
        raise ConfigError(f"--format {form}: one of {', '.join(forms)} and html is expected.")
    if form != "html" and len(bench_ids) > 1:
        raise ConfigError(f"--format {form} takes one bench: give one id, or --format html.")
    results = [_result(session, bench_id) for bench_id in bench_ids]
    text = html(results) if form == "html" else forms[form](results[0])
    if out is None:
        session.out.file.write(text)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}. Choose another file.") from None
    session.out.print(f"{out} is written.", markup=False)


def rm(session: Session, bench_id: Annotated[str, BENCH]) -> None:
    """Remove a result."""
    row = session.client.delete(f"/bench/{quote(bench_id, safe='')}")
    session.answer(row, f"{bench_id} is removed.")


def profiles(session: Session) -> None:
    """List the profiles that come with sparkd."""
    answer = session.client.get("/bench/profiles")
    rows = (f"{row['name']}: {row['description']}. {_counted(len(row['cells']))}." for row in answer["profiles"])
    session.answer(answer, "\n".join(rows))


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 10:
        raise ConfigError(f"--fail-over {text}: a share is expected, such as 5% or 0.05.")
    return share


def _result(session: Session, bench_id: str) -> BenchResult:
    from sparkd.bench.result import BenchResult

    return BenchResult.model_validate(session.client.get(f"/bench/{quote(bench_id, safe='')}"))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"The file {path} cannot be read: {why}. Give a file of plain text.") from None


def _ended(session: Session, started: dict[str, Any], again: str) -> None:
    """Follow a bench to its end and show its result.

    again: how to go on with one that is incomplete.

    Raises RankError where the bench failed, Exit where a cell or a format failed, and as `Session.follow` does.
    """
    operation = session.follow(started, f"the bench {started['bench']}", lambda now: (now["message"], now["message"]), again=again)
    result = _result(session, started["bench"])
    _show(session, result)
    if operation["state"] == "FAILED":
        raise RankError(f"{operation['message']} {again}")
    if failed := result.failed:
        if not session.json:
            show.say(session.err, f"{', '.join(failed)}: not measured. {again}")
        raise typer.Exit(SparkdError.exit_code)


def _show(session: Session, result: BenchResult) -> None:
    session.answer(result.model_dump(mode="json"), lambda: _drawn(result, session.out))


def _drawn(result: BenchResult, console: Console) -> None:
    from sparkd.bench.tables import notes, tables

    subject = result.subject
    facts = [subject.format or "as stored", f"vLLM {subject.vllm or '?'}", subject.gpu or "no GPU", result.tool]
    show.say(console, f"{result.id}: {subject.model}, {', '.join(facts)}, {result.state}")
    if result.text is not None:
        show.say(console, f"text: {result.text}")
    for title, head, rows in tables(result):
        columns = [name.upper() for name in head]
        numbers = [name for name in columns[1:] if name not in (*WORDS, *NAMES)]
        # The narrower the terminal, the fewer of the last columns.
        table = Table(*columns, right=numbers, folds=WORDS, spare=[name for name in reversed(columns[2:]) if name not in WORDS])
        for row in rows:
            table.add(*row)
        show.say(console, f"\n{title}", "bold")
        table.show(console)
    for note in notes(result):
        show.say(console, note, "yellow")


def _compared(comparison: Comparison, console: Console) -> None:
    """The differences of the subjects, a table of the changes, then the cells that only one has."""
    from sparkd.bench.compare import relative_text, verdict
    from sparkd.bench.figures import spread_text

    differences, changes = Table("DIFFERS", "A", "B"), Table("CELL", "FIGURE", "A", "B", "CHANGE", "VERDICT", right={"A", "B", "CHANGE"})
    differences.add("bench", *comparison.of)
    for difference in comparison.differences:
        differences.add(difference.what, difference.a, difference.b)
    for change in comparison.changes:
        spreads = (spread_text(change.a, change.unit), spread_text(change.b, change.unit))
        changes.add(change.where, change.figure, *spreads, relative_text(change), verdict(change))
    differences.show(console)
    console.print()
    if comparison.changes:
        changes.show(console)
        console.print("~: no more than the spread of the repetitions. ⚠: `bench show` says why a cell is not comparable.", style="dim")
    else:
        console.print("The results have no figure in common.")
    for name, missing in (("A", comparison.only_a), ("B", comparison.only_b)):
        if missing:
            console.print(f"\nOnly {name} has:")
        for figures in missing:
            show.say(console, f"  {figures.where}: {figures.why}")
