"""The decoder: one implementation for all families, which differ in switches of ``ModelConfig`` only.

It works on a flat batch: all rows of a step, whatever request they belong to. Only attention knows about sequences,
and that knowledge is in the backend's plan. Weights carry the names of Hugging Face checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from worker.attention import AttentionBackend
from worker.kv_store import KVStore
from worker.models.config import ModelConfig, ModelError
from worker.models.linear import Gated, Linear
from worker.models.ops import Heads, Ops

if TYPE_CHECKING:
    from worker.lora import LoraRows

Weights = dict[str, Tensor]  # by the names of Hugging Face checkpoints


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, q, k and v in one product."""

    attention_norm: Tensor
    qkv: Linear
    heads: Heads
    output: Linear
    mlp_norm: Tensor
    gated: Gated
    down: Linear


class Decoder:
    """A transformer over a paged KV cache. Holds weights only; the KV store belongs to the runner."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        """Takes the tensors out of ``weights`` as it fuses them, so that no model stands in memory twice.

        Raises ``ModelError`` when a tensor is missing, has another shape than ``config`` says, or is left over: without
        a bias that was trained, say, the model would answer, and wrongly.
        """
        self.config = config
        self._ops = ops
        self._take = _Taker(weights)
        hidden = config.hidden_size
        self.embedding = self._take("model.embed_tokens.weight", config.vocab_size, hidden)
        self._layers = [self._make_layer(index) for index in range(config.num_layers)]
        self._final_norm = self._take("model.norm.weight", hidden)
        head = self.embedding if config.tie_word_embeddings else self._take("lm_head.weight", config.vocab_size, hidden)
        self._head = ops.linear(head)
        self._rope = _rope_tables(config, self.embedding.dtype, self.embedding.device)
        self._take.check_all_taken()
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
        ops, eps = self._ops, self.config.rms_norm_eps
        cosines, sines = self._rope
        angles = cosines.index_select(0, positions), sines.index_select(0, positions)
        x = self.embedding.index_select(0, token_ids)
        for index, layer in enumerate(self._layers):
            normed = ops.rms_norm(x, layer.attention_norm, eps)
            qkv = layer.qkv(normed)
            if lora is not None:
                qkv = lora.add(index, "qkv", normed, qkv)
            queries = ops.rotate(qkv, layer.heads, angles, kv, index, slots)
            attended = attention.attend(queries, *kv.layers[index], plan)
            x = layer.output.plus(attended, x)
            if lora is not None:
                x = lora.add(index, "output", attended, x)
            normed = ops.rms_norm(x, layer.mlp_norm, eps)
            x = layer.down.plus(layer.gated(normed), x) if lora is None else _adapted(layer, index, normed, x, lora)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, float32 ``[rows, vocab]``, for ``hidden`` rows of ``forward``."""
        return self._head.wide(self._ops.rms_norm(hidden, self._final_norm, self.config.rms_norm_eps))

    def _make_layer(self, index: int) -> _Layer:
        config, ops, take, prefix = self.config, self._ops, self._take, f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def fused(names: Mapping[str, int], width: int, has_bias: bool) -> Linear:
            weight = torch.cat([take(f"{prefix}{name}.weight", rows, width) for name, rows in names.items()])
            bias = torch.cat([take(f"{prefix}{name}.bias", rows) for name, rows in names.items()]) if has_bias else None
            return ops.linear(weight, bias)

        def bias(name: str) -> Tensor | None:
            return take(f"{prefix}{name}.bias", inner) if config.mlp_bias else None

        qkv = {"self_attn.q_proj": q_width, "self_attn.k_proj": kv_width, "self_attn.v_proj": kv_width}
        return _Layer(
            attention_norm=take(f"{prefix}input_layernorm.weight", hidden),
            qkv=fused(qkv, hidden, config.qkv_bias),
            heads=Heads(
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.rms_norm_eps,
                query_norm=take(f"{prefix}self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
                key_norm=take(f"{prefix}self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
                turn=index not in config.nope_layers,
            ),
            output=fused({"self_attn.o_proj": hidden}, q_width, config.output_bias),
            mlp_norm=take(f"{prefix}post_attention_layernorm.weight", hidden),
            gated=ops.gated(
                take(f"{prefix}mlp.gate_proj.weight", inner, hidden),
                take(f"{prefix}mlp.up_proj.weight", inner, hidden),
                bias("mlp.gate_proj"),
                bias("mlp.up_proj"),
            ),
            down=fused({"mlp.down_proj": hidden}, inner, config.mlp_bias),
        )


def _adapted(layer: _Layer, index: int, normed: Tensor, x: Tensor, lora: "LoraRows") -> Tensor:
    """The layer's second half where some rows go through an adapter."""
    gate, up = layer.gated.parts(normed)
    inner = layer.gated.combine(lora.add(index, "gate", normed, gate), lora.add(index, "up", normed, up))
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

    def check_all_taken(self) -> None:
        if self._weights:
            raise ModelError(
                f"the checkpoint has {len(self._weights)} tensors for which the configuration has no use, first "
                f"{min(self._weights)!r}: the two do not belong together, or the model has parts that are not supported"
            )


def _rope_tables(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines per position, ``[max_context, 1, 2, head_dim / 2]``, as ``Angles`` has them."""
    frequencies = torch.tensor(config.rope.inverse_frequencies(config.head_dim), dtype=torch.float32)
    angles = torch.arange(config.max_context, dtype=torch.float32)[:, None] * frequencies
    cosines, sines = angles.cos() * config.rope.amplitude, angles.sin() * config.rope.amplitude
    shape = (config.max_context, 1, 2, config.head_dim // 2)
    tables = torch.stack((cosines, cosines), dim=1), torch.stack((-sines, sines), dim=1)
    return tables[0].view(shape).to(device, dtype), tables[1].view(shape).to(device, dtype)
