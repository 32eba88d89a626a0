"""The verbs that need no daemon: serve, ray-node, check, version. Each imports the daemon and Ray when it runs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sparkd import __version__
from sparkd.checkpoint.model_folder import refuse_unusable
from sparkd.checkpoint.source import CONFIG_PATH, name_of, source_of
from sparkd.cli.config_file import config_path
from sparkd.cli.options import StateDir, argument, key_values, option
from sparkd.cli.session import Session, verb
from sparkd.errors import ConfigError
from sparkd.render.page import say_json, verdict
from sparkd.units import whole

_SECRET = re.compile(r"keys\.(inference|admin)|engine\.env\..*(key|token|secret|passw)", re.IGNORECASE)

ConfigFile = Annotated[Path | None, option("--config", metavar="FILE", help=f"Path of sparkd.yaml; default {CONFIG_PATH} if it exists.")]
Settings = Annotated[list[str] | None, option("-o", metavar="KEY=VALUE", help="Set a key of sparkd.yaml: -o engine.platform=cpu.")]


def register_serve(app: typer.Typer) -> None:
    app.command("serve")(serve)


def register(app: typer.Typer) -> None:
    app.command("check")(verb(check, daemon=False))
    app.command("ray-node")(verb(ray_node, daemon=False))
    app.command("version")(verb(version, daemon=False))


def serve(
    config: ConfigFile = None,
    model: Annotated[str | None, option(metavar="MODEL", help="Also load and serve this folder, hub id or recipe.")] = None,
    name: Annotated[str | None, option(metavar="NAME", help="Name for --model; default: the last part of its path.")] = None,
    state_dir: StateDir = None,
    listen: Annotated[str | None, option(metavar="HOST:PORT", help="Address to listen on; default 127.0.0.1:4000.")] = None,
    port: Annotated[
        int | None, option(metavar="N", parser=whole("--port", 0, 65535), help="Port to listen on, at the configured host.")
    ] = None,
    log_level: Annotated[str | None, option(metavar="LEVEL", help="debug, info, warning or error.")] = None,
    ask: Annotated[str | None, option(metavar="QUESTION", help="Ask the model one question when it is ready.")] = None,
    leave_engines: Annotated[bool, option("--leave-engines", help="On SIGTERM, leave engines running for the next daemon.")] = False,
    settings: Settings = None,
) -> None:
    """Run the daemon in the foreground.

    Ctrl-C lets running requests finish (at most unload_timeout_s), then stops the engines and Ray. A second Ctrl-C stops them at once.
    Under systemd or with --leave-engines, SIGTERM leaves the engines to the next daemon.

    The log goes to stderr, or on a terminal to STATE_DIR/sparkd.log unless --log-level is given.
    """
    path = config_path(config, os.environ, alone=model is None and state_dir is None)
    flags = settings_of(settings or [])
    named = {"listen": listen, "state_dir": state_dir, "log_level": log_level}
    flags |= {key: value for key, value in named.items() if value is not None}
    if model is not None:
        if model.endswith((".yaml", ".yml")):
            from sparkd.recipes.file import refuse_as_model

            refuse_as_model(model)
        source = source_of(model)
        refuse_unusable(source, vllm=False)
        entry = name or name_of(source)
        keys: dict[str, Any] = {"recipe" if _is_recipe(source, path, flags) else "model": source, "preload": True}
        # An -o for the entry must find the entry there.
        flags = {"models": {entry: keys}, **flags}
    elif name is not None:
        raise ConfigError("--name needs --model: give both, or neither.")
    from sparkd.config.config import load_config

    loaded = load_config(path, flags=flags, environ=os.environ)
    if port is not None:
        host = f"[{loaded.host}]" if ":" in loaded.host else loaded.host
        if listen is not None and loaded.port != port:
            raise ConfigError(f"--listen says port {loaded.port} and --port says {port}: give one of them.")
        flags["listen"] = f"{host}:{port}"
        loaded = load_config(path, flags=flags, environ=os.environ)
    from sparkd.cli.folder_owner import refuse_another_users
    from sparkd.daemon import logs
    from sparkd.daemon.daemon import Options
    from sparkd.daemon.daemon import serve as serve_forever

    refuse_another_users(loaded.state_dir)

    # The progress line has the terminal to itself, unless --log-level asks for the log.
    quiet = log_level is None and sys.stdout.isatty() and sys.stderr.isatty()
    log_file = logs.set_up(loaded.log_level, loaded.state_dir if quiet else None)
    if log_file:
        from sparkd.render import models as show

        show.terminal().print(f"[dim]The log is in {log_file}[/]", soft_wrap=True)
    if path is None and not loaded.models:
        from sparkd.render import models as show

        missing = f"There is no configuration file ({CONFIG_PATH} or --config FILE), so no model is configured."
        show.say(show.terminal(), missing)
    serve_forever(loaded, Options(path, flags, ask, leave_engines, models=tuple(flags.get("models") or ())))


def _is_recipe(source: str, path: Path | None, flags: Mapping[str, Any]) -> bool:
    """Whether a word names a recipe: of the operator's folder, of those that come with sparkd, or of a registry."""
    if "/" in source and "@" not in source:
        return False
    from sparkd.config.config import load_config

    return load_config(path, flags=flags, environ=os.environ).book().has(source)


