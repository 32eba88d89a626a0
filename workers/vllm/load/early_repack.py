"""Puts a module's weights into its kernel's layout as soon as all of them are placed, while the disk reads on. Never computes a layout.

vLLM calls every `quant_method.process_weights_after_loading` after the last byte was read. For experts that takes a second or more, in
which the disk is idle. The trace shows which tensors each module needs, so its own method is called once the last of them is placed; vLLM's
later call is skipped once. Where anything about a module is uncertain, vLLM repacks it.

On a GPU a separate thread runs the methods: they are hundreds of launches and some waits for the device, 60 ms for 128 experts, in which a
ring of 64 MiB fills twice. Both threads use one stream, so the device keeps the order of the calls.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkd.errors import CheckpointError
from workers.load.trace import Trace


@dataclass(slots=True)
class _Waiting:
    """A module, the number of its missing tensors, and the names of all its tensors."""

    module: torch.nn.Module
    name: str
    left: int = 0
    names: list[str] = field(default_factory=list)


class Early:
    """Repacks a module's weights as soon as all of them are in place. `placed` takes the names of tensors that have reached their
    parameters and calls the quantization methods of the modules that this completes.

    model: modules with a quantization method are repacked. trace: the target of every tensor; only read here, because a target keeps the
    memory that the kernel's layout replaces. unread: endings of names of tensors and parameters that no kernel reads. device: a GPU, on
    whose current stream a thread calls the methods; None calls them at once. `placed` and `wait` raise CheckpointError where a method
    refuses its module.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trace: Trace,
        is_ours: Callable[[Any], bool],
        unread: Sequence[str] = (),
        device: torch.device | None = None,
    ) -> None:
        self.done: list[torch.nn.Module] = []
        self._of: dict[str, _Waiting] = {}
        self._aside = None if device is None else _Aside(self._finish, device)
        if trace.late:
            return
        names_of = {id(module): name for name, module in model.named_modules()}
        owners = _owners(model, is_ours)
        waiting_of: dict[int, _Waiting] = {}
        filled: dict[int, int] = {}
        doubtful = False
        places: dict[int, tuple[int, int]] = {}  # of a place's `like`: its storage and its elements
        for name, taken in trace.taken.items():
            if taken.region is None or name.endswith(tuple(unread)):
                continue
            target = taken.target if taken.once else None
            target = trace.straight.get(name, target)
            if target is None:
                doubtful = True
                continue
            if (place := places.get(id(target.like))) is None:
                place = places[id(target.like)] = (target.like.untyped_storage().data_ptr(), target.like.numel())
            storage, numel = place
            module = owners.get(storage)
            if module is None:
                continue
            waiting = waiting_of.setdefault(id(module), _Waiting(module, names_of[id(module)]))
            waiting.left += 1
            waiting.names.append(name)
            self._of[name] = waiting
            filled[storage] = filled.get(storage, 0) + numel
        for waiting in waiting_of.values():
            if not _is_whole(waiting.module, filled, unread, all_of_them=doubtful):
                for name in waiting.names:
                    del self._of[name]

    def placed(self, names: Iterable[str]) -> None:
        """Note placed tensors, in the order of placing; other names are ignored."""
        for name in names:
            waiting = self._of.pop(name, None)
            if waiting is None:
                continue
            waiting.left -= 1
            if waiting.left:
                continue
            if self._aside is None:
                self._finish(waiting)
            else:
                self._aside.put(waiting)

    def wait(self) -> None:
        """Called after the last tensor: wait until all started methods have returned."""
        if self._aside is not None:
            self._aside.end()
            self._aside.refuse()

    def abandon(self) -> None:
        """Called after an error: drop the methods that have not begun."""
        if self._aside is not None:
            self._aside.end(abandon=True)

    def _finish(self, waiting: _Waiting) -> None:
        module = waiting.module
        before = dict(module.named_parameters(recurse=False))
        method: Any = module.quant_method
        try:
            method.process_weights_after_loading(module)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"vLLM cannot put it into its kernel's layout ({type(error).__name__}: {error})",
                tensor=waiting.name,
                cure="Give that layer another format, or add its name to `keep`",
            ) from error
        method.process_weights_after_loading = _SkipOnce(method, module)
        _let_go(before.values(), module)
        self.done.append(module)


