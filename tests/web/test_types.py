"""What the page's types and its editor are made of agrees with what sparkd has."""

from __future__ import annotations

from deploy.vendor import PACKAGES
from tests.web.types import FOLDER


def test_the_types_are_those_of_the_vendored_releases() -> None:
    text = (FOLDER / "package.json").read_text()
    for package in PACKAGES:
        if package.name != "@preact/signals-core":
            assert f'"{package.name}": "{package.version}"' in text
