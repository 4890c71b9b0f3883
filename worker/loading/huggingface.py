"""Hugging Face folders: config.json, generation_config.json and safetensors, sharded or not."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from worker.models.config import SUPPORTED_ARCHITECTURES, GenerationDefaults, ModelConfig, ModelError, RopeConfig

_GENERATION = "generation_config.json"
_LFS_POINTER = b"version https://git-lfs"


def load_config(folder: Path) -> ModelConfig:
    """The model's shape from config.json, with the end tokens and defaults of generation_config.json.

    Raises ``ModelError`` for a folder without config.json and for what is not supported.
    """
    raw = read_json(folder / "config.json")
    if not raw:
        raise ModelError(f"{folder} has no config.json: it is no Hugging Face model folder")
    generation = read_json(folder / _GENERATION)
    try:
        return parse_config(raw, generation)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The same from the two files' contents."""
    architectures = raw.get("architectures") or ["missing"]
    architecture = str(architectures[0]) if isinstance(architectures, list) else str(architectures)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ModelError(f"quantised weights ({method}) are not supported in a folder; use bfloat16, or a GGUF file")
    max_context = _count(raw, "max_position_embeddings")
    _refuse_sliding_window(raw, architecture, max_context)
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"activation {activation!r} is not supported; supported: silu")
    num_layers, num_heads = _count(raw, "num_hidden_layers"), _count(raw, "num_attention_heads")
    hidden_size = _count(raw, "hidden_size")
    attention_bias = bool(raw.get("attention_bias", False))
    rope = _parse_rope(raw, max_context)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_count(raw, "num_key_value_heads", num_heads),
        head_dim=_count(raw, "head_dim", hidden_size // num_heads),
        vocab_size=_count(raw, "vocab_size"),
        max_context=rope.max_context(max_context),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=rope,
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
            top_k=None if generation.get("top_k") is None else int(_number(generation, "top_k", file=_GENERATION)),
            **{
                name: _number(generation, name, file=_GENERATION)
                for name in ("temperature", "top_p", "min_p", "repetition_penalty")
                if generation.get(name) is not None
            },
        ),
    )


def tensors(folder: Path, config: ModelConfig) -> tuple[Iterator[tuple[str, Tensor]], int]:
    """All weights of the folder, one by one, and how many there are. Raises ``ModelError`` for a broken file."""
    files = _weight_files(folder)
    if not files:
        raise ModelError(f"{folder} has no .safetensors file; other weight formats are not read")
    if missing := [name for name in files if not (folder / name).exists()]:
        raise ModelError(f"{folder} lacks {len(missing)} of {len(files)} shards, first {missing[0]}")
    wanted: list[tuple[str, str]] = []
    for name in files:
        with _open_shard(folder / name) as shard:
            wanted += [(name, key) for key in shard.keys() if _is_weight(key, config)]  # noqa: SIM118 - not a dict

    def read() -> Iterator[tuple[str, Tensor]]:
        for file in files:
            with _open_shard(folder / file) as shard:
                for name, key in wanted:
                    if name == file:
                        yield key, shard.get_tensor(key)

    return read(), len(wanted)


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty when there is no such file. Raises ``ModelError`` for malformed JSON."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON{_hint(path)}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object but a {type(content).__name__}")
    return content


def _weight_files(folder: Path) -> list[str]:
    """Names of the files that hold the weights: what the index says, else the one whole file, else all there are."""
    index_file = folder / "model.safetensors.index.json"
    if index := read_json(index_file):
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index_file} has no 'weight_map' from tensor to file name")
        return sorted(set(weight_map.values()))
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]
    return sorted(path.name for path in folder.glob("*.safetensors"))


@contextmanager
def _open_shard(path: Path) -> Iterator[Any]:
    """The open file. Raises ``ModelError`` where it, or a tensor read inside the block, is broken."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except SafetensorError as error:
        raise ModelError(f"{path} is no whole safetensors file{_hint(path)}: {error}") from error


def _hint(path: Path) -> str:
    with path.open("rb") as stream:
        is_pointer = stream.read(len(_LFS_POINTER)) == _LFS_POINTER
    return " but a pointer of Git LFS, whose content was not fetched (git lfs pull)" if is_pointer else ""


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The whole number above 0 under ``key``; where there is none, ``default``."""
    value = _number(raw, key, default)
    if value != int(value) or value < 1:
        raise ModelError(f"config.json: {key!r} is {value:g}, not a whole number above 0")
    return int(value)


def _number(raw: Mapping[str, Any], key: str, default: float | None = None, *, file: str = "config.json") -> float:
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ModelError(f"{file} lacks {key!r}")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{file}: {key!r} is {value!r}, not a number")
    return value


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
    if used and window is not None and _number(raw, "sliding_window") < max_context:
        raise ModelError(
            f"sliding-window attention (window {window}, context {max_context}) is not supported; every layer must see "
            f"all positions: take a checkpoint without a window, or set sliding_window to null and "
            f"max_position_embeddings to {window} in config.json"
        )


def _parse_rope(raw: Mapping[str, Any], max_context: int) -> RopeConfig:
    # transformers 5 writes rope_parameters; before, rope_theta stood beside rope_scaling.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"config.json: the RoPE scaling is {scaling!r}, not an object")
    theta = _number(scaling, "rope_theta", _number(raw, "rope_theta", 10000.0))
    if _number(scaling, "partial_rotary_factor", _number(raw, "partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("a partial rotary embedding is not supported")
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(f"RoPE scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")
    optional: dict[str, Any] = {
        name: _number(scaling, name)
        for name in (
            *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
            *("attention_factor", "mscale", "mscale_all_dim"),
        )
        if scaling.get(name) is not None
    }
    original = _count(raw, "original_max_position_embeddings", max_context)
    return RopeConfig(
        theta=theta,
        kind=kind,  # type: ignore[arg-type]  # checked above
        factor=_number(scaling, "factor"),
        original_max_context=_count(scaling, "original_max_position_embeddings", original),
        truncate=bool(scaling.get("truncate", True)),
        **optional,
    )


def _nope_layers(raw: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """SmolLM3 lists 1 for a layer with a rotary embedding and 0 for one without; by default each fourth has none."""
    uses = raw.get("no_rope_layers")
    if uses is None:
        interval = _count(raw, "no_rope_layer_interval", 4)
        uses = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(uses, list) or len(uses) < num_layers:
        raise ModelError(f"config.json: 'no_rope_layers' has no entry for each of {num_layers} layers")
    return frozenset(layer for layer, use in enumerate(uses) if not use)


def _token_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    ids: list[int] = []
    for value in values:
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [one for one in ids if type(one) is not int or one < 0]:
        raise ModelError(f"{wrong[0]!r} stands where a token id should (eos_token_id, bos_token_id)")
    return tuple(dict.fromkeys(ids))


def _first(value: int | list[int] | None) -> int | None:
    return next(iter(_token_ids(value)), None)
