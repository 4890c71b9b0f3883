"""GGUF files of the Llama architecture: weights are dequantised at load, whatever they are stored in.

Metadata names are those of llama.cpp's ``gguf-py/gguf/constants.py``. llama.cpp stores the rows of q and k with the two
rotary halves interleaved; here they are put back in the order of Hugging Face checkpoints.
"""

from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from worker.models.config import ModelConfig, ModelError, RopeConfig

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Files name one end token, seldom two, while a chat may end with others as well. llama.cpp (src/llama-vocab.cpp) takes
# these for the end of an answer wherever the vocabulary has them; those of other architectures are left out.
END_TOKENS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>", "</s>")
)
_FREQUENCY_DIVISORS = "rope_freqs.weight"


def load_config(path: Path) -> ModelConfig:
    """The model's shape from the metadata. Raises ``ModelError`` for another architecture than llama."""
    metadata = Metadata(path)
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"GGUF architecture {architecture!r} is not supported; supported in GGUF: llama")
    if metadata.get("llama.expert_count"):
        raise ModelError("mixture-of-experts models are not supported")
    hidden, num_heads = metadata.count("llama.embedding_length"), metadata.count("llama.attention.head_count")
    head_dim = metadata.count("llama.attention.key_length", hidden // num_heads)
    if metadata.count("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelError("a partial rotary embedding is not supported")
    tensors = {tensor.name for tensor in metadata.tensors}
    max_context = metadata.count("llama.context_length")
    window = metadata.get("llama.attention.sliding_window")
    if window and window < max_context:
        raise ModelError(f"sliding-window attention (window {window}, context {max_context}) is not supported")
    rope = _parse_rope(metadata, max_context)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=metadata.count("llama.block_count"),
        hidden_size=hidden,
        intermediate_size=metadata.count("llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=metadata.count("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=metadata.shape("token_embd.weight")[0],
        max_context=rope.max_context(max_context),
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope=rope,
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=end_token_ids(metadata),
    )


def end_token_ids(metadata: "Metadata") -> tuple[int, ...]:
    """The tokens that end an answer: those that the file names, then those that llama.cpp knows by their text."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    by_text = [index for index, token in enumerate(metadata.tokens) if token in END_TOKENS]
    return tuple(dict.fromkeys([*(one for one in named if one is not None), *by_text]))


def tensors(path: Path, config: ModelConfig) -> tuple[Iterator[tuple[str, Tensor]], int]:
    """All weights, dequantised to float32 one by one under Hugging Face names, and how many there are."""
    stored = [tensor for tensor in Metadata(path).tensors if tensor.name != _FREQUENCY_DIVISORS]

    def read() -> Iterator[tuple[str, Tensor]]:
        for tensor in stored:
            name = checkpoint_name(tensor.name)
            weight = torch.from_numpy(_dequantize(tensor))
            if ".attn_q." in tensor.name:
                weight = deinterleave(weight, config.num_heads)
            elif ".attn_k." in tensor.name:
                weight = deinterleave(weight, config.num_kv_heads)
            yield name, weight

    return read(), len(stored)


def checkpoint_name(name: str) -> str:
    """``blk.3.attn_q.weight`` as ``model.layers.3.self_attn.q_proj.weight``. Raises ``ModelError`` for others."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    _, _, layer_and_part = stem.partition("blk.")
    layer, _, part = layer_and_part.partition(".")
    if part not in _LAYER_NAMES:
        raise ModelError(f"GGUF tensor {name!r} belongs to no model of the Llama architecture")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def deinterleave(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from (a0 b0 a1 b1 ...) to (a0 a1 ... b0 b1 ...): rotary pairs half a head apart.

    Raises ``ModelError`` for rows that are not so many heads.
    """
    if weight.shape[0] % (2 * num_heads):
        raise ModelError(f"{weight.shape[0]} rows of q or k are no {num_heads} heads of pairs")
    pairs = weight.view(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


class Metadata:
    """The key-value part of a GGUF file and the list of its tensors. Reading it takes seconds, so it is kept."""

    def __init__(self, path: Path) -> None:
        reader = _open(path, path.stat().st_mtime_ns)
        self._path, self._fields = path, reader.fields
        self.tensors = reader.tensors

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key`` as Python data, or ``default``."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self._path} lacks {key!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """The whole number above 0 under ``key``; where there is none, ``default``."""
        value = self[key] if default is None else self.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{self._path}: {key!r} is {value!r}, not a whole number above 0")
        return value

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary in the order of ids; empty where the file has none."""
        tokens: list[str] = self.get("tokenizer.ggml.tokens", [])
        return tokens

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first (GGUF lists them the other way round)."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tuple(int(size) for size in reversed(tensor.shape))
        raise ModelError(f"{self._path} has no tensor {name!r}")


@lru_cache(maxsize=1)
def _open(path: Path, _mtime_ns: int) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # what its reader trips over
        raise ModelError(f"{path} is no readable, whole GGUF file: {error}") from error


def _parse_rope(metadata: Metadata, max_context: int) -> RopeConfig:
    theta = metadata.get("llama.rope.freq_base", 10000.0)
    for tensor in metadata.tensors:
        if tensor.name == _FREQUENCY_DIVISORS:  # how llama.cpp's converter writes the llama3 scaling
            return RopeConfig(theta=theta, divisors=tuple(_dequantize(tensor).tolist()))
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "yarn"):
        raise ModelError(f"RoPE scaling {kind!r} is not supported; supported in GGUF: none, linear, yarn")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=metadata["llama.rope.scaling.factor"],
        original_max_context=metadata.get("llama.rope.scaling.original_context_length", max_context),
    )


def _dequantize(tensor: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelError(f"GGUF type {tensor.tensor_type.name} of {tensor.name!r} is not supported") from error
    return np.array(weight, dtype=np.float32)  # a copy: F32 tensors are read-only views of the file
