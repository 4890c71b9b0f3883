"""The reference backend: gather each sequence's blocks, then torch's scaled dot product attention.

Shapes are chosen so that a row's result never depends on what else is computed: query rows come in multiples of 4 and
keys in multiples of 512. With those, torch's CPU kernels gave bit-identical rows cold, warm, chunked and mixed; padding
keys to 128 or 256 did not (the kernel splits keys at 512). The runner's self-test guards this at start.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.attention import Span
from worker.kv_store import SCRATCH_BLOCK, Pages

ROW_MULTIPLE = 4
KEY_MULTIPLE = 512


@dataclass(frozen=True, slots=True)
class _Sequence:
    first_row: int
    num_rows: int
    blocks: Tensor  # block ids, padded with scratch to a multiple of KEY_MULTIPLE tokens
    mask: Tensor  # [padded rows, padded keys], true where a row may look


class SdpaAttention:
    """One kernel call per sequence; right first, fast second."""

    name = "sdpa"

    def __init__(self, *, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device

    def plan(self, spans: Sequence[Span], num_rows: int) -> list[_Sequence]:
        """Block ids and mask per sequence."""
        return [self._plan_one(span) for span in spans]

    def _plan_one(self, span: Span) -> _Sequence:
        num_keys = _round_up(span.num_keys, KEY_MULTIPLE)
        num_blocks = -(-num_keys // self._block_size)
        used = -(-span.num_keys // self._block_size)
        table = list(span.block_ids[:used]) + [SCRATCH_BLOCK] * (num_blocks - used)
        rows = torch.arange(_round_up(span.num_rows, ROW_MULTIPLE)).clamp_(max=span.num_rows - 1)
        last_key = rows + (span.num_keys - span.num_rows)
        mask = torch.arange(num_keys)[None, :] <= last_key[:, None]
        blocks = torch.tensor(table, dtype=torch.int64)
        return _Sequence(span.first_row, span.num_rows, blocks.to(self._device), mask.to(self._device))

    def attend(self, queries: Tensor, keys: Pages, values: Pages, plan: list[_Sequence]) -> Tensor:
        """Sequence by sequence; see ``AttentionBackend.attend``."""
        num_rows, num_heads, head_dim = queries.shape
        num_kv_heads = keys.data.shape[2]
        group = num_heads // num_kv_heads
        out = queries.new_zeros(num_rows, num_heads, head_dim)
        for one in plan:
            padded_rows, num_keys = one.mask.shape
            rows = queries[one.first_row : one.first_row + one.num_rows]
            if padded_rows != one.num_rows:
                rows = functional.pad(rows, (0, 0, 0, 0, 0, padded_rows - one.num_rows))
            # [1, heads, keys, head_dim]: K/V are repeated per query head: enable_gqa takes another, slower kernel.
            k = keys.blocks(one.blocks).flatten(0, 1)[:num_keys].transpose(0, 1)
            v = values.blocks(one.blocks).flatten(0, 1)[:num_keys].transpose(0, 1)
            if group > 1:
                k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
            answer = functional.scaled_dot_product_attention(
                rows.transpose(0, 1)[None], k[None], v[None], attn_mask=one.mask[None, None]
            )
            out[one.first_row : one.first_row + one.num_rows] = answer[0].transpose(0, 1)[: one.num_rows]
        return out.flatten(1)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
