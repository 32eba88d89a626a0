"""Owns the part of sparkd that vLLM finds: one entry point that registers the load format `spark_stream` and the quantization method
`spark`. Never touches a device.

vLLM calls `register` in every process (front end, engine core, workers, the model registry's own), sometimes more than once, so it is
idempotent and cheap.
Tried with vLLM 0.26.0 (CUDA) and 0.32.0 (CPU); a symbol that a release does not have is named in one sentence before anything is loaded.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from sparkd.errors import MissingSymbol
from workers.engine import media, remote_code
from workers.host.media_rules import CONNECTOR, CONNECTOR_VARIABLE
from workers.ray_executor import engine
from workers.stream.vllm.symbols import lacking

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
    _guard_media()
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.layers.quantization import register_quantization_config
        from vllm.model_executor.model_loader import register_model_loader

        from workers.stream.vllm.loader import SparkStreamLoader
        from workers.stream.vllm.method import NAME, SparkConfig
        from workers.stream.vllm.warmup import make_ready_if_told

        described = _describing(EngineArgs.create_model_config)
    except (ImportError, AttributeError) as error:
        _refuse(lacking(str(error)))
        return
    except MissingSymbol as error:
        _refuse(error.message)
        return
    register_quantization_config(NAME)(SparkConfig)
    register_model_loader(LOAD_FORMAT)(SparkStreamLoader)
    EngineArgs.create_model_config = described
    make_ready_if_told(os.environ)


def _guard_media() -> None:
    """Register our media connector, before any step that may fail. An engine whose flags name a missing connector takes no media at all."""
    try:
        media.register(os.environ)
        return
    except (ImportError, AttributeError) as error:
        logger.warning("sparkd: this vLLM has no registry of media connectors (%s): its own connector fetches.", error)
    if os.environ.get(CONNECTOR_VARIABLE) == CONNECTOR:
        del os.environ[CONNECTOR_VARIABLE]  # else every medium fails, a data: URL too
    try:
        media.close(os.environ)
    except (ImportError, AttributeError) as error:
        logger.warning("sparkd: this vLLM has no allowed_media_domains (%s): any URL in a request is fetched.", error)


def _refuse(sentence: str) -> None:
    """Register a loader that refuses sparkd's load format with this sentence. Models with another load format are served as before."""
    logger.warning("sparkd: %s", sentence)
    try:
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    except ImportError:
        return  # then vLLM itself says that it does not know the format

    class Refusing(BaseModelLoader):
        def __init__(self, load_config: Any) -> None:
            raise RuntimeError(sentence)

        def download_model(self, model_config: Any) -> None: ...

        def load_weights(self, model: Any, model_config: Any) -> None: ...

    register_model_loader(LOAD_FORMAT)(Refusing)


def _describing(create_model_config: Any) -> Any:
    """create_model_config that first tells the model's configuration what the loader is going to hand over.

    vLLM decides on a quantization method before it has a loader, from config.json alone; `hf_overrides` is the public way to say
    another one, and this is the
    one place where the loader's settings and the overrides are both at hand.
    """

    @functools.wraps(create_model_config)
    def described(self: Any, *args: Any, **kwargs: Any) -> Any:
        if str(getattr(self, "load_format", "")) == LOAD_FORMAT:
            from workers.stream.vllm.loader import describe

            describe(self, os.environ)
        return create_model_config(self, *args, **kwargs)

    return described
