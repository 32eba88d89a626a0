"""Registers the load format `spark_stream` and the quantization method `spark` with vLLM, by its entry point for plugins.

vLLM calls `register` in every process (front end, engine core, workers, the model registry's own), sometimes more than once, so it is
idempotent and cheap.
A symbol that a release does not have is named in one sentence before anything is loaded.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from sparkd.errors import MissingSymbol
from workers.vllm import media, remote_code
from workers.vllm.ray import engine
from workers.vllm.symbols import has, lacking, symbol

LOAD_FORMAT = "spark_stream"
_registered = False

logger = logging.getLogger("vllm.sparkd")


def register() -> None:
    """The entry point in group `vllm.general_plugins`. Where this vLLM lacks a symbol, only a load in our format fails, and says which."""
    global _registered
    if _registered:
        return
    _registered = True
    engine.settle(os.environ)
    remote_code.enforce(os.environ)
    _hush_media()
    try:
        engine_args = symbol("EngineArgs")
        register_quantization, register_loader = symbol("register_quantization_config"), symbol("register_model_loader")

        from workers.vllm.load.config import NAME
        from workers.vllm.load.loader import SparkStreamLoader
        from workers.vllm.load.method import SparkConfig

        described = _describing(engine_args.create_model_config)
    except (ImportError, AttributeError) as error:
        _refuse(lacking(str(error)))
        return
    except MissingSymbol as error:
        _refuse(error.message)
        return
    register_quantization(NAME)(SparkConfig)
    register_loader(LOAD_FORMAT)(SparkStreamLoader)
    engine_args.create_model_config = described


def _hush_media() -> None:
    """Register our media connector, before any step that may fail."""
    try:
        media.register()
    except MissingSymbol as error:
        logger.warning("sparkd: this vLLM has no %s: the URL of a medium that cannot be fetched may be in this log.", error.symbol)


def _refuse(sentence: str) -> None:
    """Register a loader that refuses sparkd's load format with this sentence. Models with another load format are served as before."""
    logger.warning("sparkd: %s", sentence)
    if not (has("register_model_loader") and has("BaseModelLoader")):
        return  # then vLLM itself says that it does not know the format
    base: Any = symbol("BaseModelLoader")

    class Refusing(base):
        def __init__(self, load_config: Any) -> None:
            raise RuntimeError(sentence)

        def download_model(self, model_config: Any) -> None: ...

        def load_weights(self, model: Any, model_config: Any) -> None: ...

    symbol("register_model_loader")(LOAD_FORMAT)(Refusing)


def _describing(create_model_config: Any) -> Any:
    """create_model_config that first tells the model's configuration what the loader is going to hand over.

    vLLM decides on a quantization method before it has a loader, from config.json alone; `hf_overrides` is the public way to say
    another one, and this is the
    one place where the loader's settings and the overrides are both at hand.
    """

    @functools.wraps(create_model_config)
    def described(self: Any, *args: Any, **kwargs: Any) -> Any:
        if str(getattr(self, "load_format", "")) == LOAD_FORMAT:
            from workers.vllm.load.config import describe

            describe(self)
        return create_model_config(self, *args, **kwargs)

    return described
