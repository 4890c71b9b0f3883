"""The CUDA backend: one Triton kernel reads the pages directly, for prefill chunks and decode rows alike.

A program answers a tile of query rows of one sequence for one KV head: the query heads that share it, times as many
tokens as fit. It walks the sequence's block table from the first key to the last that its rows may see, in a fixed
order and with fixed tile sizes, so that a row's result does not depend on what else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.attention import Span
from worker.kv_store import SCRATCH_BLOCK, Pages

KEY_TILE = 64
DECODE_ROWS, PREFILL_ROWS = 16, 64  # 16 is the least that a tensor core's product takes


@dataclass(frozen=True, slots=True)
class _Plan:
    tiles: Tensor  # int32 [tiles, 2]: sequence, first token of the tile within this step's tokens of the sequence
    spans: Tensor  # int32 [sequences, 3]: first row, rows, keys
    tables: Tensor  # int32 [sequences, longest block table]
    tile_rows: int


class TritonAttention:
    """Paged attention in one launch per layer."""

    name = "triton"

    def __init__(self, *, block_size: int, group: int, device: torch.device) -> None:
        if group > DECODE_ROWS:
            raise ValueError(f"--attention triton takes at most {DECODE_ROWS} query heads per KV head, not {group}")
        self._block_size, self._group, self._device = block_size, group, device

    def plan(self, spans: Sequence[Span], num_rows: int) -> _Plan:
        """Tiles of 16 rows when every sequence has one token, else of 64."""
        tile_rows = DECODE_ROWS if all(span.num_rows == 1 for span in spans) else PREFILL_ROWS
        step = tile_rows // self._group
        tiles = [(index, first) for index, span in enumerate(spans) for first in range(0, span.num_rows, step)]
        used = [-(-span.num_keys // self._block_size) for span in spans]
        tables = torch.zeros(len(spans), max(used), dtype=torch.int32)
        for index, (span, count) in enumerate(zip(spans, used, strict=True)):
            tables[index, :count] = torch.tensor(span.block_ids[:count], dtype=torch.int32)
        bounds = [(span.first_row, span.num_rows, span.num_keys) for span in spans]
        return _Plan(
            torch.tensor(tiles, dtype=torch.int32).to(self._device),
            torch.tensor(bounds, dtype=torch.int32).to(self._device),
            tables.to(self._device),
            tile_rows,
        )

    def decode_buffers(self, max_rows: int, max_blocks: int) -> _Plan:
        """Room for the plan of up to ``max_rows`` decode rows, one tile each, that ``refill`` fills."""
        tiles = torch.stack((torch.arange(max_rows), torch.zeros(max_rows, dtype=torch.int64)), dim=1)
        spans = torch.ones(max_rows, 3, dtype=torch.int32)
        spans[:, 0] = torch.arange(max_rows)
        tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=self._device)
        return _Plan(tiles.int().to(self._device), spans.to(self._device), tables, DECODE_ROWS)

    @staticmethod
    def first_rows(buffers: _Plan, count: int) -> _Plan:
        """The plan of the first ``count`` rows, in the same memory."""
        return _Plan(buffers.tiles[:count], buffers.spans[:count], buffers.tables[:count], buffers.tile_rows)

    def refill(self, buffers: _Plan, spans: Sequence[Span], count: int) -> None:
        """Plan decode rows, one of each of ``spans``; the others of ``count`` rows look at scratch alone."""
        used = [-(-span.num_keys // self._block_size) for span in spans]
        tables = torch.full((count, max(used)), SCRATCH_BLOCK, dtype=torch.int32)
        keys = torch.ones(count, dtype=torch.int32)
        for row, (span, blocks) in enumerate(zip(spans, used, strict=True)):
            tables[row, :blocks] = torch.tensor(span.block_ids[:blocks], dtype=torch.int32)
            keys[row] = span.num_keys
        buffers.tables[:count, : max(used)].copy_(tables)
        buffers.spans[:count, 2].copy_(keys)

    def attend(self, queries: Tensor, keys: Pages, values: Pages, plan: _Plan) -> Tensor:
        """See ``AttentionBackend.attend``."""
        num_rows, num_heads, head_dim = queries.shape
        queries = queries.contiguous()
        out = torch.zeros_like(queries)
        num_kv_heads = keys.data.shape[2]
        _paged_attention[(len(plan.tiles), num_kv_heads)](
            out,
            queries,
            keys.data,
            values.data,
            queries if keys.scales is None else keys.scales,  # not looked at where nothing is scaled
            queries if values.scales is None else values.scales,
            plan.tiles,
            plan.spans,
            plan.tables,
            head_dim**-0.5 * 1.4426950408889634,  # with log2(e): the kernel's exponentials are powers of two
            plan.tables.shape[1],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            group=self._group,
            head_dim=head_dim,
            wide_head=triton.next_power_of_2(head_dim),
            block_size=self._block_size,
            tile_rows=plan.tile_rows,
            key_tile=KEY_TILE,
            is_scaled=keys.scales is not None,
            is_fp8=keys.data.dtype == torch.uint8,
        )
        return out.view(num_rows, num_heads * head_dim)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _paged_attention(  # type: ignore[no-untyped-def]
    out,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    tiles,
    spans,
    tables,
    scale,
    table_width,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    wide_head: tl.constexpr,
    block_size: tl.constexpr,
    tile_rows: tl.constexpr,
    key_tile: tl.constexpr,
    is_scaled: tl.constexpr,
    is_fp8: tl.constexpr,
):
    kv_head = tl.program_id(1)
    sequence = tl.load(tiles + tl.program_id(0) * 2)
    first_token = tl.load(tiles + tl.program_id(0) * 2 + 1)
    first_row = tl.load(spans + sequence * 3)
    num_rows = tl.load(spans + sequence * 3 + 1)
    num_keys = tl.load(spans + sequence * 3 + 2)

    # Row r of the tile is query head r % group of token r // group.
    row = tl.arange(0, tile_rows)
    channel = tl.arange(0, wide_head)
    token = first_token + row // group
    is_row = (row < tile_rows // group * group) & (token < num_rows)
    at = ((first_row + token) * num_heads + kv_head * group + row % group).to(tl.int64)
    cell = at[:, None] * head_dim + channel[None, :]
    is_cell = is_row[:, None] & (channel < head_dim)[None, :]
    q = tl.load(queries + cell, mask=is_cell, other=0.0)

    last_key = num_keys - num_rows + token  # the position of the token itself
    stop = tl.minimum(num_keys, num_keys - num_rows + first_token + tile_rows // group)
    best = tl.full([tile_rows], -1.0e30, tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    answer = tl.zeros([tile_rows, wide_head], tl.float32)
    for start in range(0, stop, key_tile):
        key = start + tl.arange(0, key_tile)
        block = tl.load(tables + sequence * table_width + key // block_size, mask=key < stop, other=0).to(tl.int64)
        head = (block * block_size + key % block_size) * num_kv_heads + kv_head
        place = head[:, None] * head_dim + channel[None, :]
        is_stored = (key < stop)[:, None] & (channel < head_dim)[None, :]
        k = _exact(tl.load(keys + place, mask=is_stored, other=0), is_fp8).to(q.dtype)
        v = _exact(tl.load(values + place, mask=is_stored, other=0), is_fp8).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if is_scaled:  # a key's scale is that of its scores, a value's can be put on its share
            scores *= tl.load(key_scales + head, mask=key < stop, other=0.0).to(tl.float32)[None, :]
        scores = tl.where(key[None, :] <= last_key[:, None], scores, -1.0e30)
        higher = tl.maximum(best, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        keep = tl.exp2(best - higher)
        total = total * keep + tl.sum(shares, 1)
        if is_scaled:
            shares *= tl.load(value_scales + head, mask=key < stop, other=0.0).to(tl.float32)[None, :]
        answer = answer * keep[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        best = higher
    answer = answer / total[:, None]
    tl.store(out + cell, answer.to(out.dtype.element_ty), mask=is_cell)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _exact(kept, is_fp8: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers that ``kept`` means, before the scale and before they take the type of the queries.

    The bits of an e4m3 number, moved to their places in a float32, mean 2**-120 times that number, small ones too.
    Devices that know no fp8 read it in this way as well.
    """
    if is_fp8:
        wide = kept.to(tl.int32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    return kept
