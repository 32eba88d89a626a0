"""Where the hub's cache is: by every variable by which huggingface_hub itself moves it."""

from __future__ import annotations

import os
import runpy
import warnings

import pytest

from workers.host.hub_cache import PLACES, hub_cache


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "/x"},
        {"XDG_CACHE_HOME": "/x", "HF_HOME": "~/h"},
        {"HF_HOME": "$HOME/h"},
        {"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/legacy"},
        {"HUGGINGFACE_HUB_CACHE": "/legacy", "HF_HUB_CACHE": "~/$HOST/c"},
    ],
)
def test_the_cache_is_where_the_library_has_it(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLACES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", "HOST": "spark", **variables}.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = runpy.run_module("huggingface_hub.constants")

    assert str(hub_cache(os.environ)) == library["HF_HUB_CACHE"]
