from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import pytest
import torch

from sparkd.errors import CheckpointError
from tests.support.waiting import HUNG_S, until
from workers.load.trace import Trace, phantoms
from workers.vllm.load.early_repack import Early

CPU = torch.device("cpu")
ROWS, COLS = 6, 8


class Method:
    """A quantization method that gives its module another layout in new memory, as vLLM's do."""

    def __init__(self) -> None:
        self.calls = 0

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.calls += 1
        layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
        layer.scale = torch.nn.Parameter(layer.scale.data, requires_grad=False)


class Linear(torch.nn.Module):
    def __init__(self, method: Method | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2 * ROWS, COLS), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.shape_note = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.quant_method = method


class Model(torch.nn.Module):
    """Two fused matrices and a norm, which its loader does sums with."""

    def __init__(self, *, shared_method: bool = False, sums: bool = False, forgets: str = "") -> None:
        super().__init__()
        first = Method()
        self.layers = torch.nn.ModuleList([Linear(first), Linear(first if shared_method else Method())])
        self.norm = torch.nn.Parameter(torch.zeros(COLS), requires_grad=False)
        self.sums = sums
        self.forgets = forgets

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())  # held until the end, as vLLM's models do
        for name, tensor in tensors:
            if name == "norm":
                parameters["norm"].data.copy_(tensor + 1 if self.sums else tensor)
            elif name == self.forgets:
                continue
            else:
                layer, half, what = name.split(".")
                whole = parameters[f"layers.{layer}.{what}"].data
                size = len(whole) // 2
                whole[int(half) * size : (int(half) + 1) * size].copy_(tensor)


def tensors() -> dict[str, torch.Tensor]:
    made = {"norm": torch.rand(COLS)}
    for layer in range(2):
        for half in range(2):
            made[f"{layer}.{half}.weight"] = torch.rand(ROWS, COLS)
            made[f"{layer}.{half}.scale"] = torch.rand(1)
            made[f"{layer}.{half}.shape_note"] = torch.rand(2)
    return made


def early(model: Model, device: torch.device | None = None) -> tuple[Early, Trace]:
    trace = Trace()
    model.load_weights(phantoms(((name, tuple(t.shape), t.dtype) for name, t in tensors().items()), CPU, trace))
    return Early(model, trace, lambda method: isinstance(method, Method), ("shape_note",), device), trace


def load(model: Model, watch: Early, values: dict[str, torch.Tensor]) -> list[tuple[str, int]]:
    """(name, modules done after it) in the order of placing."""
    seen: list[tuple[str, int]] = []

    def stream():
        for name, value in values.items():
            yield name, value
            watch.placed([name])
            seen.append((name, len(watch.done)))

    model.load_weights(stream())
    return seen


def test_a_module_is_done_when_the_last_of_it_is_placed_and_only_once():
    model, values = Model(), tensors()
    watch, trace = early(model)
    seen = dict(load(model, watch, values))
    assert (seen["0.1.weight"], seen["0.1.scale"], seen["1.1.weight"], seen["1.1.scale"]) == (0, 1, 1, 2)
    for number, layer in enumerate(model.layers):
        assert torch.equal(layer.weight.t(), torch.cat([values[f"{number}.{half}.weight"] for half in range(2)]))
        assert layer.quant_method.calls == 1
        layer.quant_method.process_weights_after_loading(layer)  # vLLM's own call, after the load
        assert layer.quant_method.calls == 1
        layer.quant_method.process_weights_after_loading(layer)  # and one after a reload
        assert layer.quant_method.calls == 2
    assert not trace.late


def test_memory_that_the_new_layout_replaces_is_let_go_while_the_loader_still_holds_it():
    model, values = Model(), tensors()
    watch, _ = early(model)
    before = dict(model.layers[0].named_parameters())
    load(model, watch, values)
    assert before["weight"].numel() == 0
    assert before["scale"].numel() == 0
    assert torch.equal(model.layers[0].scale, torch.cat([values["0.0.scale"], values["0.1.scale"]]))
    assert before["shape_note"].numel() == 4


@pytest.mark.parametrize("harm", ["a shared method", "a part that never comes", "sums", "weights elsewhere", "collects first"])
def test_what_is_doubtful_is_left_to_vllm(harm):
    model = Model(shared_method=harm == "a shared method", sums=harm == "sums", forgets="0.1.weight" if "never" in harm else "")
    if harm == "sums":  # so a whole parameter may come some other way
        model.layers[0].more = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    if harm == "weights elsewhere":
        model.layers[0].weight._vllm_is_uva_offloaded = True
    if harm == "collects first":
        real = model.load_weights
        model.load_weights = lambda tensors: real(list(tensors))
    done = [] if harm in ("a shared method", "collects first") else [model.layers[1]]
    watch, trace = early(model)
    assert trace.late is (harm == "collects first")
    load(model, watch, tensors())
    assert watch.done == done


def test_a_kernel_that_refuses_its_module_names_it():
    model = Model()

    class Refuses(Method):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            raise AssertionError("hidden_size = 96 unsupported by Marlin tiles")

    model.layers[1].quant_method = Refuses()
    watch, _ = early(model)
    with pytest.raises(CheckpointError, match=r"layers\.1.*\(AssertionError: hidden_size = 96 unsupported by Marlin tiles\)"):
        load(model, watch, tensors())


def test_layouts_in_a_thread_of_their_own_are_the_same_and_awaited():
    model, values = Model(), tensors()
    threads: set[str] = set()

    class Told(Method):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            threads.add(threading.current_thread().name)
            super().process_weights_after_loading(layer)

    for layer in model.layers:
        layer.quant_method = Told()
    watch, _ = early(model, CPU)
    load(model, watch, values)
    watch.wait()
    assert (watch.done, threads) == (list(model.layers), {"stream-layout"})
    for number, layer in enumerate(model.layers):
        assert torch.equal(layer.weight.t(), torch.cat([values[f"{number}.{half}.weight"] for half in range(2)]))
    watch.wait()  # twice is once


def test_a_refusal_in_that_thread_is_raised_by_who_waits_and_nothing_begins_after_it():
    model, began, go = Model(), threading.Event(), threading.Event()

    class Refuses(Method):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            began.set()
            assert go.wait(HUNG_S)
            raise AssertionError("unsupported by Marlin tiles")

    model.layers[0].quant_method = Refuses()
    watch, _ = early(model, CPU)
    load(model, watch, tensors())
    assert began.wait(HUNG_S)
    go.set()
    with pytest.raises(CheckpointError, match=r"layers\.0.*unsupported by Marlin tiles"):
        watch.wait()
    assert watch.done == []
    watch.abandon()


def test_an_abandoned_load_leaves_what_has_not_begun():
    model, began, go = Model(), threading.Event(), threading.Event()

    class Slow(Method):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            began.set()
            assert go.wait(HUNG_S)
            super().process_weights_after_loading(layer)

    model.layers[0].quant_method = Slow()
    watch, _ = early(model, CPU)
    load(model, watch, tensors())
    assert began.wait(HUNG_S)
    abandoning = threading.Thread(target=watch.abandon)
    abandoning.start()
    until(lambda: watch._aside is not None and watch._aside._abandoned, "the load was abandoned while a layout is made")
    go.set()
    abandoning.join()
    assert watch.done == [model.layers[0]]
    assert model.layers[1].quant_method.calls == 0


def test_no_place_is_held_after_it_was_looked_at():
    model = Model()
    watch, trace = early(model)
    trace.forget_targets()
    before = weakref.ref(model.layers[0].weight.untyped_storage())
    load(model, watch, tensors())
    assert before() is None
    assert len(watch.done) == 2
