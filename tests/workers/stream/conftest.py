"""What tests that build vLLM's own layers have in common."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one, which vLLM's layers want, inside a configuration."""
    with warnings.catch_warnings():
        # vLLM's own warnings are not ours. Imported here: most tests beside this file need no vLLM.
        warnings.simplefilter("ignore")
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('world') / 'store'}", 0, "gloo")
            initialize_model_parallel(1, 1)
            yield
            cleanup_dist_env_and_memory()
