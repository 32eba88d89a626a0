"""The stub's page of metrics has vLLM's families, types and labels, so that what is drawn from it can be drawn from a real engine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.embedded_model import FOLDER_NAME, prepare
from tests.stub.metrics import page
from tests.support.boards import unanswered
from tests.support.observability import ROOT
from tests.support.waiting import HUNG_S


def families_of(text: str) -> dict[str, tuple[str, frozenset[tuple[str, frozenset[str]]]]]:
    """By family: its type, and each sample's name with the names of its labels."""
    return {
        family.name: (family.type, frozenset((sample.name, frozenset(sample.labels)) for sample in family.samples))
        for family in text_string_to_metric_families(text)
        if family.name.startswith("vllm:") and not family.name.endswith("_created")
    }


def labels_of(samples: frozenset[tuple[str, frozenset[str]]]) -> set[str]:
    return {label for _, labels in samples for label in labels}


@pytest.fixture(scope="module")
def vllms(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the installed vLLM."""
    folder = ROOT / ".sparkd" / "models" / FOLDER_NAME
    if not folder.is_dir():
        folder = tmp_path_factory.mktemp("model") / FOLDER_NAME
        prepare(folder)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.vllm_metrics", str(folder)],
        env=os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.rest
def test_the_installed_vllm_has_every_family_of_the_stub_with_its_labels(vllms: str) -> None:
    real, stub = families_of(vllms), families_of(page("m", {}).decode())

    assert len(stub) > 40
    config, samples = stub.pop("vllm:cache_config_info")
    assert config == real["vllm:cache_config_info"][0]
    assert labels_of(samples) <= labels_of(real["vllm:cache_config_info"][1])
    assert stub == {name: real.get(name) for name in stub}


@pytest.mark.rest
def test_no_panel_and_no_rule_asks_for_what_the_installed_vllm_has_not(vllms: str) -> None:
    assert unanswered(vllms) == {}


def test_what_the_stub_counts_stands_in_its_page() -> None:
    text = page("m", {"vllm:generation_tokens_total": 7, "stub:aborts_total": 2}).decode()

    values = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    assert (values["vllm:generation_tokens_total"], values["vllm:prompt_tokens_total"], values["stub:aborts_total"]) == (7, 0, 2)
