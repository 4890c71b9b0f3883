"""The KV cache itself: one tensor, allocated once, addressed by block.

Who owns which block is decided elsewhere (``cache.PrefixCache``); this only stores and copies. Block 0 is scratch: rows
that pad a batch to a wanted shape write there, and nobody reads it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SCRATCH_BLOCK = 0


class KVStore:
    """Keys and values of all layers, ``[layers, 2, num_blocks, block_size, kv_heads, head_dim]``."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"{num_blocks} KV blocks: at least 2 are needed, one of them is scratch")
        self.block_size = block_size
        self.num_blocks = num_blocks
        # Zeros, not empty: masked keys still meet a multiplication, and 0 * garbage may be NaN.
        self.data = torch.zeros(
            num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype, device=device
        )
        self.layers = [
            (layer[0], layer[1]) for layer in self.data
        ]  # K and V, [num_blocks, block_size, kv_heads, head_dim]
        self.slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self.layers]  # the same memory, one row per token

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers."""
        return self.data[:, :, 0, 0].numel() * self.data.element_size()

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put ``keys`` and ``values`` ``[tokens, kv_heads, head_dim]`` into ``slots`` (block * block_size + offset)."""
        k, v = self.slots[layer]
        k.index_copy_(0, slots, keys)
        v.index_copy_(0, slots, values)

    def zero(self, slots: Tensor) -> None:
        """Forget what stands in ``slots``, in every layer."""
        for k, v in self.slots:
            k.index_fill_(0, slots, 0)
            v.index_fill_(0, slots, 0)

    def copy_slots(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """For each (source block, target block, slots): copy the first ``slots`` tokens in every layer."""
        for source, target, num_slots in copies:
            self.data[:, :, target, :num_slots].copy_(self.data[:, :, source, :num_slots])
