from __future__ import annotations

from types import SimpleNamespace

import pytest

from workers.kv.minimal import smaller_batches


@pytest.mark.parametrize(("scale", "tokens"), [(1.0, 8192), (0.5, 4096), (0.125, 1024), (0.01, 256)])
def test_a_smaller_batch_is_the_runners_and_that_of_warm_ups_that_ask_the_scheduler(scale, tokens):
    """flashinfer_autotune and deep_gemm_warmup run scheduler_config.max_num_batched_tokens (vllm/model_executor/warmup)."""
    runner = SimpleNamespace(max_num_tokens=8192, max_num_reqs=256, scheduler_config=SimpleNamespace(max_num_batched_tokens=8192))
    with pytest.raises(ZeroDivisionError), smaller_batches(runner, scale):
        assert (runner.max_num_tokens, runner.scheduler_config.max_num_batched_tokens) == (tokens, tokens)
        raise ZeroDivisionError
    assert (runner.max_num_tokens, runner.scheduler_config.max_num_batched_tokens) == (8192, 8192)
