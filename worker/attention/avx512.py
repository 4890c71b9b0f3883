"""The compiled backend on CPUs: one call reads the pages directly, for prefill chunks and decode rows alike.

kernel.cpp has the work. A chunk's keys and values are laid out for its matrix products once per layer; a decode row
reads each key where it lies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.attention import Span
from worker.cpu_kernel import library
from worker.kv_store import Pages


@dataclass(frozen=True, slots=True)
class _Plan:
    spans: np.ndarray  # int32 [sequences, 4]: first row, rows, keys, first key block in the scratch
    tables: np.ndarray  # int32 [sequences, longest block table]


class Avx512Attention:
    """Attention by the compiled kernel."""

    name = "avx512"

    def __init__(self, *, block_size: int, num_kv_heads: int, head_dim: int, num_threads: int) -> None:
        self._block_size, self._num_kv_heads, self._head_dim = block_size, num_kv_heads, head_dim
        self._threads = num_threads
        self._run = library().wf_attend
        self._key_block = int(library().wf_key_block())
        self._scratch = torch.empty(0, dtype=torch.bfloat16)

    def plan(self, spans: Sequence[Span], num_rows: int) -> _Plan:
        """Bounds and block tables of all sequences."""
        used = [-(-span.num_keys // self._block_size) for span in spans]
        bounds = np.empty((len(spans), 4), dtype=np.int32)
        tables = np.zeros((len(spans), max(used)), dtype=np.int32)
        num_packed = 0
        for index, (span, count) in enumerate(zip(spans, used, strict=True)):
            bounds[index] = span.first_row, span.num_rows, span.num_keys, num_packed
            tables[index, :count] = span.block_ids[:count]
            if span.num_rows > 1:
                num_packed += -(-span.num_keys // self._key_block)
        needed = num_packed * self._num_kv_heads * 2 * self._key_block * self._head_dim
        if needed > self._scratch.numel():
            self._scratch = torch.empty(needed, dtype=torch.bfloat16)
        return _Plan(bounds, tables)

    def attend(self, queries: Tensor, keys: Pages, values: Pages, plan: _Plan) -> Tensor:
        """See ``AttentionBackend.attend``."""
        num_rows, num_heads, head_dim = queries.shape
        out = torch.empty(num_rows, num_heads * head_dim, dtype=queries.dtype)
        self._run(
            out.data_ptr(),
            queries.data_ptr(),
            keys.data.data_ptr(),
            values.data.data_ptr(),
            plan.spans.ctypes.data,
            plan.tables.ctypes.data,
            self._scratch.data_ptr(),
            len(plan.spans),
            queries.stride(0),
            plan.tables.shape[1],
            self._block_size,
            num_heads,
            self._num_kv_heads,
            head_dim,
            self._threads,
        )
        return out
