"""The CUDA backend: Triton kernels that read the pages directly.

A program answers a tile of query rows of one sequence for one KV head: the query heads that share it, times as many
tokens as fit. It walks the sequence's block table from the first key to the last that its rows may see, in a fixed
order and with fixed tile sizes. A sequence with one row, which is what decode has, would keep one program busy for as
long as its context is, and most of the device idle; so its keys are walked in up to 16 parts, whose bounds follow from
their number alone, and a second kernel puts the parts together. Thus a row's result does not depend on what else is in
the batch, nor on how many programs there were.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.attention import Span
from worker.kv_store import SCRATCH_BLOCK, Pages

KEY_TILE = 64
DECODE_ROWS, PREFILL_ROWS = 16, 64  # 16 is the least that a tensor core's product takes
MAX_PARTS, LEAST_PART = 16, 128  # parts of one row's keys, and keys of a part where there are few
_PROGRAMS_PER_CORE = 2  # in a launch of decode rows, as far as rows and parts allow
_SPAN_FIELDS = 3


@dataclass(frozen=True, slots=True)
class _Plan:
    singles: Tensor  # int32 [singles]: the sequences with one row
    tiles: Tensor  # int32 [tiles, 2]: of the others the sequence, and the tile's first token within its rows
    spans: Tensor  # int32 [sequences, 3]: first row, rows, keys
    tables: Tensor  # int32 [sequences, longest block table]


class TritonAttention:
    """Paged attention: per layer one launch for the rows of prompts, two for those that decode."""

    name = "triton"

    def __init__(self, *, block_size: int, group: int, device: torch.device) -> None:
        if group > DECODE_ROWS:
            raise ValueError(f"--attention triton takes at most {DECODE_ROWS} query heads per KV head, not {group}")
        self._block_size, self._group, self._device = block_size, group, device
        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
        self._num_programs = _PROGRAMS_PER_CORE * cores

    def plan(self, spans: Sequence[Span], num_rows: int) -> _Plan:
        """See ``AttentionBackend.plan``."""
        step = PREFILL_ROWS // self._group
        tiles = [
            (index, first)
            for index, span in enumerate(spans)
            if span.num_rows > 1
            for first in range(0, span.num_rows, step)
        ]
        singles = [index for index, span in enumerate(spans) if span.num_rows == 1]
        bounds = [(span.first_row, span.num_rows, span.num_keys) for span in spans]
        return _Plan(
            self._moved(np.array(singles, dtype=np.int32)),
            self._moved(np.array(tiles, dtype=np.int32).reshape(-1, 2)),
            self._moved(np.array(bounds, dtype=np.int32)),
            self._moved(self._tables(spans, len(spans))),
        )

    def decode_buffers(self, max_rows: int, max_blocks: int) -> _Plan:
        """Room for the plan of up to ``max_rows`` decode rows that ``refill`` fills."""
        rows = torch.arange(max_rows, dtype=torch.int32, device=self._device)
        spans = torch.ones(max_rows, _SPAN_FIELDS, dtype=torch.int32, device=self._device)
        spans[:, 0] = rows
        tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=self._device)
        return _Plan(rows, torch.zeros(0, 2, dtype=torch.int32, device=self._device), spans, tables)

    @staticmethod
    def first_rows(buffers: _Plan, count: int) -> _Plan:
        """The plan of the first ``count`` rows, in the same memory."""
        return _Plan(buffers.singles[:count], buffers.tiles, buffers.spans[:count], buffers.tables[:count])

    def refill(self, buffers: _Plan, spans: Sequence[Span], count: int) -> None:
        """Plan decode rows, one of each of ``spans``; the others of ``count`` rows look at scratch alone."""
        tables = self._tables(spans, count)
        keys = np.ones(count, dtype=np.int32)
        keys[: len(spans)] = [span.num_keys for span in spans]
        buffers.tables[:count, : tables.shape[1]].copy_(torch.from_numpy(tables))
        buffers.spans[:count, 2].copy_(torch.from_numpy(keys))

    def attend(self, queries: Tensor, keys: Pages, values: Pages, plan: _Plan) -> Tensor:
        """See ``AttentionBackend.attend``."""
        num_rows, num_heads, head_dim = queries.shape
        queries = queries.contiguous()
        out = torch.zeros_like(queries)
        num_kv_heads = keys.data.shape[2]
        where = (plan.spans, plan.tables, plan.tables.shape[1])
        pages = (
            keys.data,
            values.data,
            queries if keys.scales is None else keys.scales,  # not looked at where nothing is scaled
            queries if values.scales is None else values.scales,
            head_dim**-0.5 * 1.4426950408889634,  # with log2(e): the kernels' exponentials are powers of two
        )
        shape: dict[str, Any] = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "group": self._group,
            "head_dim": head_dim,
            "wide_head": triton.next_power_of_2(head_dim),
            "block_size": self._block_size,
            "key_tile": KEY_TILE,
            "is_scaled": keys.scales is not None,
            "is_fp8": keys.data.dtype == torch.uint8,
        }
        if len(plan.tiles):
            _prefill[(len(plan.tiles), num_kv_heads)](
                out, queries, plan.tiles, *where, *pages, **shape, tile_rows=PREFILL_ROWS
            )
        if count := len(plan.singles):
            answers = queries.new_empty(count, num_heads, MAX_PARTS, head_dim, dtype=torch.float32)
            weights = queries.new_empty(count, num_heads, MAX_PARTS, 2, dtype=torch.float32)
            beside = min(max(self._num_programs // (count * num_kv_heads), 1), MAX_PARTS)
            parts = {"max_parts": MAX_PARTS, "least_part": LEAST_PART}
            _decode[(count, num_kv_heads, beside)](
                answers, weights, queries, plan.singles, *where, *pages, **shape, **parts, tile_rows=DECODE_ROWS
            )
            _join[(count, num_heads)](
                out,
                answers,
                weights,
                plan.singles,
                plan.spans,
                num_heads=num_heads,
                head_dim=head_dim,
                wide_head=shape["wide_head"],
                key_tile=KEY_TILE,
                **parts,
            )
        return out.view(num_rows, num_heads * head_dim)

    def _tables(self, spans: Sequence[Span], count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Block tables ``[count, longest]``; what no sequence has is scratch."""
        used = [-(-span.num_keys // self._block_size) for span in spans]
        tables = np.full((count, max(used)), SCRATCH_BLOCK, dtype=np.int32)
        for row, (span, blocks) in enumerate(zip(spans, used, strict=True)):
            tables[row, :blocks] = np.asarray(span.block_ids, dtype=np.int32)[:blocks]  # of an array: no copy
        return tables

    def _moved(self, numbers: np.ndarray[Any, np.dtype[np.int32]]) -> Tensor:
        return torch.from_numpy(numbers).to(self._device)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _prefill(  # type: ignore[no-untyped-def]
    out,
    queries,
    tiles,
    spans,
    tables,
    table_width,
    keys,
    values,
    key_scales,
    value_scales,
    scale,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    wide_head: tl.constexpr,
    block_size: tl.constexpr,
    key_tile: tl.constexpr,
    is_scaled: tl.constexpr,
    is_fp8: tl.constexpr,
    tile_rows: tl.constexpr,
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
    table = tables + sequence * table_width
    _, total, answer = _walk(
        q, 0, stop, last_key, table, kv_head, keys, values, key_scales, value_scales, scale,
        num_kv_heads, head_dim, wide_head, block_size, key_tile, is_scaled, is_fp8, tile_rows,
    )  # fmt: skip
    tl.store(out + cell, (answer / total[:, None]).to(out.dtype.element_ty), mask=is_cell)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _decode(  # type: ignore[no-untyped-def]
    answers,
    weights,
    queries,
    singles,
    spans,
    tables,
    table_width,
    keys,
    values,
    key_scales,
    value_scales,
    scale,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    wide_head: tl.constexpr,
    block_size: tl.constexpr,
    key_tile: tl.constexpr,
    is_scaled: tl.constexpr,
    is_fp8: tl.constexpr,
    max_parts: tl.constexpr,
    least_part: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """Every ``num_programs(2)``-th part of one row's keys: its sums, and what they are to be weighed by."""
    kv_head = tl.program_id(1)
    sequence = tl.load(singles + tl.program_id(0))
    num_keys = tl.load(spans + sequence * 3 + 2)
    row = tl.arange(0, tile_rows)  # a query head each
    channel = tl.arange(0, wide_head)
    head = kv_head * group + row
    is_cell = (row < group)[:, None] & (channel < head_dim)[None, :]
    at = (tl.load(spans + sequence * 3) * num_heads + head).to(tl.int64)
    q = tl.load(queries + at[:, None] * head_dim + channel[None, :], mask=is_cell, other=0.0)
    last_key = num_keys - 1 + row * 0
    table = tables + sequence * table_width
    part_keys = _part_keys(num_keys, key_tile, max_parts, least_part)
    for part in range(tl.program_id(2), tl.cdiv(num_keys, part_keys), tl.num_programs(2)):
        start = part * part_keys
        stop = tl.minimum(num_keys, start + part_keys)
        best, total, answer = _walk(
            q, start, stop, last_key, table, kv_head, keys, values, key_scales, value_scales, scale,
            num_kv_heads, head_dim, wide_head, block_size, key_tile, is_scaled, is_fp8, tile_rows,
        )  # fmt: skip
        place = ((tl.program_id(0) * num_heads + head) * max_parts + part).to(tl.int64)
        tl.store(answers + place[:, None] * head_dim + channel[None, :], answer, mask=is_cell)
        tl.store(weights + place * 2, best, mask=row < group)
        tl.store(weights + place * 2 + 1, total, mask=row < group)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _join(  # type: ignore[no-untyped-def]
    out,
    answers,
    weights,
    singles,
    spans,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    wide_head: tl.constexpr,
    key_tile: tl.constexpr,
    max_parts: tl.constexpr,
    least_part: tl.constexpr,
):
    """One head's answer for one row, of the parts that ``_decode`` left."""
    head = tl.program_id(1)
    sequence = tl.load(singles + tl.program_id(0))
    num_keys = tl.load(spans + sequence * 3 + 2)
    part = tl.arange(0, max_parts)
    channel = tl.arange(0, wide_head)
    is_part = part < tl.cdiv(num_keys, _part_keys(num_keys, key_tile, max_parts, least_part))
    place = ((tl.program_id(0) * num_heads + head) * max_parts + part).to(tl.int64)
    best = tl.load(weights + place * 2, mask=is_part, other=-1.0e30)
    share = tl.exp2(best - tl.max(best, 0))
    total = tl.sum(share * tl.load(weights + place * 2 + 1, mask=is_part, other=0.0), 0)
    is_cell = is_part[:, None] & (channel < head_dim)[None, :]
    answer = tl.load(answers + place[:, None] * head_dim + channel[None, :], mask=is_cell, other=0.0)
    joined = tl.sum(answer * share[:, None], 0) / total
    at = (tl.load(spans + sequence * 3) * num_heads + head).to(tl.int64)
    tl.store(out + at * head_dim + channel, joined.to(out.dtype.element_ty), mask=channel < head_dim)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _part_keys(num_keys, key_tile: tl.constexpr, max_parts: tl.constexpr, least_part: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of each part of a row but its last: whole tiles, so that each part walks the keys as a whole walk would."""
    return tl.maximum(least_part, tl.cdiv(num_keys, key_tile * max_parts) * key_tile)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _walk(  # type: ignore[no-untyped-def]
    q,
    start,
    stop,
    last_key,
    table,
    kv_head,
    keys,
    values,
    key_scales,
    value_scales,
    scale,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    wide_head: tl.constexpr,
    block_size: tl.constexpr,
    key_tile: tl.constexpr,
    is_scaled: tl.constexpr,
    is_fp8: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """Keys ``start`` to ``stop`` as rows ``q`` see them, each up to its ``last_key``.

    The highest score of each row, the sum of powers of two of the scores less that, and the values so weighed.
    """
    channel = tl.arange(0, wide_head)
    best = tl.full([tile_rows], -1.0e30, tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    answer = tl.zeros([tile_rows, wide_head], tl.float32)
    for first in range(start, stop, key_tile):
        key = first + tl.arange(0, key_tile)
        block = tl.load(table + key // block_size, mask=key < stop, other=0).to(tl.int64)
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
    return best, total, answer


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
    else:  # noqa: RET505 - what follows a return is compiled too, and must have its type
        return kept
