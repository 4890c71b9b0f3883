"""KV blocks in host memory, behind those of the device: pinned on CUDA, and copied beside the computing.

Copies happen in the order in which they are asked for. On CUDA the device's blocks are touched by the stream that
computes, and by no other: it gathers blocks into a buffer, or scatters them from one, and a stream of its own moves
buffers to host memory and back. So a block may be overwritten as soon as it is gathered, while its bytes are still on
their way, and what was sent to host memory is never read back before it has come there. On a CPU it is the same code
without the streams.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BUFFER_BYTES = 64 << 20  # of each buffer at most; a single block may be larger
NUM_BUFFERS = 2
_MEASURED_BLOCKS = 64
_NUM_MEASUREMENTS = 3


class HostBlocks:
    """Room for ``num_blocks`` blocks of tensors ``[layers, 2, blocks, ...]``; places count from 1, as blocks do.

    Raises ``ValueError`` when host memory has no such room.
    """

    def __init__(self, tensors: Sequence[Tensor], num_blocks: int) -> None:
        device = tensors[0].device
        self._device = device
        self._blocks = [one.movedim(2, 0) for one in tensors]  # views: block first
        shapes = [one.shape[1:] for one in self._blocks]
        self.block_bytes = sum(one[0].numel() * one.element_size() for one in self._blocks)
        self.num_blocks = num_blocks
        self._at_once = max(1, min(num_blocks, BUFFER_BYTES // self.block_bytes))
        try:
            self._kept = [
                torch.empty((num_blocks + 1, *shape), dtype=one.dtype)
                for one, shape in zip(self._blocks, shapes, strict=True)
            ]
            if device.type == "cuda":
                for kept in self._kept:
                    _pin(kept, until=self)
        except RuntimeError as error:
            needed = (num_blocks + 1) * self.block_bytes
            raise ValueError(
                f"--host-kv-blocks {num_blocks}: {needed / 2**30:.1f} GiB of host memory cannot be had: {error}"
            ) from error
        self._buffers = [
            [one.new_empty((self._at_once, *shape)) for one, shape in zip(self._blocks, shapes, strict=True)]
            for _ in range(NUM_BUFFERS)
        ]
        self._turn = 0
        self._lane = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._moved = [torch.cuda.Event() for _ in range(NUM_BUFFERS)] if self._lane is not None else []

    def save(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Copy ``blocks`` of the device to ``places`` here. A place may be named twice: the later one stays."""
        for some, into in self._parts(blocks, places):
            buffer = self._next_buffer()
            ids = torch.tensor(some, device=self._device)
            for one, staged in zip(self._blocks, buffer, strict=True):
                torch.index_select(one, 0, ids, out=staged[: len(some)])
            with self._beside():
                for kept, staged in zip(self._kept, buffer, strict=True):
                    for row, place in enumerate(into):
                        kept[place].copy_(staged[row], non_blocking=True)

    def load(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy ``places`` back to ``blocks`` of the device, all different."""
        for some, into in self._parts(places, blocks):
            buffer = self._next_buffer()
            with self._beside():
                for kept, staged in zip(self._kept, buffer, strict=True):
                    for row, place in enumerate(some):
                        staged[row].copy_(kept[place], non_blocking=True)
            if self._lane is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._lane)
            ids = torch.tensor(into, device=self._device)
            for one, staged in zip(self._blocks, buffer, strict=True):
                one.index_copy_(0, ids, staged[: len(some)])

    def blocks_per_s(self) -> float:
        """How many blocks come back per second. Leaves the device's blocks as they are; before the first request."""
        blocks = range(1, 1 + min(_MEASURED_BLOCKS, self.num_blocks, len(self._blocks[0]) - 1))
        self.save(blocks, blocks)
        best_s = min(self._load_s(blocks) for _ in range(_NUM_MEASUREMENTS))
        return len(blocks) / best_s

    def _load_s(self, blocks: Sequence[int]) -> float:
        self._finish()
        began_s = time.perf_counter()
        self.load(blocks, blocks)
        self._finish()
        return time.perf_counter() - began_s

    def _finish(self) -> None:
        if self._lane is not None:
            torch.cuda.synchronize(self._device)

    def _parts(self, sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """As much at once as a buffer holds."""
        assert len(sources) == len(targets)
        for start in range(0, len(sources), self._at_once):
            part = slice(start, start + self._at_once)
            yield sources[part], targets[part]

    def _next_buffer(self) -> list[Tensor]:
        """A buffer that the computing stream may fill: whatever left it for host memory has come there."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        if self._lane is not None:
            torch.cuda.current_stream(self._device).wait_event(self._moved[self._turn])
        return self._buffers[self._turn]

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On the stream of copies, after all that the computing one was given so far."""
        if self._lane is None:
            yield
            return
        self._lane.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._lane):
            yield
            self._moved[self._turn].record(self._lane)


def _pin(tensor: Tensor, until: object) -> None:
    """Pin memory where it stands, until an object ends. Raises ``RuntimeError``.

    What torch allocates as pinned takes the next power of two, up to twice as much (pytorch/pytorch#150517).
    """
    cuda = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(tensor.data_ptr(), tensor.numel() * tensor.element_size(), 0))
    weakref.finalize(until, cuda.cudaHostUnregister, tensor.data_ptr())
