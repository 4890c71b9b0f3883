"""LoRA on torch: an adapter's matrices, and what they add to the rows of a step that ask for them.

An adapter adds ``scale * B(A(x))`` to the product of a linear layer (Hu et al., arXiv 2106.09685). The rows of a step
are grouped by adapter: each group's rows are gathered, go through two small products and are added where they belong;
where one adapter has all rows they stay where they are. Rows without an adapter are not touched, and a step without any
pays nothing.

Matrices are laid out as the decoder's layers are: q, k and v are one product there, so theirs are stacked (A one below
the other, B on a diagonal of blocks), and the scale is part of B. Ranks are padded to a multiple of 4: with that, and
with rows padded likewise, a row's result does not depend on how many there are, which mode deterministic lives on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from worker.batch import SequenceSlice
from worker.models.config import ModelConfig
from worker.models.linear import Linear
from worker.models.ops import Ops
from worker.peft import TENSORS_FILE, AdapterError, PeftConfig, read_config, short
from worker.plan import adapter_bytes

SITES: Mapping[str, tuple[str, ...]] = {  # of the decoder's linear layers: the modules that each is made of
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate": ("mlp.gate_proj",),
    "up": ("mlp.up_proj",),
    "down": ("mlp.down_proj",),
}
ROW_MULTIPLE = 4  # as in the rest of the model: what keeps a row's bits apart from its neighbours' number
_TENSOR = re.compile(r"base_model\.model\.(model\.layers\.(\d+)\.(\w+\.\w+))\.lora_([AB])\.weight")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HEADER_BYTES = 1 << 20
_Pairs = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added at one place: ``b(a(x))``, the scale being part of ``b``."""

    a: Linear
    b: Linear
    shape: tuple[int, int, int]  # channels in, rank, channels out

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, out]`` of ``x`` ``[rows, in]``."""
        return self.b(self.a(x))

    def plus(self, x: Tensor, product: Tensor) -> Tensor:
        """The same added to ``product`` ``[rows, out]``."""
        return self.b.plus(self.a(x), product)


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """One adapter, ready for the decoder: per layer, the places that it changes."""

    layers: Sequence[Mapping[str, LowRank]]


class LoraReader:
    """Makes weights for one model of an adapter's files. Thread-safe."""

    def __init__(
        self, config: ModelConfig, ops: Ops, *, dtype: torch.dtype, device: torch.device, max_rank: int
    ) -> None:
        """``ops`` are the decoder's, so that its products and these have the same promises."""
        self._config = config
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._max_rank = max_rank
        self._shapes = shapes_of(config)
        self.max_bytes = adapter_bytes(config, max_rank, 4) + _HEADER_BYTES

    def __call__(self, config: bytes, tensors: bytes) -> tuple[LoraWeights, int]:
        """The weights on the device, and their largest rank. Raises ``AdapterError``."""
        peft = read_config(config, self._max_rank)
        pairs = self._pairs(peft, tensors)
        prefix = "model.layers."
        layers = [
            {
                site: pair
                for site, modules in SITES.items()
                if (pair := self._stacked([f"{prefix}{layer}.{module}" for module in modules], pairs)) is not None
            }
            for layer in range(self._config.num_layers)
        ]
        return LoraWeights(layers), max(len(a) for a, _ in pairs.values())

    def _pairs(self, peft: PeftConfig, data: bytes) -> _Pairs:
        """A and scaled B by module, checked, float32."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = load(data)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise AdapterError(f"{TENSORS_FILE} cannot be read: {error}") from error
        halves: dict[str, dict[str, Tensor]] = {}
        for name, tensor in sorted(tensors.items()):
            match = _TENSOR.fullmatch(name)
            module = match[1] if match else ""
            if match is None or module not in self._shapes:
                raise AdapterError(f"tensor {short(name)} belongs to no projection of this model's layers")
            if peft.has(module, int(match[2])) is False:
                raise AdapterError(f"tensor {short(name)} is there, but {module} is no target of the configuration")
            halves.setdefault(module, {})[match[4]] = self._checked(name, tensor, match[4], peft.rank_of(module))
        wanted = {module for module, (layer, _, _) in self._shapes.items() if peft.has(module, layer)} | halves.keys()
        if not wanted:
            raise AdapterError(f"{TENSORS_FILE} has no tensors")
        for module in sorted(wanted):
            for half in "AB":
                if half not in halves.get(module, {}):
                    raise AdapterError(f"tensor 'base_model.model.{module}.lora_{half}.weight' is missing")
        return {module: (pair["A"], pair["B"] * peft.scale_of(module)) for module, pair in halves.items()}

    def _checked(self, name: str, tensor: Tensor, half: str, rank: int) -> Tensor:
        _, num_in, num_out = self._shapes[name.removeprefix("base_model.model.").partition(".lora_")[0]]
        shape = (rank, num_in) if half == "A" else (num_out, rank)
        if tensor.shape != shape:
            raise AdapterError(f"tensor {short(name)} has shape {list(tensor.shape)}, {list(shape)} is needed")
        if tensor.dtype not in _DTYPES:
            raise AdapterError(
                f"tensor {short(name)} is of type {tensor.dtype}: float32, float16 and bfloat16 are supported"
            )
        if not torch.isfinite(tensor).all():
            raise AdapterError(f"tensor {short(name)} has values that are not finite numbers")
        return tensor.float()

    def _stacked(self, modules: Sequence[str], pairs: _Pairs) -> LowRank | None:
        """The matrices of modules whose products lie side by side; None where none of them is changed."""
        found = [pairs[module] for module in modules if module in pairs]
        if not found:
            return None
        rank = sum(len(a) for a, _ in found)
        padding = -rank % ROW_MULTIPLE
        a = functional.pad(torch.cat([a for a, _ in found]), (0, 0, 0, padding))
        b = torch.zeros(sum(self._shapes[module][2] for module in modules), rank + padding)
        row = column = 0
        for module in modules:
            num_out = self._shapes[module][2]
            if module in pairs:
                part = pairs[module][1]
                b[row : row + num_out, column : column + part.shape[1]] = part
                column += part.shape[1]
            row += num_out
        if not torch.isfinite(b.to(self._dtype)).all():
            raise AdapterError(f"{modules[0]}: lora_alpha makes its values too large for {self._dtype}")
        try:
            first, second = (self._ops.linear(one.to(self._device, self._dtype)) for one in (a, b))
            return LowRank(first, second, (a.shape[1], len(a), len(b)))
        except torch.OutOfMemoryError as error:
            raise AdapterError(f"the device has no memory left for it: {error}") from error


class LoraSet:
    """The adapters that a runner holds. The engine's one thread owns it."""

    def __init__(self, *, deterministic: bool, dtype: torch.dtype, device: torch.device) -> None:
        self._deterministic = deterministic
        self._dtype = dtype
        self._device = device
        self._weights: dict[str, LoraWeights] = {}

    def add(self, adapter: str, weights: LoraWeights) -> None:
        """Serve it from now on. In mode deterministic it is tried first; raises ``AdapterError`` where that fails."""
        if self._deterministic:
            _self_test(weights, self._dtype)
        self._weights[adapter] = weights

    def remove(self, adapter: str) -> None:
        """Its memory is free."""
        del self._weights[adapter]

    def rows_of(self, slices: Sequence[SequenceSlice]) -> LoraRows | None:
        """Who asks for which adapter in this step; None when nobody asks for any."""
        if not self._weights:
            return None
        groups: dict[str, list[Tensor]] = {}
        first = 0
        for one in slices:
            end = first + len(one.token_ids)
            if one.lora is not None:
                groups.setdefault(one.lora, []).append(torch.arange(first, end))
            first = end
        if not groups:
            return None
        if len(groups) == 1 and not self._deterministic and all(one.lora is not None for one in slices):
            return LoraRows([(self._weights[adapter], None, None) for adapter in groups])
        parts: list[_Part] = []
        for adapter, ranges in groups.items():
            rows = torch.cat(ranges)
            # Row 0 pads: it is computed and left out.
            read = functional.pad(rows, (0, -len(rows) % ROW_MULTIPLE)) if self._deterministic else rows
            parts.append((self._weights[adapter], read.to(self._device), rows.to(self._device)))
        return LoraRows(parts)