class _Aside:
    """Runs queued work in a thread, which starts with the first item. error: the error that ended it; later items are dropped."""

    def __init__(self, do: Callable[[_Waiting], None], device: torch.device) -> None:
        self.error: BaseException | None = None
        self._do = do
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._abandoned = False

    def put(self, waiting: _Waiting) -> None:
        self.refuse()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stream-layout", daemon=True)
            self._thread.start()
        self._queue.put(waiting)

    def end(self, *, abandon: bool = False) -> None:
        """End the thread. A second call has no effect."""
        self._abandoned = abandon
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def refuse(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        # torch.cuda.stream(None) is no change; a thread's own current device and stream are the first device's and its default.
        with torch.cuda.stream(self._stream):
            while (waiting := self._queue.get()) is not None:
                if self._abandoned or self.error is not None:
                    continue
                try:
                    self._do(waiting)
                except BaseException as error:  # noqa: BLE001 - raised again where the next one is put, or the end awaited
                    self.error = error


class _SkipOnce:
    """Replaces a method's `process_weights_after_loading`: skips the finished module once, then restores the method."""

    def __init__(self, method: Any, module: torch.nn.Module) -> None:
        self._method = method
        self._module = module

    def __call__(self, layer: torch.nn.Module) -> None:
        if layer is self._module:
            del self._method.process_weights_after_loading
            return
        type(self._method).process_weights_after_loading(self._method, layer)


def _owners(model: torch.nn.Module, is_ours: Callable[[Any], bool]) -> dict[int, torch.nn.Module]:
    """The module of every parameter's storage, for modules whose method belongs to them alone."""
    methods: dict[int, int] = {}
    for module in model.modules():
        if (method := getattr(module, "quant_method", None)) is not None:
            methods[id(method)] = methods.get(id(method), 0) + 1
    owners: dict[int, torch.nn.Module] = {}
    shared: set[int] = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        ours = method is not None and is_ours(method) and methods[id(method)] == 1 and not _is_offloaded(module)
        for parameter in module.parameters(recurse=False):
            storage = parameter.untyped_storage().data_ptr()
            if storage in owners and owners[storage] is not module:
                shared.add(storage)
            if ours:
                owners[storage] = module
            else:
                shared.add(storage)
    return {storage: module for storage, module in owners.items() if storage not in shared}


def _is_offloaded(module: torch.nn.Module) -> bool:
    """Whether vLLM moves the module's weights to the device for its call, and back (device_loading_context); vLLM repacks those itself."""
    parameters = list(module.parameters(recurse=False))
    devices = {parameter.device for parameter in parameters}
    return len(devices) > 1 or any(hasattr(parameter, "_vllm_is_uva_offloaded") for parameter in parameters)


def _is_whole(module: torch.nn.Module, filled: dict[int, int], unread: Sequence[str], *, all_of_them: bool) -> bool:
    """Whether the expected tensors fill every parameter; without `all_of_them`, every parameter that is a known target."""
    for name, parameter in module.named_parameters(recurse=False):
        if name.endswith(tuple(unread)):
            continue
        placed = filled.get(parameter.untyped_storage().data_ptr())
        if placed is None and not all_of_them:
            continue
        if placed != parameter.numel():
            return False
    return True


def _let_go(before: Iterable[torch.nn.Parameter], module: torch.nn.Module) -> None:
    """Free the memory of parameters that the module no longer has: the model's weight loader holds them until the last tensor.

    If the kernel's layout is another view of that memory, the memory stays.
    """
    staying = {id(parameter) for parameter in module.parameters(recurse=False)}
    for parameter in before:
        if id(parameter) not in staying:
            parameter.data = parameter.data.new_empty(0)
