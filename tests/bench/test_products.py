"""The table of products: a kind that fails keeps its row, and the functions of two releases of vLLM get the arguments that they take."""

from __future__ import annotations

import pytest
import torch

from tests.bench import products
from workers.quantization.formats import Format


def test_a_kind_that_fails_prints_the_first_line_of_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> tuple[list[float], float]:
        raise AttributeError("no such kernel\nmore of it")

    products.row("4 x 4", "fp8, CUTLASS", fail)
    products.row("4 x 4", "bf16, cuBLAS", lambda: ([1.0] * len(products.TOKENS), 0.002))

    failed, measured = capsys.readouterr().out.splitlines()
    assert "AttributeError: no such kernel |" in failed and failed.count("|") == measured.count("|") == len(products.TOKENS) + 4


def test_a_function_gets_the_arguments_that_it_takes() -> None:
    with_order = products._call(lambda weight, perm: weight + perm, weight=torch.ones(1), perm=torch.ones(1))
    without = products._call(lambda weight: weight, weight=torch.ones(1), perm=torch.ones(1))

    assert (with_order.item(), without.item()) == (2, 1)


@pytest.mark.parametrize("spelling", products.LINEAR)
def test_every_kind_is_a_format(spelling: str) -> None:
    assert Format.parse(spelling).spelling == spelling
