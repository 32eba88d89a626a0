"""Holds a process of an engine to the commits whose code it may run, on the ways too on which transformers takes the head of a branch.

vLLM 0.32 loads tokenizers and processors from the folder of a snapshot, without --code-revision: code that a file there names by its
repository (`owner/name--module.Class`) then comes from the head of that repository's branch, the model's own included.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Mapping
from typing import Any

from workers.host.trusted_code import VARIABLE, Commits


def enforce(environ: Mapping[str, str]) -> None:
    """Before the process reads a model: all code of repositories comes from the trusted commits. Nothing is changed where the engine
    trusts no code. Raises ImportError and AttributeError where transformers has no such place: then nothing may run."""
    if not environ.get(VARIABLE):
        return
    from transformers import dynamic_module_utils

    trusted = Commits(**json.loads(environ[VARIABLE]))
    load = dynamic_module_utils.get_cached_module_file
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_trusted(*args: Any, **kwargs: Any) -> str:
        call = signature.bind(*args, **kwargs)
        repository = str(call.arguments["pretrained_model_name_or_path"])
        if not os.path.isdir(repository):
            revision = call.arguments.get("revision")
            commit = trusted.of(repository, revision)
            # An equal one may be more than a string, and know that it is a commit.
            call.arguments["revision"] = revision if revision == commit else commit
        return str(load(*call.args, **call.kwargs))

    dynamic_module_utils.get_cached_module_file = load_trusted
