"""A CUDA platform where there is none, so that vLLM's classes make of a model what they would on a GPU. Never runs a kernel.

Only for a process that builds models on the meta device, and before it imports anything of vLLM: what a class looks up at import (compiled
modules, operators, properties of the device) is there and empty, and fails where it is called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

# Compiled modules of a CUDA build; each release imports some of them.
_COMPILED = (
    "vllm._C",
    "vllm._moe_C",
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
# Those of vllm._custom_ops that are asked at construction which kernels there are. csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu and
# nvfp4_scaled_mm_entry.cu answer yes to all of them for 12.x.
_SUPPORTED = (
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
    "mxfp4_experts_quant_supported",
)
_PROPERTIES: dict[str, Any] = {  # of a GB10, as torch.cuda.get_device_properties has them
    "name": "NVIDIA GB10",
    "multi_processor_count": 48,
    "total_memory": 128 * 10**9,
    "is_integrated": 1,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 101376,
    "shared_memory_per_multiprocessor": 102400,
    "max_threads_per_multi_processor": 1536,
    "regs_per_multiprocessor": 65536,
    "warp_size": 32,
    "L2_cache_size": 24 * 2**20,
    "gcnArchName": "",
}


stands = False
"""Whether vLLM's platform is a stand-in."""


class Absence(RuntimeError):
    """Something was called that is not in this process."""


class Absent(types.ModuleType):
    """A module whose names are there and inert: one that is called, as a decorator or a constructor, is another such name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {"__module__": self.__name__})


class _Name(type):
    """Stands for any name of an absent module. It is neither a number nor a tensor, so a class that needs one fails."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {"__module__": f"{cls.__module__}.{cls.__name__}"})

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return _Name(cls.__name__, (), {"__module__": cls.__module__})

    def __contains__(cls, _: object) -> bool:
        return True  # a class asks a table of kernels for the one that it needs


class AbsentPackage(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds each module of one package, as an absent one."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._package and not fullname.startswith(f"{self._package}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def stand_in(capability: tuple[int, int]) -> bool:
    """vLLM's current platform is CUDA with that capability from here on; False where this runtime has CUDA and a GPU, which answers itself.

    Raises ImportError, AttributeError or RuntimeError where this release is made otherwise.
    """
    global stands
    import torch

    if torch.cuda.is_available():
        return False
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # then vLLM keeps Triton without a driver
    os.environ.pop("VLLM_TARGET_DEVICE", None)
    _pretend_cuda(capability)
    import vllm
    import vllm.platforms as platforms

    root = Path(vllm.__file__).parent.parent
    for name in _COMPILED:
        path = root.joinpath(*name.split("."))
        if not any(path.parent.glob(f"{path.name}.*so")):
            sys.modules[name] = _absent_module(name)
    platforms.vllm_version_matches_substr = lambda substr: False
    platforms._current_platform = _platform(capability)()
    _packages()
    _operators()
    stands = True
    return True


def _packages() -> None:
    """Stand in for the packages of a CUDA build that a class looks up by name before its construction."""
    from vllm.utils import import_utils

    import_utils.has_deep_gemm = lambda: True
    sys.meta_path += map(AbsentPackage, ("vllm.third_party.deep_gemm", "flashinfer", "cutlass", "cuda"))
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"


def _absent_module(name: str) -> Absent:
    module = Absent(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    return module


def _pretend_cuda(capability: tuple[int, int]) -> None:
    import torch

    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_name = lambda device=None: _PROPERTIES["name"]
    properties = types.SimpleNamespace(**_PROPERTIES, major=capability[0], minor=capability[1])
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.mem_get_info = lambda device=None: (_PROPERTIES["total_memory"], _PROPERTIES["total_memory"])
    torch.version.cuda = torch.version.cuda or "13.0"


def without_streams() -> None:
    """A GPU's queues are names and no more to a class: where there is a GPU, a real one would take its memory."""
    import torch

    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, type(name, (), {"__init__": lambda self, *_, **__: None}))
    torch.cuda.current_stream = lambda device=None: torch.cuda.Stream()


def _platform(capability: tuple[int, int]) -> Any:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class StandIn(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*capability)

        @classmethod
        def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
            wanted = capability if isinstance(capability, tuple) else divmod(capability, 10)
            return cls.get_device_capability() >= wanted

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return str(_PROPERTIES["name"])

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return int(_PROPERTIES["total_memory"])

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def is_fully_connected(cls, device_ids: Any) -> bool:
            return False

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return True

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return int(_PROPERTIES["multi_processor_count"])

    return StandIn


class Operators:
    """A namespace of torch.ops whose operators are all there; one that this build lacks raises RuntimeError where it is called."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._real, name)
        except AttributeError:
            return TorchOperator(name)


class TorchOperator:
    """One that this build lacks, and its overloads."""

    def __init__(self, name: str) -> None:
        self.__name__ = self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return TorchOperator(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise Absence(f"the kernel {self._name} is not in this process: it only describes models")


def _operators() -> None:
    import torch
    from vllm import _custom_ops

    for name in ("_C", "_moe_C", "_C_cache_ops", "_vllm_fa2_C", "_vllm_fa3_C"):
        setattr(torch.ops, name, Operators(getattr(torch.ops, name)))
    for name in _SUPPORTED:
        if hasattr(_custom_ops, name):
            setattr(_custom_ops, name, lambda *_: True)
