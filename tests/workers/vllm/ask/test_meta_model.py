"""What a refusal counts for, and what stands in for memory and for packages that are not there. Imports no vLLM."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import pytest
import torch

from workers.vllm.ask import cuda_stand_in
from workers.vllm.ask.cuda_stand_in import AbsentPackage
from workers.vllm.ask.meta_model import ModelNotBuilt, _meta


def refusal(raised: Callable[[], object], step: str = "model") -> dict[str, object]:
    try:
        raised()
    except Exception as error:  # noqa: BLE001 - whichever it is
        return ModelNotBuilt(step, error).refusal
    raise AssertionError("nothing was raised")


def split() -> None:
    raise AssertionError


def backend() -> None:
    raise ValueError("No valid attention backend found for cuda")


def heads() -> None:
    raise ValueError("num_expert_group must be provided")


class StrictDataclassError(Exception):
    """As huggingface_hub has it."""


class LayerTypes(StrictDataclassError):
    pass


def layer_types() -> None:
    raise LayerTypes("`layer_types` entries must be in ('full_attention')")


def tokens() -> None:
    raise ValueError("the tokenizer is missing the image padding token")


def draft() -> None:
    raise ValueError("Invalid repository ID or local directory specified: 'owner/draft'.")


@pytest.mark.parametrize(
    ("raised", "here", "standing_in"),
    [
        (heads, True, True),
        (split, True, True),
        (backend, True, False),
        (tokens, False, False),
        (draft, False, False),
        (layer_types, True, True),
    ],
)
def test_a_refusal_counts_unless_it_speaks_of_the_machine(
    raised: Callable[[], object], here: bool, standing_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(raised)["certain"] is here
    monkeypatch.setattr(cuda_stand_in, "stands", True)
    assert refusal(raised)["certain"] is standing_in


def test_a_bare_assertion_is_told_by_its_line() -> None:
    assert refusal(split) | {"message": ""} == {"step": "model", "type": "AssertionError", "message": "", "certain": True}
    assert "raise AssertionError (test_meta_model.py:" in str(refusal(split)["message"])


def valueless() -> object:
    return torch.empty(2, device="meta")[0].item()


@pytest.mark.parametrize("raised", [lambda: importlib.import_module("no_such_package"), lambda: {}["layers"], valueless])
def test_other_errors_tell_of_this_process(raised: Callable[[], object]) -> None:
    assert refusal(raised)["certain"] is False


def test_no_tensor_has_memory_but_a_small_one_that_may_be_read_back() -> None:
    with _meta(torch.bfloat16):
        weight = torch.nn.Parameter(torch.empty(1 << 20, 1 << 20, device="cuda"))
        rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        table = torch.outer(torch.arange(1 << 20, dtype=torch.float32), 1.0 / torch.arange(1, 65, dtype=torch.float32, device="cuda"))
        module = torch.nn.Linear(1 << 16, 1 << 16).cuda().to("cuda")
        mixed = torch.zeros(4).to(torch.float32) + weight[0, :4]
    assert weight.is_meta and weight.dtype == torch.bfloat16 and rates == [0.0, 0.5, 1.0]
    assert (table.is_meta, tuple(table.shape), mixed.is_meta, module.weight.is_meta) == (True, (1 << 20, 64), True, True)
    assert torch.get_default_dtype() == torch.float32


def test_an_absent_package_imports_and_decorates_and_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, AbsentPackage("absent_kernels")])
    module = importlib.import_module("absent_kernels.deep.deeper")
    monkeypatch.delitem(sys.modules, "absent_kernels")

    @module.jit(arch="sm_121")
    def kernel() -> int:
        return 1

    assert kernel.__name__ == "jit" and list({module.Mode.BICUBIC: 1}.values()) == [1]
    assert (64, 640) in module.DECODE_KERNELS
    with pytest.raises(TypeError):
        _ = module.constant() + 1
