"""Matrix products with weights that never change.

On CPUs oneDNN can keep a weight in the layout its kernels want. That saves reordering it at every call: about a third
of a bf16 decode step. The operators are private to torch, so they are probed once and torch's own linear stands in
where they are missing or refuse.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """``x @ weight.T + bias`` for ``x`` ``[rows, in]``, alone or fused with what follows it."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product, ``[rows, out]``."""

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product added to ``residual`` ``[rows, out]``."""


class PlainLinear:
    """``functional.linear`` as it stands: every device, and the rows of deterministic mode."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return functional.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """See ``Linear``."""
        return functional.linear(x, self.weight, self.bias).add_(residual)


class PackedLinear:
    """A weight in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """See ``Linear``."""
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        return total


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights of ``dtype`` and multiplies correctly with them."""
    weight = torch.linspace(-1, 1, 64 * 32, dtype=torch.float32).view(64, 32).to(dtype)
    x = torch.linspace(-1, 1, 3 * 32, dtype=torch.float32).view(3, 32).to(dtype)
    residual = torch.ones(3, 64, dtype=dtype)
    try:
        packed = PackedLinear(weight)
        product, total = packed(x), packed.plus(x, residual)
    except (RuntimeError, AttributeError, TypeError):
        return False
    wanted = functional.linear(x.float(), weight.float())
    return torch.allclose(product.float(), wanted, atol=0.1) and torch.allclose(total.float(), wanted + 1, atol=0.1)


def make_linear(weight: Tensor, bias: Tensor | None = None, *, pack: bool) -> Linear:
    """A linear layer; ``pack`` asks for the faster layout where this machine has one."""
    if pack and weight.device.type == "cpu" and can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
