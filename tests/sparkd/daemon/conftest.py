"""The daemon that the tests of this folder share; tests/conftest.py names their files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stage import Stage


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("stage"))
    made.start()
    try:
        made.settled()
        made.ray_connected()
        yield made
    finally:
        made.gone()
