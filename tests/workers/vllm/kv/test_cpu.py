"""Where a later stage of a pipeline takes what the one before it sends, on a backend that makes no dummy run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.late import Late

cpu = Late("workers.vllm.kv.cpu")


class Stage:
    """As much of vLLM's model of a stage as makes the tensors."""

    def make_empty_intermediate_tensors(self, **asked: Any) -> dict[str, Any]:
        return asked


def runner(model: object, found: object = None) -> Any:
    return SimpleNamespace(
        model=model, intermediate_tensors=found, max_num_tokens=64, model_config=SimpleNamespace(dtype=torch.bfloat16), device="cpu"
    )


@pytest.mark.parametrize(
    ("made", "stages", "expected"),
    [
        (runner(Stage()), 2, {"batch_size": 64, "dtype": torch.bfloat16, "device": "cpu"}),
        (runner(Stage()), 1, None),
        (runner(Stage(), {"hidden": 1}), 2, {"hidden": 1}),
        (runner(object()), 2, None),
    ],
    ids=["a pipeline", "no pipeline", "made already", "a model without stages"],
)
def test_a_stage_has_a_place_for_what_it_is_sent(made: Any, stages: int, expected: object) -> None:
    cpu.receive(made, stages)

    assert made.intermediate_tensors == expected
