"""The steps that both worker classes add to vLLM's methods, for a cache that has been sized."""

from __future__ import annotations

from typing import Any

from workers.kv.sizing import Sizing
from workers.vllm.kv.costs import requests_in
from workers.vllm.kv.prompt_logprobs import bound


class SizedWorker:
    """A mixin that precedes vLLM's worker class among the bases."""

    _sizing: Sizing
    vllm_config: Any
    model_runner: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        bound(self.model_runner)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        if self._sizing.is_sized and kv_cache_config.kv_cache_groups:
            length = self.vllm_config.model_config.max_model_len
            self._sizing.allocated(requests_in(self.vllm_config, kv_cache_config), length)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        load = self._sizing.under_load
        if load is None or not load.looks_at(scheduler_output.total_num_scheduled_tokens):
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        load.look()
        return output

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        self._sizing.ready()
        return times
