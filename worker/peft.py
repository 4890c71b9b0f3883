"""``adapter_config.json`` of a LoRA adapter in the format of Hugging Face's PEFT: what it says, and what is refused.

PEFT adds settings with each version, and most of them change what an adapter computes. So a setting that is not known
here is let through only where its value says that it is not used. Imports no torch: the simulated engine reads
configurations too. Names and meanings are those of PEFT 0.21's ``LoraConfig``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias"),
}
_OF_TRAINING = {  # or of other formats, and so without effect on an adapter that is loaded
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "loftq_config", "eva_config", "megatron_config", "megatron_core"),
    *("runtime_config", "qalora_group_size"),
}
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")  # the others change the base model's weights as well
_PLAIN_PATTERN = re.compile(r"[A-Za-z0-9_.]+")


class AdapterError(ValueError):
    """This adapter cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """Which modules a LoRA adapter changes, with which rank and scale. Modules are named as in the base model."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    targets: tuple[str, ...] | None  # None: the tensors say
    excluded: tuple[str, ...]
    layers: frozenset[int] | None  # None: all
    ranks: Mapping[str, int]  # where they differ
    alphas: Mapping[str, float]

    def has(self, module: str, layer: int) -> bool | None:
        """Whether the adapter must have matrices for this module of this layer; None: the tensors say."""
        if self.targets is None:
            return None
        if not any(_matches(module, one) for one in self.targets) or any(
            _matches(module, one) for one in self.excluded
        ):
            return False
        # PEFT asks for the layer only where a target is a name's end, not the whole name.
        return self.layers is None or layer in self.layers or module in self.targets

    def rank_of(self, module: str) -> int:
        """Columns between the two matrices of this module."""
        return next((rank for name, rank in self.ranks.items() if _matches(module, name)), self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of the two matrices is multiplied by: alpha / r, or alpha / sqrt(r) (rsLoRA)."""
        alpha = next((alpha for name, alpha in self.alphas.items() if _matches(module, name)), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank

    @property
    def max_rank(self) -> int:
        """The largest rank that it names."""
        return max(self.rank, *self.ranks.values()) if self.ranks else self.rank


def read_config(data: bytes, max_rank: int) -> PeftConfig:
    """The configuration in the file's bytes. Raises ``AdapterError`` naming the setting that cannot be honoured."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise AdapterError(f"{CONFIG_FILE} is no JSON object")
    if (kind := raw.get("peft_type")) != "LORA":
        raise AdapterError(f"peft_type {short(kind)} is not supported: only LORA is")
    if (bias := raw.get("bias", "none")) != "none":
        raise AdapterError(f"bias {short(bias)} is not supported: only none is")
    if (init := raw.get("init_lora_weights", True)) not in _PLAIN_INITS:
        raise AdapterError(
            f"init_lora_weights {short(init)} is not supported: it changes the base model's weights too; "
            "save the adapter converted to plain LoRA (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    if (pattern := raw.get("layers_pattern")) not in (None, [], "", "layers", ["layers"]):
        raise AdapterError(f"layers_pattern {short(pattern)} is not supported: the layers of these models are 'layers'")
    if not isinstance(is_rank_stabilised := raw.get("use_rslora", False), bool):
        raise AdapterError(f"use_rslora is {short(is_rank_stabilised)}: true or false is needed")
    for name in sorted(raw.keys() - _READ - _OF_TRAINING):
        if raw[name] not in (None, False, [], {}, ""):
            raise AdapterError(f"{short(name)} {short(raw[name])} is not supported: leave it out")
    peft = PeftConfig(
        rank=_rank("r", raw.get("r")),
        alpha=_number("lora_alpha", raw.get("lora_alpha", 8)),
        is_rank_stabilised=is_rank_stabilised,
        targets=_targets(raw.get("target_modules")),
        excluded=_names("exclude_modules", raw.get("exclude_modules") or []),
        layers=_layers(raw.get("layers_to_transform")),
        ranks={name: _rank(f"rank_pattern[{short(name)}]", rank) for name, rank in _pattern(raw, "rank_pattern")},
        alphas={
            name: _number(f"alpha_pattern[{short(name)}]", alpha) for name, alpha in _pattern(raw, "alpha_pattern")
        },
    )
    if peft.max_rank > max_rank:
        raise AdapterError(f"rank {peft.max_rank} is over --max-lora-rank {max_rank}")
    return peft


def _matches(module: str, name: str) -> bool:
    """Whether ``name`` is the module's, whole or from some dot on."""
    return module == name or module.endswith(f".{name}")


def _targets(value: Any) -> tuple[str, ...] | None:
    if value is None:
        raise AdapterError("target_modules is missing: it names the projections that the adapter changes")
    if value == "all-linear":
        return PROJECTIONS
    if isinstance(value, str):
        return None  # a regular expression: from a stranger's file none is run
    names = _names("target_modules", value)
    if unknown := [name for name in names if name.rpartition(".")[2] not in PROJECTIONS]:
        raise AdapterError(
            f"target_modules has {short(unknown)}: only {', '.join(PROJECTIONS)} are supported, in a layer"
        )
    return names


def _names(field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise AdapterError(f"{field} {short(value)} is no list of names: a regular expression is not supported")
    return tuple(value)


def _layers(value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    layers = [value] if isinstance(value, int) else value
    if not isinstance(layers, list) or not all(isinstance(one, int) for one in layers):
        raise AdapterError(f"layers_to_transform {short(value)} is no list of layer numbers")
    return frozenset(layers)


def _pattern(raw: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    pattern = raw.get(field) or {}
    if not isinstance(pattern, dict):
        raise AdapterError(f"{field} is no JSON object")
    for name in pattern:
        if not _PLAIN_PATTERN.fullmatch(name):
            raise AdapterError(
                f"{field} has {short(name)}: names of modules are supported, regular expressions are not"
            )
    return list(pattern.items())


def _rank(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterError(f"{field} is {short(value)}: a whole number of at least 1 is needed")
    return value


def _number(field: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise AdapterError(f"{field} is {short(value)}: a number is needed")
    return number


def short(value: Any, length: int = 80) -> str:
    """``value`` as a message shows what somebody else wrote: escaped, and not all of it where it is long."""
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."
