"""Attention over pages: how queries of one flat batch read the KV blocks of their own sequences.

A backend turns the step's layout into whatever indices and masks it needs once (``plan``), then answers for every
layer (``attend``). The KV of the step's own tokens is written before ``attend`` is called.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

BACKENDS = ("auto", "sdpa", "tiled")


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a flat batch."""

    first_row: int
    num_rows: int
    num_keys: int  # positions 0 .. num_keys - 1 have KV; the last num_rows of them are this step's own
    block_ids: Sequence[int]  # covers at least num_keys positions


class AttentionBackend(Protocol):
    """Causal attention of every sequence over its own blocks."""

    name: str

    def plan(self, spans: Sequence[Span], num_rows: int) -> Any:
        """What ``attend`` needs for a batch of ``num_rows`` rows; rows in no span are padding and may hold anything."""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, plan: Any) -> Tensor:
        """Attention of one layer.

        ``queries`` is ``[rows, heads, head_dim]``, ``keys`` and ``values`` the layer's whole store
        ``[num_blocks, block_size, kv_heads, head_dim]``; the answer is ``[rows, heads * head_dim]``.
        """


def make_backend(
    name: str,
    *,
    deterministic: bool,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend:
    """The backend called ``name``; ``auto`` takes the fastest that keeps the mode's promise on this device.

    Raises ``ValueError`` for an unknown name and for one that cannot do what was asked.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; there are: {', '.join(BACKENDS)}")
    if name == "auto":
        name = "sdpa" if deterministic or device.type != "cpu" else "tiled"
    if deterministic and name != "sdpa":
        raise ValueError(f"mode deterministic needs --attention sdpa, not {name}: only its shapes are fixed")
    if name == "sdpa":
        from worker.attention.sdpa import SdpaAttention

        return SdpaAttention(block_size=block_size, device=device)
    from worker.attention.tiled import TiledAttention

    return TiledAttention(
        block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=device
    )
