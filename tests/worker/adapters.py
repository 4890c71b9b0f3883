"""LoRA adapters made at test time, in PEFT's format, without PEFT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from worker.models.config import ModelConfig
from worker.peft import CONFIG_FILE, PROJECTIONS, TENSORS_FILE

PREFIX = "base_model.model."


def widths_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Input and output of each projection, by the module's name within its layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q_proj": (hidden, q_width), "k_proj": (hidden, kv_width), "v_proj": (hidden, kv_width)}
    attention["o_proj"] = (q_width, hidden)
    mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return {f"self_attn.{name}": width for name, width in attention.items()} | {
        f"mlp.{name}": width for name, width in mlp.items()
    }


def adapter_tensors(
    config: ModelConfig, *, rank: int = 8, targets: Sequence[str] = PROJECTIONS, seed: int = 0, size: float = 0.2
) -> dict[str, Tensor]:
    """Random A and B of every target in every layer, large enough to change an answer."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_layers):
        for module, (num_in, num_out) in widths_of(config).items():
            if module.rpartition(".")[2] in targets:
                name = f"{PREFIX}model.layers.{layer}.{module}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(rank, num_in, generator=random) * size
                tensors[f"{name}.lora_B.weight"] = torch.randn(num_out, rank, generator=random) * size
    return tensors


def adapter_config(*, rank: int = 8, targets: Sequence[str] = PROJECTIONS, **more: Any) -> dict[str, Any]:
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(targets), "bias": "none"}
    return {**plain, "task_type": "CAUSAL_LM", "lora_dropout": 0.05, "inference_mode": True, **more}


def write_adapter(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS_FILE)
    return folder


def random_adapter(
    folder: Path,
    config: ModelConfig,
    *,
    rank: int = 8,
    targets: Sequence[str] = PROJECTIONS,
    seed: int = 0,
    size: float = 0.2,
    **more: Any,
) -> Path:
    """A sound adapter of the given rank and targets; ``more`` goes into its configuration."""
    tensors = adapter_tensors(config, rank=rank, targets=targets, seed=seed, size=size)
    return write_adapter(folder, tensors, adapter_config(rank=rank, targets=targets, **more))
