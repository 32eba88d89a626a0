"""What a plan says of an architecture that sparkd or the installed vLLM does not know, and of which release its list is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.architectures import KNOWN, remark
from sparkd.installed import models_of, release_in
from sparkd.vllm_history import READ_OFF
from tests.sketches import mixture, tensors_of, write
from tests.test_fixture_configs import SHAPES, config

REGISTRY = """
_TEXT_GENERATION_MODELS = {
    # [Decoder-only]
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "BrandNewForCausalLM": (
        "brand_new",
        "BrandNewForCausalLM",
    ),
}
_PREVIOUSLY_SUPPORTED_MODELS = {
    "Qwen3MoeForCausalLM": "0.10.2",
}
"""


def runtime(folder: Path, registry: str | None) -> Path:
    """An environment with a vLLM of 0.99, as far as its registry."""
    packages = folder / "lib" / "python3.12" / "site-packages"
    (packages / "vllm-0.99.0.dist-info").mkdir(parents=True)
    if registry is not None:
        (packages / "vllm" / "model_executor" / "models").mkdir(parents=True)
        (packages / "vllm" / "model_executor" / "models" / "registry.py").write_text(registry)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to("/usr/bin/python3")
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    ("registry", "names", "told"),
    [
        (REGISTRY, ["LlamaForCausalLM"], None),
        # As vLLM does: another head on the same model, or any of several.
        (REGISTRY, ["LlamaForSequenceClassification"], None),
        (REGISTRY, ["NobodysForCausalLM", "LlamaForCausalLM"], None),
        (REGISTRY, ["Qwen3MoeForCausalLM"], "vLLM 0.99.0, which is installed, has no Qwen3MoeForCausalLM, and vLLM 0.32 has"),
        (REGISTRY, ["BrandNewForCausalLM"], "sparkd does not know BrandNewForCausalLM, which vLLM 0.99.0 has: what is counted"),
        (REGISTRY, ["NobodysForCausalLM"], "sparkd does not know NobodysForCausalLM, and vLLM 0.99.0, which is installed, has no model of"),
        (None, ["NobodysForCausalLM"], "sparkd does not know NobodysForCausalLM: what is counted"),
        (None, ["Qwen3MoeForCausalLM"], None),
        (REGISTRY, [], "Its config.json names no architecture"),
        (REGISTRY, None, "Its config.json names no architecture"),
    ],
)
def test_what_is_not_known_is_said(tmp_path: Path, registry: str | None, names: list[str] | None, told: str | None) -> None:
    found = remark({"architectures": names}, runtime(tmp_path, registry))
    assert found is None if told is None else found is not None and found.startswith(told), found


def test_the_list_is_that_of_the_release_it_was_read_off() -> None:
    """Of the vLLM beside the tests; another release has many of them."""
    found = models_of(None)
    assert found is not None and len(found & KNOWN) > 200
    assert release_in(None) != READ_OFF or found == KNOWN


@pytest.mark.parametrize("name", [name for name in SHAPES if config(name).get("architectures")])
def test_every_real_configuration_is_of_a_known_one(name: str) -> None:
    assert remark(config(name), Path("/nowhere/bin/python")) is None


def test_a_plan_says_it_of_an_entry_and_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("SPARKD_CONFIG", "SPARKD_ADMIN_KEY"):
        monkeypatch.delenv(variable, raising=False)
    shape = mixture(architectures=["Nobodys\x1b[31mForCausalLM"])
    folder = write(tmp_path / "m", shape, tensors_of(shape))
    file = tmp_path / "sparkd.yaml"
    entry: dict[str, Any] = {"model": str(folder), "max_model_len": 2048}
    entries = {"m": entry | {"runtime": str(runtime(tmp_path / "other", REGISTRY))}, "stub": entry | {"entrypoint": "workers.stub"}}
    file.write_text(json.dumps({"models": entries}))
    for argv, told in (([str(folder)], "sparkd does not know Nobodys"), (["m", "--config", str(file)], "and vLLM 0.99.0, which is")):
        assert exit_code(["plan", *argv]) == 0
        out = capsys.readouterr().out
        assert told in out and "\x1b" not in out
    # What another module starts is its own affair.
    assert exit_code(["plan", "stub", "--config", str(file)]) == 0
    assert "sparkd does not know" not in capsys.readouterr().out
