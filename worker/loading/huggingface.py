"""Hugging Face folders: config.json, generation_config.json and safetensors, sharded or not."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from worker.models.config import SUPPORTED_ARCHITECTURES, GenerationDefaults, ModelConfig, ModelError, RopeConfig


def load_config(folder: Path) -> ModelConfig:
    """The model's shape from config.json, with the end tokens and defaults of generation_config.json.

    Raises ``ModelError`` for a folder without config.json and for what is not supported.
    """
    raw = read_json(folder / "config.json")
    if not raw:
        raise ModelError(f"{folder} has no config.json: it is no Hugging Face model folder")
    return parse_config(raw, read_json(folder / "generation_config.json"))


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The same from the two files' contents."""
    architecture = next(iter(raw.get("architectures") or ()), None) or "missing"
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise ModelError(f"quantised weights ({method}) are not supported in a folder; use bfloat16, or a GGUF file")
    max_context = int(raw["max_position_embeddings"])
    _refuse_sliding_window(raw, architecture, max_context)
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"activation {activation!r} is not supported; supported: silu")
    num_layers, num_heads = int(raw["num_hidden_layers"]), int(raw["num_attention_heads"])
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // num_heads),
        vocab_size=int(raw["vocab_size"]),
        max_context=max_context,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_parse_rope(raw, max_context),
        nope_layers=_nope_layers(raw, num_layers) if architecture == "SmolLM3ForCausalLM" else frozenset(),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", architecture == "SmolLM3ForCausalLM")),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"),
        bos_token_id=_first(raw.get("bos_token_id")),
        eos_token_ids=_token_ids(generation.get("eos_token_id"), raw.get("eos_token_id")),
        generation=GenerationDefaults(
            **{
                name: generation[name]
                for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
                if generation.get(name) is not None
            }
        ),
    )


def tensors(folder: Path, config: ModelConfig) -> tuple[Iterator[tuple[str, Tensor]], int]:
    """All weights of the folder, one by one, and how many there are."""
    from safetensors import safe_open

    index = read_json(folder / "model.safetensors.index.json")
    files = sorted(set(index["weight_map"].values())) if index else [path.name for path in folder.glob("*.safetensors")]
    if not files:
        raise ModelError(f"{folder} has no .safetensors file; other weight formats are not read")
    if missing := [name for name in files if not (folder / name).exists()]:
        raise ModelError(f"{folder} lacks {len(missing)} of {len(files)} shards, first {missing[0]}")
    wanted: list[tuple[str, str]] = []
    for name in files:
        with safe_open(folder / name, framework="pt") as shard:
            wanted += [(name, key) for key in shard.keys() if _is_weight(key, config)]  # noqa: SIM118 - not a dict

    def read() -> Iterator[tuple[str, Tensor]]:
        for file in files:
            with safe_open(folder / file, framework="pt") as shard:
                for name, key in wanted:
                    if name == file:
                        yield key, shard.get_tensor(key)

    return read(), len(wanted)


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty when there is no such file. Raises ``ModelError`` for malformed JSON."""
    if not path.exists():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    return content


def _is_weight(name: str, config: ModelConfig) -> bool:
    if name == "lm_head.weight":
        return not config.tie_word_embeddings
    return not name.endswith("rotary_emb.inv_freq")  # old checkpoints carry what is derived


def _refuse_sliding_window(raw: Mapping[str, Any], architecture: str, max_context: int) -> None:
    window = raw.get("sliding_window")
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"):
        used = bool(raw.get("use_sliding_window", False))
    else:
        used = architecture == "MistralForCausalLM"
    if used and window is not None and int(window) < max_context:
        raise ModelError(
            f"sliding-window attention (window {window}, context {max_context}) is not supported; every layer must see "
            f"all positions: take a checkpoint without a window, or set sliding_window to null and "
            f"max_position_embeddings to {window} in config.json"
        )


def _parse_rope(raw: Mapping[str, Any], max_context: int) -> RopeConfig:
    # transformers 5 writes rope_parameters; before, rope_theta stood beside rope_scaling.
    scaling: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("a partial rotary embedding is not supported")
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(f"RoPE scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")
    optional = {
        name: scaling[key]
        for name, key in (
            ("low_freq_factor", "low_freq_factor"),
            ("high_freq_factor", "high_freq_factor"),
            ("beta_fast", "beta_fast"),
            ("beta_slow", "beta_slow"),
            ("attention_factor", "attention_factor"),
            ("mscale", "mscale"),
            ("mscale_all_dim", "mscale_all_dim"),
            ("truncate", "truncate"),
        )
        if scaling.get(key) is not None
    }
    original = int(scaling.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings") or 0)
    return RopeConfig(
        theta=theta,
        kind=kind,  # type: ignore[arg-type]  # checked above
        factor=float(scaling["factor"]),
        original_max_context=original or max_context,
        **optional,
    )


def _nope_layers(raw: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """SmolLM3 lists 1 for a layer with a rotary embedding and 0 for one without; by default each fourth has none."""
    uses = raw.get("no_rope_layers")
    if uses is None:
        interval = int(raw.get("no_rope_layer_interval", 4))
        uses = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    return frozenset(layer for layer, use in enumerate(uses) if not use)


def _token_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    ids: list[int] = []
    for value in values:
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def _first(value: int | list[int] | None) -> int | None:
    return next(iter(_token_ids(value)), None)
