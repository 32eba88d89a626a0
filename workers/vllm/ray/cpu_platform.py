"""vLLM's CPU platform with a device that Ray can count. Never used but by an engine on CPUs under vLLM's Ray executor.

vllm/v1/executor/ray_executor_v2.py asks the platform for the name of Ray's resource, and of each worker for the numbers of what it got.
"""

from __future__ import annotations

from typing import Any

from workers.vllm.symbols import symbol

_STOCK: Any = symbol("CpuPlatform")


class CpuPlatform(_STOCK):
    ray_device_key = "GPU"

    @classmethod
    def device_control_id_to_physical_device_id(cls, device_id: str) -> int:
        return int(device_id)
