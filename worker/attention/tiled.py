"""The fast backend on CPUs: plain batched products and softmax over visible keys only.

torch's fused CPU attention computes masked tiles too and cannot group query heads. Here a prefill goes in tiles of
``TILE_ROWS`` query rows, each against the keys it may see; decode rows of similar length go together; and the query
heads of one KV head are rows of one product. Keys and values are gathered head by head into one kept buffer: products
over strided heads cost up to twice as much, and fresh memory of that size costs a page fault every 4 KiB.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.attention import Span
from worker.kv_store import SCRATCH_BLOCK, Pages

TILE_ROWS = 128
_MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several rows of one sequence."""

    first_row: int
    num_rows: int
    num_keys: int
    gather: Tensor  # rows of the store, one per (KV head, key)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """One row each of sequences of similar length."""

    rows: Tensor | None  # [sequences]; None: all rows of the batch, in order
    gather: Tensor  # rows of the store, one per (sequence, KV head, key); sequences are padded to the longest
    penalty: Tensor  # [sequences * kv_heads, 1, keys], 0 where a row may look, -inf elsewhere


@dataclass(frozen=True, slots=True)
class _Plan:
    chunks: list[_Chunk]
    groups: list[_DecodeGroup]


class TiledAttention:
    """Attention by batched matrix products."""

    name = "tiled"

    def __init__(
        self, *, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim
        self._dtype, self._device = dtype, device
        self._offsets = torch.arange(block_size)
        self._heads = torch.arange(num_kv_heads)[:, None]
        future = torch.ones(TILE_ROWS, TILE_ROWS, dtype=torch.bool, device=device).triu_(1)
        self._causal = torch.zeros(TILE_ROWS, TILE_ROWS, dtype=dtype, device=device).masked_fill_(future, _MASKED)
        self._buffer = torch.empty(2, 0, head_dim, dtype=dtype, device=device)  # gathered keys and values of one call

    def plan(self, spans: Sequence[Span], num_rows: int) -> _Plan:
        """Rows alone in their step are decode rows, whatever they belong to."""
        chunks = [self._plan_chunk(span) for span in spans if span.num_rows > 1]
        singles = sorted((span for span in spans if span.num_rows == 1), key=lambda span: span.num_keys)
        groups = []
        while singles:
            # Padding to the longest wastes reads, a call of its own wastes time: so a factor of 1.25 or 128 keys.
            limit = max(singles[0].num_keys * 5 // 4, singles[0].num_keys + 128)
            count = sum(1 for span in singles if span.num_keys <= limit)
            groups.append(self._plan_group(singles[:count], num_rows))
            singles = singles[count:]
        largest = max(
            [chunk.gather.numel() for chunk in chunks] + [group.gather.numel() for group in groups], default=0
        )
        if largest > self._buffer.shape[1]:
            self._buffer = torch.empty(2, largest, self._head_dim, dtype=self._dtype, device=self._device)
        return _Plan(chunks, groups)

    def _plan_chunk(self, span: Span) -> _Chunk:
        used = -(-span.num_keys // len(self._offsets))
        gather = self._rows_of(torch.from_numpy(np.array(span.block_ids[:used], dtype=np.int64)), span.num_keys)
        return _Chunk(span.first_row, span.num_rows, span.num_keys, gather.to(self._device))

    def _plan_group(self, spans: Sequence[Span], num_rows: int) -> _DecodeGroup:
        longest = spans[-1].num_keys
        spans = sorted(spans, key=lambda span: span.first_row)
        num_blocks = -(-longest // len(self._offsets))
        table = torch.full((len(spans), num_blocks), SCRATCH_BLOCK, dtype=torch.int64)
        for row, span in enumerate(spans):
            used = -(-span.num_keys // len(self._offsets))
            table[row, :used] = torch.from_numpy(np.array(span.block_ids[:used], dtype=np.int64))
        lengths = torch.tensor([span.num_keys for span in spans])
        hidden = torch.arange(longest)[None, :] >= lengths[:, None]
        penalty = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, _MASKED)
        penalty = penalty.repeat_interleave(self._num_kv_heads, dim=0)[:, None]
        rows = None if len(spans) == num_rows else torch.tensor([span.first_row for span in spans]).to(self._device)
        return _DecodeGroup(rows, self._rows_of(table, longest).to(self._device), penalty.to(self._device))

    def _rows_of(self, block_ids: Tensor, num_keys: int) -> Tensor:
        """Rows of the store as ``[tokens * kv_heads, head_dim]``, head by head: ``[..., kv_heads, keys]``, flat."""
        slots = (block_ids[..., None] * len(self._offsets) + self._offsets).flatten(-2)[..., :num_keys]
        return (slots[..., None, :] * self._num_kv_heads + self._heads).flatten()

    def attend(self, queries: Tensor, keys: Pages, values: Pages, plan: _Plan) -> Tensor:
        """See ``AttentionBackend.attend``."""
        num_rows, num_heads, head_dim = queries.shape
        queries = queries * head_dim**-0.5
        if plan.groups and plan.groups[0].rows is None:
            return self._decode(queries, keys, values, plan.groups[0])
        out = queries.new_empty(num_rows, num_heads * head_dim)
        for group in plan.groups:
            assert group.rows is not None
            answer = self._decode(queries.index_select(0, group.rows), keys, values, group)
            out.index_copy_(0, group.rows, answer)
        for chunk in plan.chunks:
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            self._prefill(queries[rows], keys, values, chunk, out[rows])
        return out

    def _decode(self, queries: Tensor, keys: Pages, values: Pages, group: _DecodeGroup) -> Tensor:
        count, num_heads, head_dim = queries.shape
        num_batches, _, num_keys = group.penalty.shape
        k, v = self._gathered(keys, values, group.gather, num_batches, num_keys)
        q = queries.view(num_batches, num_heads * count // num_batches, head_dim)
        scores = torch.bmm(q, k.transpose(1, 2)).add_(group.penalty)
        return torch.bmm(torch.softmax(scores, dim=-1), v).view(count, num_heads * head_dim)

    def _prefill(self, queries: Tensor, keys: Pages, values: Pages, chunk: _Chunk, out: Tensor) -> None:
        num_heads, head_dim = queries.shape[1:]
        kv_heads, group = self._num_kv_heads, num_heads // self._num_kv_heads
        k, v = self._gathered(keys, values, chunk.gather, kv_heads, chunk.num_keys)
        k = k.transpose(1, 2)
        before = chunk.num_keys - chunk.num_rows
        for first in range(0, chunk.num_rows, TILE_ROWS):
            rows = min(TILE_ROWS, chunk.num_rows - first)
            visible = before + first + rows
            q = queries[first : first + rows].view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
            scores = torch.bmm(q.reshape(kv_heads, group * rows, head_dim), k[:, :, :visible])
            corner = scores.view(num_heads, rows, visible)[:, :, visible - rows :]
            corner.add_(self._causal[:rows, :rows])
            answer = torch.bmm(torch.softmax(scores, dim=-1), v[:, :visible])
            answer = answer.view(kv_heads, group, rows, head_dim).permute(2, 0, 1, 3)
            out[first : first + rows].view(rows, kv_heads, group, head_dim).copy_(answer)

    def _gathered(
        self, keys: Pages, values: Pages, gather: Tensor, num_batches: int, num_keys: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values ``[batches, keys, head_dim]``; valid until the next call."""
        k, v = self._buffer[0, : len(gather)], self._buffer[1, : len(gather)]
        keys.heads_into(k, gather)
        values.heads_into(v, gather)
        return k.view(num_batches, num_keys, -1), v.view(num_batches, num_keys, -1)
