"""LoRA on the model: equal to PEFT's merged weights, and in mode deterministic the same bits in any company."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from tests.worker.adapters import adapter_config, adapter_tensors, random_adapter, write_adapter
from tests.worker.test_model_equality import FAMILIES, PROMPT
from tests.worker.tiny_models import logits_of, random_model, runner_of, slice_of, write_folder
from worker.batch import StepBatch
from worker.model_runner import ModelRunner
from worker.peft import CONFIG_FILE, PROJECTIONS, TENSORS_FILE, AdapterError

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def add(runner: ModelRunner, name: str, folder: Path, max_rank: int = 64) -> None:
    weights, _ = runner.lora_reader(max_rank)((folder / CONFIG_FILE).read_bytes(), (folder / TENSORS_FILE).read_bytes())
    runner.add_adapter(name, weights)


def peft_adapter(model: PreTrainedModel, folder: Path, **settings: Any) -> Tensor:
    """Saves a random adapter of PEFT's own for ``model``; the scores of the model with it merged. The model is lost."""
    config = LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": list(PROJECTIONS), **settings})
    adapted: Any = get_peft_model(model, config)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=random) * 0.15)
    adapted.save_pretrained(folder)
    merged = adapted.merge_and_unload()
    with torch.inference_mode():
        logits: Tensor = merged(torch.tensor([PROMPT])).logits[0]
    return logits


