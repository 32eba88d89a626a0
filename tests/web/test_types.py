"""The page's types, against those of the admin API's document; `make page` fetches the tools from npm."""

from __future__ import annotations

import re
import subprocess

import pytest

from deploy.vendor import PACKAGES
from sparkd.recipes.admin_policy import KEYS
from sparkd.web.files import STATIC
from tests.web.types import FOLDER, TOOLS, write

needs_tools = pytest.mark.skipif(not (TOOLS / "tsc").exists(), reason="`make page` fetches TypeScript where npm is installed")


@needs_tools
def test_the_page_agrees_with_the_admin_api() -> None:
    write()
    checked = subprocess.run([TOOLS / "tsc", "--project", FOLDER], capture_output=True, text=True, timeout=300)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_the_types_are_those_of_the_vendored_releases() -> None:
    text = (FOLDER / "package.json").read_text()
    for package in PACKAGES:
        if package.name != "@preact/signals-core":
            assert f'"{package.name}": "{package.version}"' in text


def test_the_editor_of_an_entry_suggests_the_keys_that_an_added_model_may_have() -> None:
    text = (STATIC / "app/components/entry_keys.js").read_text()
    (block,) = re.findall(r"export const KEYS = \[(.*?)\];", text, re.DOTALL)
    assert set(re.findall(r'"(\w+)"', block)) == KEYS
