"""Takes the place of tests/conftest.py of vLLM's sdist.

Nothing is downloaded, so that a test of an adapter fails alone and not its whole file.
"""

from __future__ import annotations

import tempfile

import pytest
from huggingface_hub import HfApi

_EMPTY = tempfile.mkdtemp(prefix="no-adapter-")


class LocalAssetServer:
    """A name that tests of images import for their annotations."""


@pytest.fixture(scope="session")
def local_asset_server() -> None:
    pytest.fail("the served model takes no images")


HfApi.snapshot_download = lambda *_args, **_options: _EMPTY  # type: ignore[method-assign]
