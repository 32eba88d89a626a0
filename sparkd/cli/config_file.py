"""Which configuration a verb without a daemon goes by. Apart from those verbs: each imports more than a look at the configuration takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparkd.checkpoint.source import CONFIG_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkd.config.config import Config


def config_of(path: Path | None, environ: Mapping[str, str]) -> Config:
    """--config, else SPARKD_CONFIG, else the system's file where it is there, else the defaults. Raises ConfigError."""
    from sparkd.config.config import load_config

    named = Path(environ["SPARKD_CONFIG"]) if environ.get("SPARKD_CONFIG") else None
    return load_config(path or named or (CONFIG_PATH if CONFIG_PATH.exists() else None), environ=environ)