_Part: TypeAlias = tuple[LoraWeights, Tensor | None, Tensor | None]
"""An adapter, the rows that it reads, and those of them that it is added to; None: all rows."""


class LoraRows:
    """The rows of one step, grouped by adapter."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts

    def add(self, layer: int, site: str, x: Tensor, product: Tensor) -> Tensor:
        """``product`` ``[rows, out]``, in which the rows with an adapter have got what it makes of ``x``."""
        for weights, read, rows in self._parts:
            pair = weights.layers[layer].get(site)
            if pair is None:
                continue
            if read is None or rows is None:
                product = pair.plus(x, product)
            else:
                product.index_add_(0, rows, pair(x.index_select(0, read))[: len(rows)])
        return product


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """By module: its layer, and the widths of its input and output."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widths = {
        "self_attn.q_proj": (hidden, q_width),
        "self_attn.k_proj": (hidden, kv_width),
        "self_attn.v_proj": (hidden, kv_width),
        "self_attn.o_proj": (q_width, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    return {
        f"model.layers.{layer}.{module}": (layer, *width)
        for layer in range(config.num_layers)
        for module, width in widths.items()
    }


@torch.inference_mode()
def _self_test(weights: LoraWeights, dtype: torch.dtype) -> None:
    """Equal rows must give equal bits however many there are; tried once for each shape of this adapter."""
    shapes = {pair.shape: pair for layer in weights.layers for pair in layer.values()}
    for (width, rank, _), pair in shapes.items():
        x = torch.linspace(-2, 2, 260 * width, dtype=torch.float32).sin().view(260, width).to(dtype)
        whole = pair(x)
        for count in (4, 8, 12, 20, 64, 256):
            for first in (0, 3):
                if not torch.equal(pair(x[first : first + count]), whole[first : first + count]):
                    raise AdapterError(
                        f"mode deterministic does not hold here for an adapter of rank {rank} on {width} channels: "
                        f"{count} rows give other bits than 260 (torch {torch.__version__}); use --mode fast"
                    )
