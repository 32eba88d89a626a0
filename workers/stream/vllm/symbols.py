"""Looks up vLLM's symbols when they are needed; raises one clear error for a release that lacks one. Never falls back.

Importing this module imports no vLLM.
"""

from __future__ import annotations

import importlib
import sys
from operator import attrgetter
from typing import Any

from sparkd.errors import MissingSymbol

TRIED = ("0.26.0", "0.32.0")


def symbol(module: str, name: str) -> Any:
    """`name` of `module`, an attribute of an attribute with dots in between. Raises MissingSymbol."""
    try:
        return attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise MissingSymbol(lacking(f"it has no {module}.{name}")) from error


def lacking(what: str) -> str:
    """The sentence for a release that cannot be worked with; what: the symbol, or Python's own words for it."""
    release = getattr(sys.modules.get("vllm"), "__version__", "of an unknown release")
    return (
        f"The sparkd plugin does not work with this vLLM ({release}): {what}. It was tried with {' and '.join(TRIED)}; "
        "serve without `quantize`, or install one of those."
    )