def ray_node(session: Session, config: ConfigFile = None, settings: Settings = None) -> None:
    """Run this node's part of Ray, for the systemd unit.

    Starts the head if cluster.address is null or names this node, otherwise joins the head there. SIGTERM ends Ray only: engines keep
    running.
    """
    path = config_path(config, os.environ, alone=True)
    from sparkd.config.config import load_config

    loaded = load_config(path, flags=settings_of(settings or []), environ=os.environ)
    from sparkd.cli.folder_owner import refuse_another_users
    from sparkd.cluster.ray_node import run_node
    from sparkd.daemon import logs

    refuse_another_users(loaded.state_dir)
    logs.set_up(loaded.log_level, None)
    run_node(loaded, os.environ)
    if session.json:
        say_json({"ended": True})


def check(session: Session, config: Annotated[Path, argument(metavar="CONFIG", help="Path of a sparkd.yaml.")]) -> None:
    """Check a configuration file.

    Prints `file:line: message` for each problem, and the tool and reasoning parsers of each model. Exits with 2 if the file is invalid or
    one of its entries cannot start.
    """
    from sparkd.cli.config_check import check as problems_of

    problems = problems_of(config, os.environ)
    wrong = [problem for problem in problems if problem.severity == "error"]
    parsers = _parsers(config) if not wrong else {}
    from sparkd.config.parser_choice import in_words

    lines = [str(problem) for problem in problems]
    lines += [f"models.{name}: parsers: {in_words(rows)}" for name, rows in parsers.items()]
    lines.append(f"{config}: {verdict(len(wrong), len(problems) - len(wrong))}")
    session.answer({"ok": not wrong, "problems": [problem.to_json() for problem in problems], "parsers": parsers}, "\n".join(lines))
    if wrong:
        raise typer.Exit(ConfigError.exit_code)


def _parsers(path: Path) -> dict[str, dict[str, dict[str, str | None]]]:
    from sparkd.config.config import load_config
    from sparkd.config.parser_choice import explained

    config = load_config(path, environ=os.environ)
    book = config.book()
    return {
        model.name: explained(model, model.environment(config.engine), book.settings(model.recipe))
        for model in config.models.values()
        if model.runs_vllm(config.engine)
    }


def version(session: Session) -> None:
    """Print the version of this program.

    `sparkd status` shows the daemon's version.
    """
    python = ".".join(map(str, sys.version_info[:3]))
    session.answer({"sparkd": __version__, "python": python}, f"sparkd {__version__} (Python {python})")


def settings_of(pairs: list[str]) -> dict[str, Any]:
    """`engine.platform=cpu` ... as flags of load_config.

    Raises ConfigError for what is no pair, and for secrets: every user of a machine can read every command line.
    """
    flags = key_values(pairs, "engine.platform=cpu")
    for key in flags:
        if _SECRET.fullmatch(key):
            raise ConfigError(f"-o {key}: every user can read command lines; put secrets into sparkd.yaml, a key file or the environment.")
    return flags
