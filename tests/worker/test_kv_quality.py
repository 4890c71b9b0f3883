"""What a KV cache of one byte per number costs in quality: how often the likeliest token stays the same."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worker.tiny_models import CPU, logits_of, random_model, runner_of, write_folder
from worker.loading import LoadedModel, default_model_path, load_model
from worker.model_runner import ModelRunner

CONTINUATIONS = Path(__file__).parents[1] / "golden" / "smollm2_continuations.jsonl"
SURE = 0.25  # a lead of the likeliest token, in logits, that bfloat16's own rounding leaves alone
CUTS = range(64, 500, 64)


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model(default_model_path(), dtype="bfloat16", device=CPU)


def scores(loaded: LoadedModel, kv_cache_dtype: str, texts: Sequence[Sequence[int]]) -> Tensor:
    runner = ModelRunner(
        replace(loaded, weights=dict(loaded.weights)), num_blocks=34, block_size=16, kv_cache_dtype=kv_cache_dtype
    )
    cuts = [cut for cut in CUTS if cut < len(texts[0])]
    return torch.cat([logits_of(runner, text, cuts) for text in texts])


def agreement(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Share of positions with the same likeliest token: of all, and of those where ``wanted`` is sure of it."""
    same = found.argmax(dim=-1) == wanted.argmax(dim=-1)
    first, second = wanted.topk(2, dim=-1).values.unbind(dim=-1)
    return float(same.float().mean()), float(same[first - second > SURE].float().mean())


def compare(loaded: LoadedModel, num_tokens: int, least: float) -> None:
    texts = [json.loads(line)[:num_tokens] for line in CONTINUATIONS.read_text(encoding="utf-8").splitlines()]
    wanted = scores(loaded, "auto", texts)
    for kv_cache_dtype in ("int8", "fp8"):
        of_all, of_sure = agreement(scores(loaded, kv_cache_dtype, texts), wanted)
        print(
            f"{kv_cache_dtype}: {of_all:.4f} of {len(wanted)} greedy tokens as in bfloat16, {of_sure:.4f} of sure ones"
        )
        assert of_all >= least
        assert of_sure >= 0.99


def test_smollm2_names_the_same_greedy_tokens_with_one_byte_per_number(smollm2: LoadedModel) -> None:
    compare(smollm2, 80, 0.93)  # by chance so few positions are two or three points off


@pytest.mark.slow
def test_smollm2_names_97_percent_of_2000_greedy_tokens_with_one_byte_per_number(smollm2: LoadedModel) -> None:
    compare(smollm2, 500, 0.97)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("kv_cache_dtype", "largest_error"), [("int8", 0.02), ("fp8", 0.15)])
def test_scores_of_random_models_move_little(
    family: str, kv_cache_dtype: str, largest_error: float, tmp_path: Path
) -> None:
    folder = write_folder(random_model(family, head_dim=16), tmp_path)
    prompt = [(index * index * 7 + 3 * index + 5) % 301 for index in range(300)]
    wanted, found = (logits_of(runner_of(folder, kv_cache_dtype=name), prompt) for name in ("auto", kv_cache_dtype))
    error = float((found - wanted).std() / wanted.std())
    of_all, _ = agreement(found, wanted)
    print(f"{family} {kv_cache_dtype}: {of_all:.4f} of greedy tokens as in float32, relative error {error:.4f}")
    assert 0 < error <= largest_error
