"""A checkpoint on its way into vLLM's real model class through our loader, as an engine does it, without the engine. Needs `one_rank` of
conftest.py and a registered plugin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workers import plugin


def load(
    folder: Path,
    settings: dict[str, Any],
    change: Callable[[Any], Any] = lambda _model: None,
    *,
    load_format: str = plugin.LOAD_FORMAT,
    process: bool = False,
) -> Any:
    """settings: of the loader. change: is given vLLM's model before its weights are loaded. process: into the kernels' layout too."""
    # Imported here: a run that only collects these tests needs no vLLM.
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    arguments = EngineArgs(
        str(folder),
        load_format=load_format,
        model_loader_extra_config=settings,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        model = initialize_model(config)
        change(model)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
        if process:
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model
