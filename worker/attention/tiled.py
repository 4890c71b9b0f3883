"""The fast backend on CPUs: plain batched products and softmax over visible keys only.

torch's fused CPU attention computes masked tiles too and cannot group query heads. Here a prefill goes in tiles of
``TILE_ROWS`` query rows, each against the keys it may see; decode rows of similar length go together; and the query
heads of one KV head are rows of one product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention import Span
from worker.kv_store import SCRATCH_BLOCK

TILE_ROWS = 256
_MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several rows of one sequence."""

    first_row: int
    num_rows: int
    num_keys: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """One row each of sequences of similar length."""

    rows: Tensor  # [sequences]
    blocks: Tensor  # block ids of all sequences one after the other, each padded to the longest
    penalty: Tensor  # [sequences, 1, 1, keys], 0 where a row may look, -inf elsewhere


@dataclass(frozen=True, slots=True)
class _Plan:
    chunks: list[_Chunk]
    groups: list[_DecodeGroup]


class TiledAttention:
    """Attention by batched matrix products."""

    name = "tiled"

    def __init__(self, *, block_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._block_size = block_size
        self._device = device
        causal = torch.ones(TILE_ROWS, TILE_ROWS, dtype=torch.bool, device=device).triu_(1)
        self._causal = torch.zeros(TILE_ROWS, TILE_ROWS, dtype=dtype, device=device).masked_fill_(causal, _MASKED)
        self._dtype = dtype

    def plan(self, spans: Sequence[Span], num_rows: int) -> _Plan:
        """Rows alone in their step are decode rows, whatever they belong to."""
        chunks = [self._plan_chunk(span) for span in spans if span.num_rows > 1]
        singles = sorted((span for span in spans if span.num_rows == 1), key=lambda span: span.num_keys)
        groups = []
        while singles:
            # Padding to the longest wastes reads; a call wastes time too: a group spans a factor of 1.25 or 128 keys.
            limit = max(singles[0].num_keys * 5 // 4, singles[0].num_keys + 128)
            count = sum(1 for span in singles if span.num_keys <= limit)
            groups.append(self._plan_group(singles[:count]))
            singles = singles[count:]
        return _Plan(chunks, groups)

    def _plan_chunk(self, span: Span) -> _Chunk:
        used = -(-span.num_keys // self._block_size)
        blocks = torch.tensor(span.block_ids[:used], dtype=torch.int64, device=self._device)
        return _Chunk(span.first_row, span.num_rows, span.num_keys, blocks)

    def _plan_group(self, spans: Sequence[Span]) -> _DecodeGroup:
        longest = -(-spans[-1].num_keys // self._block_size)
        table = torch.full((len(spans), longest), SCRATCH_BLOCK, dtype=torch.int64)
        for row, span in enumerate(spans):
            used = -(-span.num_keys // self._block_size)
            table[row, :used] = torch.tensor(span.block_ids[:used])
        lengths = torch.tensor([span.num_keys for span in spans])
        hidden = torch.arange(longest * self._block_size)[None, :] >= lengths[:, None]
        penalty = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, _MASKED)
        rows = torch.tensor([span.first_row for span in spans])
        return _DecodeGroup(
            rows.to(self._device), table.flatten().to(self._device), penalty[:, None, None, :].to(self._device)
        )

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, plan: _Plan) -> Tensor:
        """See ``AttentionBackend.attend``."""
        num_rows, num_heads, head_dim = queries.shape
        queries = queries * head_dim**-0.5
        out = queries.new_empty(num_rows, num_heads * head_dim)
        for group in plan.groups:
            out[group.rows] = _decode(queries.index_select(0, group.rows), keys, values, group)
        for chunk in plan.chunks:
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            self._prefill(queries[rows], keys, values, chunk, out[rows])
        return out

    def _prefill(self, queries: Tensor, keys: Tensor, values: Tensor, chunk: _Chunk, out: Tensor) -> None:
        num_heads, head_dim = queries.shape[1:]
        kv_heads = keys.shape[2]
        group = num_heads // kv_heads
        k = keys.index_select(0, chunk.blocks).flatten(0, 1).permute(1, 2, 0)  # [kv_heads, head_dim, keys]
        v = values.index_select(0, chunk.blocks).flatten(0, 1).transpose(0, 1)  # [kv_heads, keys, head_dim]
        before = chunk.num_keys - chunk.num_rows
        for first in range(0, chunk.num_rows, TILE_ROWS):
            rows = min(TILE_ROWS, chunk.num_rows - first)
            visible = before + first + rows
            q = queries[first : first + rows].view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
            scores = torch.bmm(q.reshape(kv_heads, group * rows, head_dim), k[:, :, :visible])
            corner = scores.view(kv_heads * group, rows, visible)[:, :, visible - rows :]
            corner.add_(self._causal[:rows, :rows])
            answer = torch.bmm(torch.softmax(scores, dim=-1), v[:, :visible])
            answer = answer.view(kv_heads, group, rows, head_dim).permute(2, 0, 1, 3)
            out[first : first + rows] = answer.reshape(rows, num_heads * head_dim)


def _decode(queries: Tensor, keys: Tensor, values: Tensor, group: _DecodeGroup) -> Tensor:
    count, num_heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    shape = (count, group.penalty.shape[-1], kv_heads, head_dim)
    k = keys.index_select(0, group.blocks).view(shape).permute(0, 2, 3, 1)  # [sequences, kv_heads, head_dim, keys]
    v = values.index_select(0, group.blocks).view(shape).transpose(1, 2)
    q = queries.view(count, kv_heads, num_heads // kv_heads, head_dim)
    scores = torch.matmul(q, k).add_(group.penalty)
    return torch.matmul(torch.softmax(scores, dim=-1), v).reshape(count, num_heads * head_dim)
