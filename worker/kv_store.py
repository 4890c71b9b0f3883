"""The KV cache itself: one tensor, allocated once, addressed by block.

Who owns which block is decided elsewhere (``cache.PrefixCache``); this only stores and copies. Block 0 is scratch: rows
that pad a batch to a wanted shape write there, and nobody reads it.

Keys and values may be kept smaller than they are computed, in one byte per number: they are quantised where they are
written and come back as numbers of the activations' type where they are gathered. A scale belongs to one token and one
KV head, so a token's stored bits depend on that token alone: neither on its block nor on what is computed beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.events import Tier
from cache.prefix_cache import BlockCopies
from worker.host_blocks import HostBlocks

SCRATCH_BLOCK = 0
_SCALE_DTYPE = torch.bfloat16  # the range of float32 in half its bytes; numbers are divided by the scale as rounded


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How the numbers of a KV cache are kept."""

    name: str
    dtype: torch.dtype
    largest: float | None = None  # what the largest number of a token's head becomes; None: nothing is scaled

    @property
    def element_bytes(self) -> int:
        """Bytes of one number."""
        return self.dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one token's key, or value, in one head."""
        return 0 if self.largest is None else _SCALE_DTYPE.itemsize


_FORMATS = {
    one.name: one
    for one in (
        KVFormat("bfloat16", torch.bfloat16),
        KVFormat("float32", torch.float32),
        KVFormat("int8", torch.int8, largest=127.0),
        KVFormat("fp8", torch.float8_e4m3fn, largest=448.0),  # scaled too: else what is small falls off its range
    )
}


def kv_format(name: str, weights_dtype: torch.dtype) -> KVFormat:
    """The format that ``--kv-cache-dtype`` means; ``auto`` keeps numbers as they are computed.

    Raises ``ValueError`` for an unknown name.
    """
    if name == "auto":
        return KVFormat(str(weights_dtype).removeprefix("torch."), weights_dtype)
    if name not in _FORMATS:
        raise ValueError(f"unknown KV cache dtype {name!r}; there are: auto, {', '.join(_FORMATS)}")
    return _FORMATS[name]


