"""What tests that build vLLM's own layers have in common."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one, which vLLM's layers want, inside a configuration.

    vLLM looks at each class of models once in a child that imports all of vLLM again, and keeps what it sees at home. Here it looks itself.
    """
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        # vLLM's own warnings are not ours. Imported here: most tests beside this file need no vLLM.
        warnings.simplefilter("ignore")
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

        patch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look(), raising=False)
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('world') / 'store'}", 0, "gloo")
            initialize_model_parallel(1, 1)
            yield
            cleanup_dist_env_and_memory()
