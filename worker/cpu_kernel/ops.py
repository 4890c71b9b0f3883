"""A decoder's operators by the compiled kernel. ``worker.models.ops`` has those of torch, and what they promise."""

import torch
from torch import Tensor
from torch.nn import functional

from worker.cpu_kernel import library, obstacle
from worker.kv_store import KVStore
from worker.models.config import ModelConfig
from worker.models.ops import Angles, Heads

_PLAIN, _ADD, _GATED, _WIDE = range(4)  # as in kernel.cpp
PANEL = 16


def can_run(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel is here and takes a model of this shape: all sizes are multiples of its vectors."""
    fits = config.hidden_size % 2 == 0 and config.intermediate_size % PANEL == 0 and config.head_dim % 32 == 0
    return fits and obstacle(dtype, device) is None


class KernelLinear:
    """A weight in panels; see kernel.cpp."""

    def __init__(self, weight: Tensor, bias: Tensor | None, threads: int) -> None:
        self._columns, self._depth = weight.shape
        self._bias, self._threads = bias, threads
        self._bias_at = None if bias is None else bias.data_ptr()
        self._run = library().wf_linear
        panels = -(-self._columns // PANEL)
        self._panels = torch.empty(panels * PANEL * self._depth, dtype=weight.dtype)
        self._panels_at = self._panels.data_ptr()
        weight = weight.contiguous()
        library().wf_pack(self._panels_at, weight.data_ptr(), self._columns, self._depth)

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._into(torch.empty(x.shape[0], self._columns, dtype=x.dtype), x, None, _PLAIN)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """See ``Linear``; the sum is rounded once."""
        return self._into(torch.empty_like(residual), x, residual.data_ptr(), _ADD)

    def wide(self, x: Tensor) -> Tensor:
        """See ``Linear``; not rounded to bfloat16 on the way."""
        return self._into(torch.empty(x.shape[0], self._columns, dtype=torch.float32), x, None, _WIDE)

    def gated(self, x: Tensor) -> Tensor:
        """Of a weight whose panels are in turn a gate's and what it lets through: ``silu(gate) * other``."""
        return self._into(torch.empty(x.shape[0], self._columns // 2, dtype=x.dtype), x, None, _GATED)

    def _into(self, out: Tensor, x: Tensor, residual_at: int | None, kind: int) -> Tensor:
        self._run(
            out.data_ptr(),
            x.data_ptr(),
            self._panels_at,
            self._bias_at,
            residual_at,
            x.shape[0],
            self._columns,
            self._depth,
            kind,
            self._threads,
        )
        return out


class KernelGated:
    """Gate and up projection in one product."""

    def __init__(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, threads: int
    ) -> None:
        bias = None if gate_bias is None or up_bias is None else _alternating(gate_bias, up_bias)
        self._both = KernelLinear(_alternating(gate, up), bias, threads)

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Gated``."""
        return self._both.gated(x)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Gated``."""
        both = self._both(x).view(x.shape[0], -1, 2, PANEL)
        return both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)

    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        """See ``Gated``."""
        return functional.silu(gate, inplace=True).mul_(up)


class KernelOps:
    """See ``worker.models.ops.Ops``."""

    name = "avx512"

    def __init__(self, num_threads: int) -> None:
        self._threads = num_threads
        self._norm, self._rotate = library().wf_rms_norm, library().wf_rotate

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> KernelLinear:
        """See ``Ops``."""
        return KernelLinear(weight, bias, self._threads)

    def gated(self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> KernelGated:
        """See ``Ops``."""
        return KernelGated(gate, up, gate_bias, up_bias, self._threads)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Ops``."""
        out = torch.empty_like(x)
        self._norm(out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], eps, self._threads)
        return out

    def rotate(self, qkv: Tensor, heads: Heads, angles: Angles, kv: KVStore, layer: int, slots: Tensor) -> Tensor:
        """See ``Ops``; works in place."""
        num_rows, num_heads, num_kv_heads = qkv.shape[0], heads.num_heads, heads.num_kv_heads
        keys, values = kv.layers[layer]
        is_plain = keys.scales is None and keys.data.dtype == qkv.dtype
        self._rotate(
            qkv.data_ptr(),
            angles[0].data_ptr() if heads.turn else None,
            angles[1].data_ptr() if heads.turn else None,
            None if heads.query_norm is None else heads.query_norm.data_ptr(),
            None if heads.key_norm is None else heads.key_norm.data_ptr(),
            keys.data.data_ptr() if is_plain else None,
            values.data.data_ptr() if is_plain else None,
            slots.data_ptr(),
            num_rows,
            num_heads,
            num_kv_heads,
            heads.head_dim,
            heads.eps,
            self._threads,
        )
        parts = qkv.view(num_rows, num_heads + 2 * num_kv_heads, heads.head_dim)
        if not is_plain:
            kv.write(layer, slots, parts[:, num_heads:-num_kv_heads], parts[:, -num_kv_heads:])
        return parts[:, :num_heads]


def _alternating(first: Tensor, second: Tensor) -> Tensor:
    """Rows of both in turn, 16 of each."""
    shape = (-1, PANEL, *first.shape[1:])
    return torch.stack((first.view(shape), second.view(shape)), dim=1).flatten(0, 2)
