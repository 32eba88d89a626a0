"""What the page's types and its editor are made of agrees with what sparkd has."""

from __future__ import annotations

import re

from deploy.vendor import PACKAGES
from sparkd.recipes.admin_policy import KEYS
from sparkd.web.files import STATIC
from tests.web.types import FOLDER


def test_the_types_are_those_of_the_vendored_releases() -> None:
    text = (FOLDER / "package.json").read_text()
    for package in PACKAGES:
        if package.name != "@preact/signals-core":
            assert f'"{package.name}": "{package.version}"' in text


def test_the_editor_of_an_entry_suggests_the_keys_that_an_added_model_may_have() -> None:
    text = (STATIC / "app/components/entry_keys.js").read_text()
    (block,) = re.findall(r"export const KEYS = \[(.*?)\];", text, re.DOTALL)
    assert set(re.findall(r'"(\w+)"', block)) == KEYS, "KEYS of entry_keys.js are those of TuningKeys"
