"""A module that a test uses and no collection imports: vLLM takes seconds of CPU in every worker of pytest-xdist."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """The module is imported when something of it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # pytest looks at what a module of tests holds
        return getattr(importlib.import_module(self._name), name)
