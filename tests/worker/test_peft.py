"""An adapter's configuration: what is honoured, and the name of what is not."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from peft import LoraConfig

from tests.worker.adapters import adapter_config
from worker.peft import AdapterError, read_config


def read(**more: Any) -> Any:
    return read_config(json.dumps(adapter_config(**more)).encode(), 64)


def test_ranks_and_scales_are_those_of_the_most_fitting_entry() -> None:
    peft = read(rank=8, rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.self_attn.q_proj": 6}, use_rslora=True)
    first, second = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
    assert (peft.rank_of(first), peft.rank_of("model.layers.0.mlp.up_proj"), peft.max_rank) == (2, 8, 8)
    assert peft.scale_of(first) == pytest.approx(8 / math.sqrt(2))
    assert peft.scale_of(second) == pytest.approx(6 / math.sqrt(2))


def test_targets_are_whole_names_or_their_ends_in_the_chosen_layers() -> None:
    peft = read(targets=["q_proj", "model.layers.3.mlp.up_proj"], layers_to_transform=[1], exclude_modules=["k_proj"])
    assert peft.has("model.layers.1.self_attn.q_proj", 1)
    assert not peft.has("model.layers.0.self_attn.q_proj", 0)
    assert peft.has("model.layers.3.mlp.up_proj", 3)
    assert not peft.has("model.layers.1.self_attn.v_proj", 1)
    assert read(target_modules="any|thing").has("model.layers.1.self_attn.v_proj", 1) is None


REFUSED: dict[str, dict[str, Any]] = {
    "rank 65 is over --max-lora-rank 64": {"rank_pattern": {"q_proj": 65}},
    "peft_type 'IA3'": {"peft_type": "IA3"},
    "bias 'all'": {"bias": "all"},
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "lora_bias": {"lora_bias": True},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "trainable_token_indices": {"trainable_token_indices": [1]},
    "layer_replication": {"layer_replication": [[0, 2]]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [7]},
    "a_setting_of_next_year": {"a_setting_of_next_year": 3},
    "init_lora_weights 'pissa_niter_4'": {"init_lora_weights": "pissa_niter_4"},
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "target_modules is missing": {"target_modules": None},
    "exclude_modules": {"exclude_modules": ".*"},
    "layers_pattern": {"layers_pattern": "h"},
    "layers_to_transform": {"layers_to_transform": "all"},
    "regular expressions": {"rank_pattern": {"^q.*": 3}},
    r"rank_pattern\['q_proj'\] is 0": {"rank_pattern": {"q_proj": 0}},
    "r is 0": {"r": 0},
    "r is 2.5": {"r": 2.5},
    "r is True": {"r": True},
    "lora_alpha is 'much'": {"lora_alpha": "much"},
    "lora_alpha is 1000": {"lora_alpha": 10**400},
    "use_rslora": {"use_rslora": "no"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        read(**REFUSED[words])


@pytest.mark.parametrize(
    "more",
    [
        {"\ud800": 1},
        {"\ud800" * 5000: "\ud800" * 5000},
        {"peft_type": "\ud800"},
        {"bias": "\ud800" * 5000},
        {"init_lora_weights": ["\ud800" * 5000]},
        {"target_modules": ["\ud800" * 5000, "a\nb"]},
        {"exclude_modules": "\ud800"},
        {"layers_pattern": "\ud800"},
        {"rank_pattern": {"\ud800" * 5000: 1}},
        {"rank_pattern": {"q" * 5000: "\ud800"}},
        {"alpha_pattern": {"q_proj": "\ud800"}},
    ],
)
def test_what_a_file_says_is_shown_escaped_and_short(more: dict[str, Any]) -> None:
    with pytest.raises(AdapterError) as caught:
        read(**more)
    assert len(str(caught.value).encode()) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff", b"[" * 100_000, b'{"peft_type": "LORA"}'])
def test_files_that_are_no_configuration_are_refused(data: bytes) -> None:
    with pytest.raises(AdapterError):
        read_config(data, 64)


def test_everything_that_peft_writes_by_default_is_accepted() -> None:
    config = LoraConfig(r=4, lora_alpha=2, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    raw = {**config.to_dict(), "target_modules": ["q_proj"], "a_setting_of_next_year": None}
    peft = read_config(json.dumps(raw).encode(), 64)
    assert (peft.rank, peft.alpha, peft.targets, peft.layers) == (4, 2.0, ("q_proj",), None)
