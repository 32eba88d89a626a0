"""`sparkd export`: runs the program that writes a quantized checkpoint, in the Python environment that has torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparkd.cli.options import EntryFile, argument, option
from sparkd.cli.session import Session, verb
from sparkd.errors import CheckpointError, ConfigError, SparkdError
from sparkd.render import models as show
from workers.host.interpreter import module_command, program_environment

if TYPE_CHECKING:
    from workers.quantization.recipe import QuantizationRecipe

# The time that a program that was interrupted gets to remove what it has written.
REMOVE_S = 60.0
# A rate over less than this says nothing about the rest.
HONEST_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Chosen:
    """A checkpoint and what is to be made of it.

    runtime: the Python that has torch, "" for ours.
    cache_dir: where it may be already.
    """

    folder: str
    recipe: QuantizationRecipe
    runtime: str
    cache_dir: str


def register(app: typer.Typer) -> None:
    app.command("export")(verb(export))


def export(
    session: Session,
    model: Annotated[str, argument(metavar="MODEL", help="A configured name, a folder or a hub id.")],
    folder: Annotated[Path, argument(metavar="DIR", help="The folder to create.")],
    quantize: Annotated[str | None, option("--quantize", metavar="VALUE", help="A format or a recipe.")] = None,
    config: EntryFile = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], option("--device", help="Device that quantizes; default auto.")] = "auto",
) -> None:
    """Write a model's quantized checkpoint into a folder.

    A vLLM with kernels for the format can serve the result without sparkd. Copies the quantized weights kept on this node if there are any;
    needs no daemon.
    """
    wanted = chosen(model, quantize, config, os.environ, session.client.settings)
    began: tuple[float, int] | None = None
    with show.progress(session.err) as line:

        def shown(event: Mapping[str, Any]) -> None:
            nonlocal began
            # Only from here on: the seconds of torch's import and of a calibration say nothing about the rest.
            if event["from"] == "calibration" or began is None:
                began = time.monotonic(), int(event["bytes_done"])
            if not session.json:
                line(f"{model}: {how_far(event, time.monotonic() - began[0], began[1])}", event["from"])

        ended = run(wanted, os.path.abspath(folder), device, shown)
    how = "copied from the cache" if ended["from"] == "cache" else "quantized"
    value = {"folder": os.path.abspath(folder), "bytes": ended["bytes"], "from": ended["from"]}
    session.answer(value, f"{folder}: {show.size(ended['bytes'])} of weights, {how}.")


def chosen(
    model: str, quantize: str | None, config_file: Path | None, environ: Mapping[str, str], ask: Callable[[str], Mapping[str, Any]]
) -> Chosen:
    """The model that `export` writes: a folder, a configured name, a hub id in the local cache, or a name that the daemon knows.

    quantize: a recipe as YAML, in place of the configured one.
    ask: see of_daemon.

    Raises ConfigError, CheckpointError.
    """
    from sparkd.checkpoint.model_folder import refuse_unusable
    from sparkd.checkpoint.source import folder_of
    from sparkd.cli.named_entry import configured, of_daemon, of_hub, value_of
    from workers.quantization.recipe import QuantizationRecipe

    named = configured(model, config_file, environ) or of_hub(model, config_file, environ) or of_daemon(model, config_file, environ, ask)
    spec, config = named.spec, named.config
    runtime = spec.runtime_of(config.engine)
    folder = folder_of(spec.model, spec.revision, {**environ, **spec.environment(config.engine)})
    if folder is None:
        raise CheckpointError(f"{spec.model} is not in this machine's hub cache", cure="Load it once, or give a folder")
    refuse_unusable(folder, vllm=True)
    recipe = spec.quantize if quantize is None else QuantizationRecipe.parse(value_of(quantize))
    if not isinstance(recipe, QuantizationRecipe) or not recipe.quantizes:
        raise ConfigError(f"{model} has no `quantize` key that changes its checkpoint: give --quantize, such as --quantize nvfp4.")
    return Chosen(folder, recipe, str(runtime) if runtime else "", str(config.quantized_path))


def run(wanted: Chosen, target: str, device: str, tell: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """The program's last event. Raises CheckpointError with what it says, SparkdError where it ends without a word.

    When this is interrupted the program is too, and is waited for, so that nothing is left.
    """
    request = {
        "source": wanted.folder,
        "quantize": wanted.recipe.canonical(),
        "target": target,
        "cache_dir": wanted.cache_dir,
        "device": device,
    }
    command = module_command(str(wanted.runtime or sys.executable), "workers.vllm.export")
    last: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as order, tempfile.TemporaryFile() as errors:
        json.dump(request, order)
        order.seek(0)
        try:
            program = subprocess.Popen(
                command,
                stdin=order,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=program_environment(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be started: {error.strerror}. Set engine.runtime to a Python that has torch.") from None
        with program:
            try:
                for raw in program.stdout or ():
                    last = json.loads(raw)
                    if last["event"] == "progress":
                        tell(last)
            except BaseException:
                _end(program)
                raise
        if last.get("event") == "error":
            raise CheckpointError(str(last["message"]))
        if last.get("event") != "done":
            raise SparkdError(_unsaid(command[0], program.returncode, errors))
        return last


def how_far(event: Mapping[str, Any], seconds: float, before: int) -> str:
    """`quantizing 37%, 12.3 GiB of 33.1 GiB, 0.21 GB/s, about 90 s left`.

    seconds: since `before` bytes were done.
    """
    if event["from"] == "calibration":
        return "measuring the inputs of its layers over a text"
    done, total = int(event["bytes_done"]), int(event["bytes_total"])
    words = f"{'copying' if event['from'] == 'cache' else 'quantizing'} {done / max(1, total):.0%}, {show.size(done)} of {show.size(total)}"
    if seconds < HONEST_AFTER_S or done <= before:
        return words
    rate = (done - before) / seconds
    return f"{words}, {rate / 1e9:.2f} GB/s, about {(total - done) / rate:.0f} s left"


def _end(program: subprocess.Popen[bytes]) -> None:
    """Interrupt the program, which removes its output first."""
    program.terminate()
    try:
        program.wait(REMOVE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        program.kill()
        program.wait()


def _unsaid(python: str, code: int, errors: IO[bytes]) -> str:
    """Why a program ended without a message, as well as its last line tells."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else f"it ended with code {code}"
    if "No module named" in last:
        return f"{python} has no torch ({show.printable(last)}): set engine.runtime to a Python that has it."
    return f"The export failed: {show.printable(last)[:300]}."
