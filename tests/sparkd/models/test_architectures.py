"""What a plan says of an architecture that the installed vLLM has not got."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.models.architectures import remark
from tests.support.checkpoints import mixture, write
from tests.support.facts import lacking
from tests.support.published_tensors import tensors_of

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
        (REGISTRY, ["NobodysForCausalLM"], ["vLLM 0.99.0", "NobodysForCausalLM"]),
        (None, ["NobodysForCausalLM"], None),
        (REGISTRY, [], ["config.json", "no architecture"]),
    ],
)
def test_what_is_not_known_is_said(tmp_path: Path, registry: str | None, names: list[str] | None, told: list[str] | None) -> None:
    found = remark({"architectures": names}, runtime(tmp_path, registry))
    assert found is None if told is None else lacking(found, *told) == [], found


def test_a_plan_says_it_of_an_entry_and_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("SPARKD_CONFIG", "SPARKD_ADMIN_KEY"):
        monkeypatch.delenv(variable, raising=False)
    shape = mixture(architectures=["Nobodys\x1b[31mForCausalLM"])
    folder = write(tmp_path / "m", shape, tensors_of(shape))
    file = tmp_path / "sparkd.yaml"
    entry: dict[str, Any] = {"model": str(folder), "max_model_len": 2048}
    entries = {"m": entry | {"runtime": str(runtime(tmp_path / "other", REGISTRY))}, "stub": entry | {"entrypoint": "tests.stub"}}
    file.write_text(json.dumps({"models": entries}))
    for argv, note in (([str(folder)], "no model named Nobodys"), (["m", "--config", str(file)], "vLLM 0.99.0, ")):
        assert exit_code(["plan", "--quick", *argv]) == 0
        out = capsys.readouterr().out
        assert note in out and "\x1b" not in out
    # What another module starts is its own affair.
    assert exit_code(["plan", "--quick", "stub", "--config", str(file)]) == 0
    assert "no model named" not in capsys.readouterr().out
