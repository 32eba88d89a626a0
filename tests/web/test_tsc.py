"""The page's types, against those of the admin API's document; `make page` fetches the tools from npm."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.waiting import HUNG_S
from tests.web.types import FOLDER, TOOLS, write


@pytest.mark.skipif(not TOOLS.exists(), reason="what npm fetches is missing: run `make page`")
def test_the_page_agrees_with_the_admin_api() -> None:
    write()
    checked = subprocess.run([TOOLS / "tsc", "--project", FOLDER], capture_output=True, text=True, timeout=HUNG_S)
    assert (checked.returncode, checked.stdout) == (0, "")