class Pages:
    """The keys, or the values, of one layer: a view of the store.

    ``data`` is ``[num_blocks, block_size, kv_heads, head_dim]``, of fp8 the bytes: few kernels move that type.
    ``scales`` is ``[num_blocks, block_size, kv_heads]``, or None where nothing is scaled.
    """

    def __init__(self, data: Tensor, scales: Tensor | None, kept: KVFormat, dtype: torch.dtype) -> None:
        self.data, self.scales, self.kept = data, scales, kept
        self._dtype = dtype  # of activations
        self._slots = data.flatten(0, 1)  # the same memory, one row per token
        self._heads = data.view(-1, data.shape[-1])  # and one per token and head
        self._head_scales = None if scales is None else scales.view(-1)
        # Of fp8, the number that each byte means: torch's own conversion takes seven times as long on CPUs.
        self._numbers: Tensor | None = None
        if kept.dtype == torch.float8_e4m3fn:
            every_byte = torch.arange(256, dtype=torch.uint8).view(kept.dtype)
            self._numbers = every_byte.to(dtype).to(data.device)

    def write(self, slots: Tensor, numbers: Tensor) -> None:
        """Put ``numbers`` ``[tokens, kv_heads, head_dim]`` into ``slots``."""
        if self.scales is None:
            self._slots.index_copy_(0, slots, numbers.to(self.data.dtype))
            return
        assert self.kept.largest is not None
        exact = numbers.float()
        # A token of zeros is divided by the smallest scale; one that holds no numbers gets a scale that is none.
        largest = exact.abs().amax(dim=-1)
        scales = (largest / self.kept.largest).clamp_(min=torch.finfo(_SCALE_DTYPE).tiny).to(_SCALE_DTYPE)
        shares = (exact / scales.float()[..., None]).clamp_(-self.kept.largest, self.kept.largest)
        small = (
            shares.round_().to(torch.int8) if self._numbers is None else shares.to(self.kept.dtype).view(torch.uint8)
        )
        self._slots.index_copy_(0, slots, small)
        self.scales.flatten(0, 1).index_copy_(0, slots, scales)

    def blocks(self, block_ids: Tensor) -> Tensor:
        """Whole blocks, ``[blocks, block_size, kv_heads, head_dim]`` of the activations' type."""
        kept = self.data.index_select(0, block_ids)
        if self.scales is None:
            return kept.to(self._dtype)
        return self._exact(kept).mul_(self.scales.index_select(0, block_ids).to(self._dtype)[..., None])

    def heads_into(self, out: Tensor, rows: Tensor) -> None:
        """Fill ``out`` ``[rows, head_dim]``, of the activations' type; a row is slot * kv_heads + head."""
        if self._head_scales is None and self.data.dtype == self._dtype:
            torch.index_select(self._heads, 0, rows, out=out)
            return
        out.copy_(self._exact(self._heads.index_select(0, rows)))
        if self._head_scales is not None:
            out.mul_(self._head_scales.index_select(0, rows)[:, None])

    def zero(self, slots: Tensor) -> None:
        """Forget what stands in ``slots``."""
        self._slots.index_fill_(0, slots, 0)
        if self.scales is not None:
            self.scales.flatten(0, 1).index_fill_(0, slots, 0)

    def _exact(self, kept: Tensor) -> Tensor:
        """What ``kept`` means, before the scale: every number of one byte is exact in bfloat16."""
        if self._numbers is None:
            return kept.to(self._dtype)
        return self._numbers.index_select(0, kept.flatten().int()).view(kept.shape)


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
        kept: KVFormat | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        """``dtype`` is that of activations, ``kept`` what the memory holds; None: the same.

        ``num_host_blocks``: blocks in host memory besides. Raises ``ValueError`` where there is no room for them.
        """
        if num_blocks < 2:
            raise ValueError(f"{num_blocks} KV blocks: at least 2 are needed, one of them is scratch")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.format = kept or kv_format("auto", dtype)
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads)
        stored = torch.uint8 if self.format.dtype == torch.float8_e4m3fn else self.format.dtype
        # Zeros, not empty: masked keys still meet a multiplication, and 0 * garbage may be NaN.
        self.data = torch.zeros(*shape, head_dim, dtype=stored, device=device)
        self.scales: Tensor | None = None
        if self.format.largest is not None:
            self.scales = torch.zeros(shape, dtype=_SCALE_DTYPE, device=device)
        self.layers = [(self._pages(layer, 0, dtype), self._pages(layer, 1, dtype)) for layer in range(num_layers)]
        self.host = HostBlocks(self._tensors, num_host_blocks) if num_host_blocks else None

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers, scales included."""
        return sum(one[:, :, 0, 0].numel() * one.element_size() for one in self._tensors)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put ``keys`` and ``values`` ``[tokens, kv_heads, head_dim]`` into ``slots`` (block * block_size + offset)."""
        for pages, numbers in zip(self.layers[layer], (keys, values), strict=True):
            pages.write(slots, numbers)

    def zero(self, slots: Tensor) -> None:
        """Forget what stands in ``slots``, in every layer."""
        for layer in self.layers:
            for pages in layer:
                pages.zero(slots)

    def copy(self, copies: Sequence[BlockCopies]) -> None:
        """Do these one after the other, in every layer. What is computed afterwards reads and overwrites safely."""
        for some in copies:
            if some.source_tier is Tier.HOST:
                assert self.host is not None
                self.host.load(some.sources, some.targets)
            elif some.target_tier is Tier.HOST:
                assert self.host is not None
                self.host.save(some.sources, some.targets)
            else:
                for source, target in zip(some.sources, some.targets, strict=True):
                    for one in self._tensors:
                        one[:, :, target, : some.num_tokens].copy_(one[:, :, source, : some.num_tokens])

    @property
    def _tensors(self) -> list[Tensor]:
        return [self.data] if self.scales is None else [self.data, self.scales]

    def _pages(self, layer: int, part: int, dtype: torch.dtype) -> Pages:
        scales = None if self.scales is None else self.scales[layer, part]
        return Pages(self.data[layer, part], scales, self.format, dtype)
