"""The command line: its verbs, their exit codes, and one sentence, or one JSON object, for whatever goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from sparkd.errors import ConfigError, SparkdError, error_body
from sparkd.execution.container_init import run_below_init
from sparkd.unexpected import lack_of_machine, place_of, unexpected
from workers.host.interpreter import PACKAGE_DIR

if TYPE_CHECKING:
    import typer

INTERRUPTED = 130
EXIT_CODES = """Exit codes

\b
  0  done
  1  any other error
  2  the command line or the configuration is wrong
  3  the state directory cannot be used
  4  Ray or a node failed, or a model does not fit
  5  the daemon refused the request: an unknown model, a conflict
  6  the admin key is missing or wrong
  7  no daemon answers, or it is not ready yet: try again later
  8  the model failed
130  interrupted

The daemon's address comes from --url, then SPARKD_URL, then http://127.0.0.1:4000. The admin key comes from --key-file, then
SPARKD_ADMIN_KEY. No option takes the key itself, because every user of a machine can read every command line.

TAB completes verbs and options. `make -C deploy install` sets that up for bash, zsh and fish; --install-completion does it for you alone.

Errors go to stderr. With --json an error is one JSON object on the last line: the admin API's error with an added exit_code.
"""


def main(argv: list[str] | None = None) -> None:
    """Run one command line and exit with its code."""
    # PYTHONPATH puts another program's modules (ROS, a checkout) before those that sparkd was installed with.
    foreign = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    sys.path[:] = [path for path in sys.path if path not in foreign or path == PACKAGE_DIR]
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a question mark rather than an error.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["serve"], ["ray-node"], ["join"]):
        run_below_init()
    else:
        for number in (signal.SIGTERM, signal.SIGHUP):
            # As Ctrl-C does: what a verb has begun, a child and its files, ends with it.
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _end)
    # pydantic would look through every installed package for plugins, and sparkd wants none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    code = exit_code(argv)
    if "ray" in sys.modules:
        # Threads of Ray's core outlive its shutdown, and once in some hundred ends they crash the interpreter's own (SIGSEGV, Ray 2.60).
        # Everything of ours is closed here.
        import logging

        logging.shutdown()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def exit_code(argv: list[str]) -> int:
    """The exit code of one command line. An error is one sentence on stderr, with --json one object on a line."""
    # Not what was parsed: a command line that is wrong was not.
    as_json = "--json" in argv[: argv.index("--") if "--" in argv else None]
    try:
        return _any_verb(argv)
    except SparkdError as error:
        return _fail(error, as_json=as_json)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has had enough, as `head` has; Python must not complain when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # The last resort: a bug becomes one sentence that is enough to report it; the daemon's log has all of it.
        fault = _known(error)
        if fault is not None:
            return _fail(fault, as_json=as_json)
        import logging

        if logging.getLogger().handlers:
            logging.getLogger("sparkd").critical("sparkd has a bug", exc_info=error)
        bug = SparkdError(f"sparkd has a bug: {type(error).__name__} at {place_of(error)}. Please report it.")
        return _fail(bug, as_json=as_json)


def command_line() -> typer.Typer:
    """All verbs, in the order in which the help has them."""
    from sparkd.cli import bench, doctor, export, fabric, incidents, join, models, plan, pull, recipes, reload, requests, run, serve
    from sparkd.cli.options import group, options

    summary = "Turn one or more DGX Sparks into one dependable OpenAI-compatible endpoint."
    app = group("sparkd", help=summary, epilog=EXIT_CODES, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(options)
    serve.register_serve(app)
    for module in (run, models, requests, plan, fabric, reload, doctor, incidents, join, pull, bench, export, recipes, serve):
        module.register(app)
    return app


def _any_verb(argv: list[str]) -> int:
    app = command_line()
    import typer

    # typer's public BadParameter leads to the root of all usage errors, which typer or, in older releases, click keeps elsewhere.
    usage_error: type[Exception] = typer.BadParameter.__mro__[2]
    try:
        return app(argv, prog_name="sparkd", standalone_mode=False) or 0
    except usage_error as error:
        raise ConfigError(_usage(error)) from None
    except typer.Abort:
        return INTERRUPTED


def _fail(error: SparkdError, *, as_json: bool) -> int:
    """Write one sentence, or one problem a line, to stderr; folded between words where a terminal would cut them.

    as_json: write the body that the admin API would have, with the exit code, which a body has not.
    """
    from sparkd.render.page import json_text, printable

    sys.stdout.flush()
    lines = printable(f"error: {error.message}").splitlines()
    if as_json:
        lines = [json_text(error_body(error) | {"exit_code": error.exit_code})]
    elif sys.stderr.isatty():
        import shutil
        import textwrap

        width = shutil.get_terminal_size().columns
        lines = [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in lines]
    sys.stderr.write("\n".join(lines) + "\n")
    return error.exit_code


def _usage(error: Exception) -> str:
    """typer's complaint in one line, and where to read on."""
    context = getattr(error, "ctx", None)
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    end = "" if message.rstrip().endswith("?") else "."
    return f"{' '.join(message.split()).rstrip('.').replace('?.', '?')}{end} See `{context.command_path if context else 'sparkd'} -h`."


def _known(error: BaseException) -> SparkdError | None:
    """The error to tell where this one, or one in a group of a TaskGroup, is no bug of sparkd's; None for any other."""
    if isinstance(error, SparkdError):
        return error
    if isinstance(error, ImportError):
        problem = f"A module that sparkd needs is not there, or another program's: {error}"
        cure = "Run it without PYTHONPATH and usercustomize, or `pip install . -c deploy/constraints.txt` in sparkd's checkout"
        return SparkdError(f"{problem}. {cure}.")
    if lack_of_machine(error) is not None:
        return unexpected(error)
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return next((fault for fault in map(_known, inner) if fault is not None), None)


if __name__ == "__main__":
    main()
