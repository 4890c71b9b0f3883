"""What a decoder is made of, apart from attention: one interface, and torch's own operators behind it.

``worker.cpu_kernel.ops`` has the same for bfloat16 on CPUs, compiled. ``make_ops`` takes the fastest that is here.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from worker.kv_store import KVStore
from worker.models.config import ModelConfig
from worker.models.linear import Gated, Linear, TorchGated, make_linear

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of a step's rows, ``[rows, 1, 2, head_dim / 2]``; the sines of the first halves are negative."""


@dataclass(frozen=True, slots=True)
class Heads:
    """How one layer's product of q, k and v falls into heads, and what befalls them before attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    turn: bool  # by the angles of the row's position


class Ops(Protocol):
    """The operators of a decoder on one device."""

    name: str

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product with ``weight`` ``[out, in]``."""

    def gated(self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> Gated:
        """The first half of a gated feed-forward layer; both weights are ``[inner, hidden]``."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of each row of ``x`` ``[rows, hidden]``, in float32 within."""

    def rotate(self, qkv: Tensor, heads: Heads, angles: Angles, kv: KVStore, layer: int, slots: Tensor) -> Tensor:
        """Norm and turn q and k of ``qkv`` ``[rows, (heads + 2 kv_heads) * head_dim]``, write k and v into ``slots``.

        The answer is the queries, ``[rows, heads, head_dim]``; ``qkv`` is lost.
        """


class TorchOps:
    """torch's operators: every device, every dtype, both modes."""

    name = "torch"

    def __init__(self, *, exact: bool) -> None:
        """``exact`` is for deterministic mode."""
        self._exact = exact

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """See ``Ops``."""
        return make_linear(weight, bias, exact=self._exact)

    def gated(self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> Gated:
        """See ``Ops``."""
        return TorchGated(make_linear(gate, gate_bias, exact=self._exact), make_linear(up, up_bias, exact=self._exact))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Ops``. On CPUs torch's own takes twice as many kernels."""
        if x.is_cuda:
            return functional.rms_norm(x, weight.shape, weight, eps)
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype).mul_(weight)

    def rotate(self, qkv: Tensor, heads: Heads, angles: Angles, kv: KVStore, layer: int, slots: Tensor) -> Tensor:
        """See ``Ops``. q and k lie side by side and are turned together.

        The rotation of a pair (a, b) is (a cos - b sin, b cos + a sin): with the halves swapped, one fused
        multiply-add by sines whose first half is negative.
        """
        num_rows, num_turned = qkv.shape[0], heads.num_heads + heads.num_kv_heads
        parts = qkv.view(num_rows, -1, heads.head_dim)
        qk, values = parts[:, :num_turned], parts[:, num_turned:]
        if heads.query_norm is not None and heads.key_norm is not None:
            queries = self.rms_norm(qk[:, : heads.num_heads], heads.query_norm, heads.eps)
            keys = self.rms_norm(qk[:, heads.num_heads :], heads.key_norm, heads.eps)
            qk = torch.cat((queries, keys), dim=1)
        if heads.turn:
            cosines, sines = angles
            halves = qk.reshape(num_rows, num_turned, 2, heads.head_dim // 2)
            qk = torch.addcmul(halves * cosines, halves.flip(2), sines).view(num_rows, num_turned, heads.head_dim)
        kv.write(layer, slots, qk[:, heads.num_heads :], values)
        return qk[:, : heads.num_heads]


def make_ops(
    config: ModelConfig, *, exact: bool, dtype: torch.dtype, device: torch.device, cpu_kernel: bool = True
) -> Ops:
    """The fastest operators that keep the mode's promise; ``cpu_kernel`` False: torch's alone."""
    if cpu_kernel and not exact:
        from worker.cpu_kernel.ops import KernelOps, can_run

        if can_run(config, dtype, device):
            return KernelOps(torch.get_num_threads())
    return TorchOps(exact=exact)
