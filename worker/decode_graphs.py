"""Decode steps on CUDA as recorded graphs: one launch in place of some hundred.

A step of few rows is bound by how fast the host launches kernels. So steps in which every row decodes are recorded once
for some numbers of rows and replayed; rows that fill a step up to the next such number write to scratch. Everything
else, and every device but CUDA, runs as it is.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from worker.attention import Span

if TYPE_CHECKING:
    from worker.attention.triton_paged import TritonAttention

Forward = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""Scores ``[rows, vocab]`` of token ids, positions and slots, int64 ``[rows]``, and the attention backend's plan."""
Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Of some work: what does it again, and where its answer then stands."""


def sizes(max_rows: int) -> list[int]:
    """The numbers of rows that are recorded: 1, 2, 4 and multiples of 8 up to the first that holds ``max_rows``."""
    return [1, 2, 4, *range(8, max_rows + 8, 8)]


class DecodeGraphs:
    """Recordings of decode steps. Their buffers are shared: one step at a time."""

    def __init__(
        self,
        forward: Forward,
        attention: "TritonAttention",
        *,
        max_rows: int,
        max_blocks: int,
        device: torch.device,
        record: Recorder | None = None,
    ) -> None:
        """Records all sizes. ``max_blocks`` bounds a row's block table; ``record`` stands in for CUDA's in tests."""
        self._attention, self._sizes = attention, sizes(max_rows)
        largest = self._sizes[-1]
        self._flat = torch.zeros(3, largest, dtype=torch.int64, device=device)  # token ids, positions, slots
        self._plan = attention.decode_buffers(largest, max_blocks)
        record = record or cuda_recorder()
        self._recorded = {}
        for size in reversed(self._sizes):  # the largest first: its memory serves the others
            ids, positions, slots = (one[:size] for one in self._flat)
            plan = attention.first_rows(self._plan, size)
            self._recorded[size] = record(lambda args=(ids, positions, slots, plan): forward(*args))  # type: ignore[misc]

    def run(
        self, token_ids: np.ndarray, positions: np.ndarray, slots: np.ndarray, spans: Sequence[Span]
    ) -> Tensor | None:
        """Scores ``[rows, vocab]``, valid until the next call; None: so many rows are not recorded."""
        rows = len(token_ids)
        size = next((size for size in self._sizes if size >= rows), None)
        if size is None:
            return None
        flat = np.zeros((3, size), dtype=np.int64)
        flat[:, :rows] = token_ids, positions, slots
        self._flat[:, :size].copy_(torch.from_numpy(flat))
        self._attention.refill(self._plan, spans, size)
        replay, scores = self._recorded[size]
        replay()
        return scores[:rows]


def cuda_recorder() -> Recorder:
    """CUDA's own recorder; all that it records shares one pool of memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles what is compiled at first use; nothing of that may be recorded
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            scores = work()
        return graph.replay, scores

    return record