@pytest.mark.parametrize("mode", ["fast", "deterministic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_weights_merged_by_peft(family: str, mode: Any, tmp_path: Path) -> None:
    model_type, settings = FAMILIES[family]
    theirs = random_model(model_type, **settings)
    ours = runner_of(write_folder(theirs, tmp_path / "model"), mode=mode)
    wanted = peft_adapter(theirs, tmp_path / "adapter")
    add(ours, "a", tmp_path / "adapter")
    base = logits_of(ours, PROMPT)
    assert (wanted - base).abs().mean() > 0.1  # else closeness says nothing
    for cuts in ((), (16, 17, 40)):
        torch.testing.assert_close(logits_of(ours, PROMPT, cuts, "a"), wanted, atol=3e-4, rtol=1e-4)


SETTINGS: dict[str, dict[str, Any]] = {
    "attention alone": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "by a regular expression": {"target_modules": r".*\.(q_proj|down_proj)"},
    "rank-stabilised": {"use_rslora": True},
    "rank 1": {"r": 1, "lora_alpha": 3},
    "some layers": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "one layer": {"layers_to_transform": 1},
    "ranks and scales of their own": {
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 17},
        "alpha_pattern": {"v_proj": 40, "model.layers.2.self_attn.o_proj": 1},
    },
    "with exclusions": {"exclude_modules": ["gate_proj", "layers.0.self_attn.k_proj"]},
    "orthogonal at first": {"init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("what", SETTINGS)
def test_what_a_configuration_can_say_means_what_it_means_to_peft(what: str, tmp_path: Path) -> None:
    theirs = random_model("llama")
    ours = runner_of(write_folder(theirs, tmp_path / "model"))
    wanted = peft_adapter(theirs, tmp_path / "adapter", **SETTINGS[what])
    add(ours, "a", tmp_path / "adapter")
    torch.testing.assert_close(logits_of(ours, PROMPT, lora="a"), wanted, atol=3e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model("llama", hidden_size=72, head_dim=24)
    return write_folder(model, tmp_path_factory.mktemp("llama"))


def with_three(folder: Path, tmp_path: Path, **settings: Any) -> ModelRunner:
    """Adapters of different ranks and targets: a, b, c."""
    runner = runner_of(folder, num_blocks=128, **settings)
    kinds: dict[str, tuple[int, Sequence[str]]] = {
        "a": (8, PROJECTIONS),
        "b": (3, ATTENTION),
        "c": (21, ("down_proj",)),
    }
    for seed, (name, (rank, targets)) in enumerate(kinds.items()):
        add(runner, name, random_adapter(tmp_path / name, runner.config, rank=rank, targets=targets, seed=seed))
    return runner


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_adapters_and_the_base_in_one_step_give_the_bits_of_each_alone(
    folder: Path, dtype: str, tmp_path: Path
) -> None:
    runner = with_three(folder, tmp_path, mode="deterministic", dtype=dtype)
    names = ["a", None, "b", "a", "c", None]
    prompts = [PROMPT[start : start + length] for start, length in zip(range(6), (23, 40, 1, 7, 64, 5), strict=True)]
    alone = [logits_of(runner, prompt, lora=name) for name, prompt in zip(names, prompts, strict=True)]
    assert not torch.allclose(alone[0], logits_of(runner, prompts[0]), atol=0.1)
    assert torch.equal(alone[1], logits_of(runner, prompts[1]))
    tables = [range(1 + 10 * index, 11 + 10 * index) for index in range(6)]
    slices = [slice_of(prompt, 0, table, lora=name) for prompt, table, name in zip(prompts, tables, names, strict=True)]
    assert torch.equal(runner.all_logits(StepBatch(slices=slices)), torch.cat(alone))
    # And again as decode rows and chunks on warm blocks.
    last = [
        slice_of(prompt[-cut:], len(prompt) - cut, table, lora=name)
        for prompt, table, name, cut in zip(prompts, tables, names, (1, 1, 1, 5, 1, 2), strict=True)
    ]
    ends = [one[-len(piece.token_ids) :] for one, piece in zip(alone, last, strict=True)]
    assert torch.equal(runner.all_logits(StepBatch(slices=last)), torch.cat(ends))


def test_in_mode_fast_a_mixed_step_equals_each_alone_but_for_rounding(folder: Path, tmp_path: Path) -> None:
    runner = with_three(folder, tmp_path)
    names = ["a", None, "b", "c"]
    alone = [logits_of(runner, PROMPT[:30], lora=name) for name in names]
    slices = [slice_of(PROMPT[:30], 0, range(1 + 9 * i, 9 + 9 * i), lora=name) for i, name in enumerate(names)]
    torch.testing.assert_close(runner.all_logits(StepBatch(slices=slices)), torch.cat(alone), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", [1, 6, 40])
def test_in_bfloat16_an_adapter_is_as_close_to_float32_as_the_base_is(tmp_path: Path, rank: int) -> None:
    # Of a shape that the compiled kernel takes, where it is there.
    model = random_model("llama", hidden_size=64, head_dim=32, intermediate_size=80)
    folder = write_folder(model, tmp_path / "model")
    wide, narrow = runner_of(folder), runner_of(folder, dtype="bfloat16")
    path = random_adapter(tmp_path / "a", wide.config, rank=rank, size=0.1)
    for runner in (wide, narrow):
        add(runner, "a", path)
    errors = {}
    for name in (None, "a"):
        wanted, found = logits_of(wide, PROMPT, lora=name), logits_of(narrow, PROMPT, lora=name)
        errors[name] = ((found - wanted).std() / wanted.std()).item()
        chunks = torch.cat([logits_of(narrow, PROMPT, cuts, name)[-5:] for cuts in ((), (74,), (3, 70))])
        assert ((chunks - wanted[-5:].repeat(3, 1)).std() / wanted.std()).item() < 0.1
    assert errors["a"] < 3 * errors[None] < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cold_warm_and_chunked_runs_of_an_adapter_are_bit_identical(folder: Path, dtype: str, tmp_path: Path) -> None:
    runner = with_three(folder, tmp_path, mode="deterministic", dtype=dtype)
    for name in "abc":
        cold = logits_of(runner, PROMPT, lora=name)
        for cuts in ((1, 2, 3), (16, 48), (74,), (31, 32, 33, 70)):
            assert torch.equal(logits_of(runner, PROMPT, cuts, name), cold)
        warm = runner.all_logits(StepBatch(slices=[slice_of(PROMPT[-3:], 72, range(1, 60), lora=name)]))
        assert torch.equal(warm, cold[-3:])


def test_a_removed_adapter_leaves_the_base_as_it_was_and_may_come_back(folder: Path, tmp_path: Path) -> None:
    runner = with_three(folder, tmp_path, mode="deterministic")
    before, adapted = logits_of(runner, PROMPT), logits_of(runner, PROMPT, lora="a")
    for name in "abc":
        runner.remove_adapter(name)
    assert torch.equal(logits_of(runner, PROMPT), before)
    add(runner, "a", tmp_path / "a")
    assert torch.equal(logits_of(runner, PROMPT, lora="a"), adapted)


def test_half_precision_files_serve_as_well(folder: Path, tmp_path: Path) -> None:
    runner = runner_of(folder)
    for name, dtype in (("half", torch.float16), ("brain", torch.bfloat16)):
        tensors = {key: one.to(dtype) for key, one in adapter_tensors(runner.config).items()}
        add(runner, name, write_adapter(tmp_path / name, tensors, adapter_config()))
        wide = {key: one.float() for key, one in tensors.items()}
        add(runner, f"{name} wide", write_adapter(tmp_path / f"{name} wide", wide, adapter_config()))
        assert torch.equal(logits_of(runner, PROMPT, lora=name), logits_of(runner, PROMPT, lora=f"{name} wide"))


Q0, B0 = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")
WRONG_TENSORS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "a missing half": ({B0: None}, f"tensor '{B0}' is missing"),
    "a missing module": ({Q0: None, B0: None}, f"tensor '{Q0}' is missing"),
    "a wrong shape": ({Q0: torch.zeros(8, 71)}, r"shape \[8, 71\], \[8, 72\] is needed"),
    "another rank": ({Q0: torch.zeros(4, 72), B0: torch.zeros(96, 4)}, r"shape \[4, 72\], \[8, 72\]"),
    "no numbers": ({Q0: torch.full((8, 72), math.nan)}, "not finite"),
    "infinity": ({Q0: torch.full((8, 72), math.inf)}, "not finite"),
    "whole numbers": ({Q0: torch.zeros(8, 72, dtype=torch.int32)}, "of type torch.int32"),
    "a bias": ({B0.replace("weight", "bias"): torch.zeros(96)}, "belongs to no projection"),
    "a DoRA magnitude": (
        {Q0.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(96)},
        "belongs to no projection",
    ),
    "the head": ({"base_model.model.lm_head.lora_A.weight": torch.zeros(8, 72)}, "belongs to no projection"),
    "a layer too many": ({Q0.replace(".0.", ".3."): torch.zeros(8, 72)}, "belongs to no projection"),
    "a projection that is no target": (
        {Q0.replace("self_attn.q_proj", "mlp.up_proj"): torch.zeros(8, 72)},
        "is no target of the configuration",
    ),
    "nothing at all": ({}, "is missing"),
}


@pytest.mark.parametrize("what", WRONG_TENSORS)
def test_wrong_tensors_are_refused_by_name(what: str, folder: Path, tmp_path: Path) -> None:
    runner = runner_of(folder)
    changes, words = WRONG_TENSORS[what]
    tensors = adapter_tensors(runner.config, targets=ATTENTION) if changes else {}
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    path = write_adapter(tmp_path / "wrong", tensors, adapter_config(targets=ATTENTION))
    with pytest.raises(AdapterError, match=words):
        add(runner, "a", path)
    assert torch.isfinite(logits_of(runner, PROMPT[:5])).all()


def test_files_that_are_no_safetensors_and_scales_that_overflow_are_refused(folder: Path, tmp_path: Path) -> None:
    runner = runner_of(folder)
    path = random_adapter(tmp_path / "a", runner.config)
    (path / TENSORS_FILE).write_bytes((path / TENSORS_FILE).read_bytes()[:-7])
    with pytest.raises(AdapterError, match="cannot be read"):
        add(runner, "a", path)
    path = random_adapter(tmp_path / "b", runner.config, lora_alpha=1e300)
    with pytest.raises(AdapterError, match="too large"):
        add(runner, "b", path)
    with pytest.raises(AdapterError, match="rank 65 is over --max-lora-rank 64"):
        add(runner, "c", random_adapter(tmp_path / "c", runner.config, rank=65, targets=["q_proj"]))
