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

    def wide(self, x: Tensor) -> Tensor:
        """The product as float32, ``[rows, out]``."""


class Gated(Protocol):
    """``silu(gate(x)) * up(x)`` for ``x`` ``[rows, hidden]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product, ``[rows, inner]``."""

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``gate(x)`` and ``up(x)``, before the one is activated and multiplied with the other."""

    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        """``silu(gate) * up`` of parts to which something was added; they are lost."""


class _WithSilu(Linear, Protocol):
    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""

    def activate(self, product: Tensor) -> Tensor:
        """SiLU of a product that was computed before; ``product`` is lost."""


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

    def wide(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self(x).float()

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        return self.activate(functional.linear(x, self.weight, self.bias))

    def activate(self, product: Tensor) -> Tensor:
        """SiLU of a product that was computed before; ``product`` is lost."""
        return functional.silu(product, inplace=True)


class ExactLinear(PlainLinear):
    """For deterministic mode: an element's value must not depend on where in the batch it lies.

    torch's SiLU takes a vector exponential where it can and libm's at the end of each thread's share, and they differ
    in the last bit. So it gets whole vectors only, in pieces too small to be shared among threads.
    """

    _VECTOR, _ONE_THREAD = 64, 32_768  # elements: a multiple of every vector's; torch's grain of parallel work

    def activate(self, product: Tensor) -> Tensor:
        """See ``PlainLinear``."""
        width = product.shape[1]
        whole = functional.pad(product, (0, -width % self._VECTOR))
        for piece in torch.split(whole, max(1, (self._ONE_THREAD - 1) // whole.shape[1])):
            functional.silu(piece, inplace=True)
        return whole[:, :width]


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

    def wide(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self(x).float()

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        activated: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "swish", [], "")
        return activated

    def activate(self, product: Tensor) -> Tensor:
        """See ``PlainLinear``."""
        return functional.silu(product, inplace=True)


class TorchGated:
    """Two linear layers, and an operator that makes one answer of theirs."""

    def __init__(self, gate: _WithSilu, up: Linear) -> None:
        self._gate, self._up = gate, up

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Gated``."""
        return self._up(x).mul_(self._gate.silu(x))

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Gated``."""
        return self._gate(x), self._up(x)

    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        """See ``Gated``."""
        return up.mul_(self._gate.activate(gate))


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights of ``dtype`` and multiplies correctly with them."""
    weight = torch.linspace(-1, 1, 64 * 32, dtype=torch.float32).view(64, 32).to(dtype)
    x = torch.linspace(-1, 1, 3 * 32, dtype=torch.float32).view(3, 32).to(dtype)
    residual = torch.ones(3, 64, dtype=dtype)
    try:
        packed = PackedLinear(weight)
        found = packed(x), packed.plus(x, residual), packed.silu(x)
    except (RuntimeError, AttributeError, TypeError):
        return False
    product = functional.linear(x.float(), weight.float())
    wanted = product, product + 1, functional.silu(product)
    return all(torch.allclose(one.float(), other, atol=0.1) for one, other in zip(found, wanted, strict=True))


def make_linear(weight: Tensor, bias: Tensor | None = None, *, exact: bool) -> _WithSilu:
    """A linear layer: ``exact`` for deterministic mode, else the fastest layout this machine has."""
    if exact:
        return ExactLinear(weight, bias)
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
