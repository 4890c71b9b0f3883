"""The decoder: one implementation for all families, which differ in switches of ``ModelConfig`` only.

It works on a flat batch: all rows of a step, whatever request they belong to. Only attention knows about sequences,
and that knowledge is in the backend's plan. Weights carry the names of Hugging Face checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from worker.attention import AttentionBackend
from worker.kv_store import KVStore
from worker.models.config import ModelConfig, ModelError
from worker.models.linear import Linear, make_linear

if TYPE_CHECKING:
    from worker.lora import LoraRows

Weights = dict[str, Tensor]  # by the names of Hugging Face checkpoints


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, q, k and v in one product."""

    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear
    rotary: bool


class Decoder:
    """A transformer over a paged KV cache. Holds weights only; the KV store belongs to the runner."""

    def __init__(self, config: ModelConfig, weights: Weights, *, exact: bool = False) -> None:
        """Takes the tensors out of ``weights`` as it fuses them, so that no model stands in memory twice.

        ``exact`` is for deterministic mode. Raises ``ModelError`` when a tensor is
        missing or has another shape than ``config`` says.
        """
        self.config = config
        self._take = _Taker(weights)
        hidden = config.hidden_size
        self.embedding = self._take("model.embed_tokens.weight", config.vocab_size, hidden)
        self._layers = [self._make_layer(index, exact) for index in range(config.num_layers)]
        self._final_norm = self._take("model.norm.weight", hidden)
        head = self.embedding if config.tie_word_embeddings else self._take("lm_head.weight", config.vocab_size, hidden)
        self._head = make_linear(head, exact=exact)
        self._rope = _rope_tables(config, self.embedding.dtype, self.embedding.device)
        del self._take

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and, unless asked otherwise, KV."""
        return self.embedding.dtype

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: KVStore,
        attention: AttentionBackend,
        plan: Any,
        lora: "LoraRows | None" = None,
    ) -> Tensor:
        """Hidden states ``[rows, hidden]`` after the last layer, before the final norm; KV of all rows is written.

        ``token_ids``, ``positions`` and ``slots`` are int64 ``[rows]``; ``lora`` has the rows that go through adapters.
        """
        config, eps = self.config, self.config.rms_norm_eps
        num_rows, head_dim = token_ids.shape[0], config.head_dim
        num_turned = config.num_heads + config.num_kv_heads  # q and k lie side by side and are turned together
        cosines, sines = (table.index_select(0, positions) for table in self._rope)  # [rows, 1, 2, head_dim / 2]
        x = self.embedding.index_select(0, token_ids)
        for index, layer in enumerate(self._layers):
            normed = _rms_norm(x, layer.attention_norm, eps)
            qkv = layer.qkv(normed)
            if lora is not None:
                qkv = lora.add(index, "qkv", normed, qkv)
            heads = qkv.view(num_rows, -1, head_dim)
            qk, values = heads[:, :num_turned], heads[:, num_turned:]
            if layer.query_norm is not None and layer.key_norm is not None:
                qk = torch.cat(
                    (
                        _rms_norm(qk[:, : config.num_heads], layer.query_norm, eps),
                        _rms_norm(qk[:, config.num_heads :], layer.key_norm, eps),
                    ),
                    dim=1,
                )
            if layer.rotary:
                halves = qk.reshape(num_rows, num_turned, 2, head_dim // 2)
                qk = torch.addcmul(halves * cosines, halves.flip(2), sines).view(num_rows, num_turned, head_dim)
            kv.write(index, slots, qk[:, config.num_heads :], values)
            attended = attention.attend(qk[:, : config.num_heads], *kv.layers[index], plan)
            x = layer.output.plus(attended, x)
            if lora is None:
                normed = _rms_norm(x, layer.mlp_norm, eps)
                x = layer.down.plus(layer.up(normed).mul_(layer.gate.silu(normed)), x)
            else:
                x = _adapted_mlp(layer, index, lora.add(index, "output", attended, x), eps, lora)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, float32 ``[rows, vocab]``, for ``hidden`` rows of ``forward``."""
        normed = _rms_norm(hidden, self._final_norm, self.config.rms_norm_eps)
        return self._head(normed).float()

    def _make_layer(self, index: int, exact: bool) -> _Layer:
        config, take, prefix = self.config, self._take, f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def fused(names: Mapping[str, int], width: int, has_bias: bool) -> Linear:
            weight = torch.cat([take(f"{prefix}{name}.weight", rows, width) for name, rows in names.items()])
            bias = torch.cat([take(f"{prefix}{name}.bias", rows) for name, rows in names.items()]) if has_bias else None
            return make_linear(weight, bias, exact=exact)

        qkv = {"self_attn.q_proj": q_width, "self_attn.k_proj": kv_width, "self_attn.v_proj": kv_width}
        return _Layer(
            attention_norm=take(f"{prefix}input_layernorm.weight", hidden),
            qkv=fused(qkv, hidden, config.qkv_bias),
            query_norm=take(f"{prefix}self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
            key_norm=take(f"{prefix}self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
            output=fused({"self_attn.o_proj": hidden}, q_width, config.output_bias),
            mlp_norm=take(f"{prefix}post_attention_layernorm.weight", hidden),
            gate=fused({"mlp.gate_proj": inner}, hidden, config.mlp_bias),
            up=fused({"mlp.up_proj": inner}, hidden, config.mlp_bias),
            down=fused({"mlp.down_proj": hidden}, inner, config.mlp_bias),
            rotary=index not in config.nope_layers,
        )


def _adapted_mlp(layer: _Layer, index: int, x: Tensor, eps: float, lora: "LoraRows") -> Tensor:
    """The layer's second half where some rows go through an adapter."""
    normed = _rms_norm(x, layer.mlp_norm, eps)
    gate = layer.gate.activate(lora.add(index, "gate", normed, layer.gate(normed)))
    inner = lora.add(index, "up", normed, layer.up(normed)).mul_(gate)
    return lora.add(index, "down", inner, layer.down.plus(inner, x))


class _Taker:
    """Hands out weights by name and checks what it hands out."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __call__(self, name: str, *shape: int) -> Tensor:
        weight = self._weights.pop(name, None)
        if weight is None:
            raise ModelError(f"the checkpoint has no tensor {name!r}")
        if weight.shape != shape:
            raise ModelError(f"tensor {name!r} has shape {list(weight.shape)}, the configuration says {list(shape)}")
        return weight


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in float32 within. On CPUs torch's own takes twice as many kernels."""
    if x.is_cuda:
        return functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype).mul_(weight)


def _rope_tables(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines per position, ``[max_context, 1, 2, head_dim / 2]``.

    The rotation of a pair (a, b) is (a cos - b sin, b cos + a sin): with the halves swapped, one fused multiply-add
    by sines whose first half is negative.
    """
    frequencies = torch.tensor(config.rope.inverse_frequencies(config.head_dim), dtype=torch.float32)
    angles = torch.arange(config.max_context, dtype=torch.float32)[:, None] * frequencies
    cosines, sines = angles.cos() * config.rope.amplitude, angles.sin() * config.rope.amplitude
    shape = (config.max_context, 1, 2, config.head_dim // 2)
    tables = torch.stack((cosines, cosines), dim=1), torch.stack((-sines, sines), dim=1)
    return tables[0].view(shape).to(device, dtype), tables[1].view(shape).to(device, dtype)
