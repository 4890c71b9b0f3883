"""Attention over pages: how queries of one flat batch read the KV blocks of their own sequences.

A backend turns the step's layout into whatever indices and masks it needs once (``plan``), then answers for every
layer (``attend``). The KV of the step's own tokens is written before ``attend`` is called.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.kv_store import Pages

_AVX512_MAX_GROUP, _AVX512_MAX_HEAD_DIM = 64, 256  # as in kernel.cpp


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

    def attend(self, queries: Tensor, keys: Pages, values: Pages, plan: Any) -> Tensor:
        """Attention of one layer.

        ``queries`` is ``[rows, heads, head_dim]``, ``keys`` and ``values`` are the layer's whole store; the answer is
        ``[rows, heads * head_dim]``.
        """


def make_backend(
    name: str,
    *,
    deterministic: bool,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    plain_kv: bool = True,
    cpu_kernel: bool = True,
) -> AttentionBackend:
    """The backend called ``name``; ``auto`` takes the fastest that keeps the mode's promise on this device.

    ``plain_kv`` says that the pages hold numbers of ``dtype`` as they are; ``cpu_kernel`` False: ``auto`` takes no
    compiled one on CPUs. Raises ``ValueError`` for an unknown name and for one that cannot do what was asked.
    """
    group = num_heads // num_kv_heads
    against_avx512 = _against_avx512(group, head_dim, dtype, device, plain_kv)
    if name == "auto":
        name = _best(group, deterministic, device, may_compile=cpu_kernel and against_avx512 is None)
    if deterministic and name != "sdpa":
        raise ValueError(f"mode deterministic needs --attention sdpa, not {name}: only its shapes are fixed")
    if name == "triton":
        if not _has_triton(device):
            raise ValueError("--attention triton needs a CUDA device and the triton package")
        from worker.attention.triton_paged import TritonAttention

        return TritonAttention(block_size=block_size, group=group, device=device)
    if name == "avx512":
        if against_avx512 is not None:
            raise ValueError(f"--attention avx512: {against_avx512}")
        from worker.attention.avx512 import Avx512Attention

        return Avx512Attention(
            block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim, num_threads=torch.get_num_threads()
        )
    if name == "sdpa":
        from worker.attention.sdpa import SdpaAttention

        return SdpaAttention(block_size=block_size, device=device)
    if name == "tiled":
        from worker.attention.tiled import TiledAttention

        return TiledAttention(
            block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=device
        )
    raise ValueError(f"there is no attention backend {name!r}")


def _best(group: int, deterministic: bool, device: torch.device, *, may_compile: bool) -> str:
    if deterministic:
        return "sdpa"
    if device.type == "cpu":
        return "avx512" if may_compile else "tiled"
    return "triton" if group <= 16 and _has_triton(device) else "sdpa"


def _against_avx512(group: int, head_dim: int, dtype: torch.dtype, device: torch.device, plain_kv: bool) -> str | None:
    """Why the compiled CPU kernel cannot serve this; None: it can."""
    if group > _AVX512_MAX_GROUP or head_dim > _AVX512_MAX_HEAD_DIM or head_dim % 32:
        return (
            f"it takes up to {_AVX512_MAX_GROUP} query heads per KV head of 32 to {_AVX512_MAX_HEAD_DIM} channels, "
            f"not {group} of {head_dim}"
        )
    if not plain_kv:
        return "it reads a KV cache of bfloat16 only"
    from worker.cpu_kernel import obstacle

    return obstacle(dtype, device)


def _has_triton(device: torch.device) -> bool:
    """Triton compiles for CUDA; its interpreter runs anywhere, for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return True
    import triton

    return bool(triton.knobs.runtime.interpret)
