"""What tests of readers have in common, and those that build vLLM's own layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Path -> bytes of files that a reader reads."""
    from tests.workers.load.shards import write_shards

    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """No thread or open file is left of what the test has opened."""
    from tests.workers.load.shards import nothing_left

    with nothing_left():
        yield


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one, which vLLM's layers want, inside a configuration.

    vLLM looks at each class of models once in a child that imports all of vLLM again, and keeps what it sees at home. Here it looks itself.
    """
    with pytest.MonkeyPatch.context() as patch:
        # Imported here: most tests beside this file need no vLLM.
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        patch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look(), raising=False)
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('world') / 'store'}", 0, "gloo")
            initialize_model_parallel(1, 1)
            yield
            # Not vLLM's cleanup_dist_env_and_memory, which looks through all objects, those too that tests/conftest.py has set aside.
            destroy_model_parallel()
            destroy_distributed_environment()
