"""Which configuration a verb goes by. Apart from those verbs: each imports more than a look at the configuration takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sparkd.checkpoint.source import CONFIG_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkd.config.config import Config


def config_path(path: Path | None, environ: Mapping[str, str], *, alone: bool = True, readable: bool = False) -> Path | None:
    """--config, else SPARKD_CONFIG, else the system's file where it is there.

    alone: whether the command line says nothing in place of the system's file.
    readable: take the system's file only where this user may read it. It has keys in it, so it may be sparkd's alone.
    """
    if path is not None or environ.get("SPARKD_CONFIG"):
        return path or Path(environ["SPARKD_CONFIG"])
    return CONFIG_PATH if alone and os.access(CONFIG_PATH, os.R_OK if readable else os.F_OK) else None


def config_of(path: Path | None, environ: Mapping[str, str]) -> Config:
    """The configuration of `config_path`, or the defaults. Raises ConfigError."""
    from sparkd.config.config import load_config

    return load_config(config_path(path, environ), environ=environ)
