"""What a step promises: a result per slice, bit-identical rows in deterministic mode, failures that stay alone."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.events import Tier
from cache.prefix_cache import BlockCopies
from tests.worker.tiny_models import CPU, GREEDY, logits_of, random_model, runner_of, slice_of, write_folder
from worker.batch import SamplingParams, StepBatch
from worker.decode_graphs import sizes
from worker.loading import load_model
from worker.model_runner import MODES, Mode, ModelRunner, SelfTestError

PROMPT = [(index * index * 11 + index + 2) % 301 for index in range(700)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model("llama", max_position_embeddings=1024, hidden_size=72, head_dim=24)
    return write_folder(model, tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_cold_warm_chunked_and_mixed_runs_are_bit_identical_in_deterministic_mode(
    folder: Path, dtype: str, kv_cache_dtype: str
) -> None:
    runner = runner_of(folder, mode="deterministic", dtype=dtype, num_blocks=128, kv_cache_dtype=kv_cache_dtype)
    runner.self_test()
    cold = logits_of(runner, PROMPT)
    for cuts in ((512,), (1, 2, 3), (300, 513, 699), (16, 496, 690)):
        assert torch.equal(logits_of(runner, PROMPT, cuts), cold)
    table, other = range(1, 60), range(60, 120)
    warm = runner.all_logits(StepBatch(slices=[slice_of(PROMPT[-3:], 697, table)]))
    assert torch.equal(warm, cold[-3:])
    neighbours = [
        slice_of(PROMPT[:9], 0, other),
        slice_of(PROMPT[640:641], 640, table),
        slice_of(PROMPT[:77], 0, [*range(70, 80)]),
    ]
    mixed = runner.all_logits(StepBatch(slices=[*neighbours, slice_of(PROMPT[641:], 641, table)]))
    assert torch.equal(mixed[9], cold[640])
    assert torch.equal(mixed[9 + 1 + 77 :], cold[641:])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_blocks_copied_in_a_step_serve_as_if_they_had_been_computed(folder: Path, kv_cache_dtype: str) -> None:
    runner = runner_of(folder, mode="deterministic", block_size=16, kv_cache_dtype=kv_cache_dtype)
    cold = logits_of(runner, PROMPT[:28])  # blocks 1 and 2
    runner.copy([BlockCopies([2], [9], 10)])
    results = runner.execute(StepBatch(slices=[slice_of(PROMPT[26:28], 26, [1, 9], GREEDY)]))
    assert results[0].token_id == int(cold[-1].argmax())
    assert torch.equal(runner.all_logits(StepBatch(slices=[slice_of(PROMPT[26:28], 26, [1, 9])])), cold[26:])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_blocks_that_were_in_host_memory_serve_bit_for_bit_as_before(folder: Path, kv_cache_dtype: str) -> None:
    runner = runner_of(folder, mode="deterministic", block_size=16, kv_cache_dtype=kv_cache_dtype, num_host_blocks=3)
    assert runner.host_tokens_per_s() > 0
    cold = logits_of(runner, PROMPT[:36])  # blocks 1 to 3
    runner.copy([BlockCopies([2, 1], [3, 1], 16, Tier.DEVICE, Tier.HOST)])
    logits_of(runner, PROMPT[100:136])  # the same blocks, overwritten
    runner.copy([BlockCopies([1, 3], [7, 5], 16, Tier.HOST, Tier.DEVICE)])
    warm = runner.all_logits(StepBatch(slices=[slice_of(PROMPT[32:36], 32, [7, 5, 9])]))
    assert torch.equal(warm, cold[32:])


def test_a_chunk_that_draws_nothing_has_an_empty_result(folder: Path) -> None:
    runner = runner_of(folder)
    results = runner.execute(
        StepBatch(slices=[slice_of(PROMPT[:5], 0, [1]), slice_of(PROMPT[:7], 0, [2], GREEDY), slice_of([3], 0, [3])])
    )
    assert [result.token_id is None for result in results] == [True, False, True]
    assert runner.execute(StepBatch(slices=[])) == []


def with_a_broken_token(folder: Path, **settings: Any) -> ModelRunner:
    """Whatever reads token 13 comes out as no number."""
    loaded = load_model(folder, dtype="float32", device=CPU)
    loaded.weights["model.embed_tokens.weight"][13] = float("nan")
    return ModelRunner(loaded, num_blocks=16, block_size=16, **settings)


def assert_block_is_empty(runner: ModelRunner, block: int) -> None:
    for kept in (runner.kv.data, runner.kv.scales):
        assert kept is None or (torch.isfinite(kept).all() and not kept[:, :, block].any())


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_a_request_with_scores_that_are_no_numbers_fails_alone_and_leaves_nothing_behind(
    folder: Path, kv_cache_dtype: str
) -> None:
    runner = with_a_broken_token(folder, kv_cache_dtype=kv_cache_dtype)
    sound, broken = slice_of(PROMPT[:3], 0, [1], GREEDY), slice_of([5, 13, 7], 0, [2], GREEDY)
    alone = runner.execute(StepBatch(slices=[sound]))[0]
    results = runner.execute(StepBatch(slices=[broken, sound]))
    assert results[1] == alone
    assert results[0].token_id is None
    assert "no finite numbers" in (results[0].error or "")
    assert_block_is_empty(runner, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_a_chunk_that_draws_nothing_fails_by_itself_too(folder: Path, mode: Mode, kv_cache_dtype: str) -> None:
    runner = with_a_broken_token(folder, mode=mode, kv_cache_dtype=kv_cache_dtype)
    sound, broken = slice_of(PROMPT[:3], 0, [1]), slice_of([5, 13, *PROMPT[:14]], 16, [3, 2])
    results = runner.execute(StepBatch(slices=[broken, sound, slice_of(PROMPT[:3], 0, [4], GREEDY)]))
    assert ["finite" in (result.error or "") for result in results] == [True, False, False]
    assert results[2].token_id is not None
    assert_block_is_empty(runner, 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_is_broken_off_leaves_no_block_that_holds_no_numbers(folder: Path, mode: Mode) -> None:
    runner = with_a_broken_token(folder, mode=mode)
    out_of_range = slice_of(PROMPT[:3], 0, [1], SamplingParams(temperature=0, logit_bias={10_000: 1.0}))
    with pytest.raises(IndexError):
        runner.execute(StepBatch(slices=[slice_of([5, 13, 7], 0, [2], GREEDY), out_of_range]))
    assert_block_is_empty(runner, 1)
    assert_block_is_empty(runner, 2)


@pytest.mark.parametrize("mode", MODES)
def test_the_self_test_finds_out_that_a_model_computes_no_numbers(folder: Path, mode: Mode) -> None:
    loaded = load_model(folder, dtype="float32", device=CPU)
    loaded.weights["model.norm.weight"][5] = float("nan")
    with pytest.raises(SelfTestError, match="no finite numbers in float32"):
        ModelRunner(loaded, num_blocks=16, block_size=16, mode=mode).self_test()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(2, 1), (2, 16), (64, 16)])
def test_the_self_test_of_a_sound_model_passes_in_the_smallest_store(
    folder: Path, num_blocks: int, block_size: int
) -> None:
    runner_of(folder, num_blocks=num_blocks, block_size=block_size).self_test()


def test_prompt_logprobs_are_the_same_whole_and_in_chunks(folder: Path) -> None:
    runner = runner_of(folder, mode="deterministic")
    prompt = PROMPT[:40]
    wanted = torch.log_softmax(logits_of(runner, prompt), dim=-1)

    def logprobs(bounds: list[int]) -> list[Any]:
        found: list[Any] = []
        for start, stop in pairwise(bounds):
            sampling = GREEDY if stop == len(prompt) else None
            one = slice_of(
                prompt[start:stop], start, range(1, 9), sampling, prompt_token_ids=prompt, num_prompt_logprobs=2
            )
            found += runner.execute(StepBatch(slices=[one]))[0].prompt_logprobs
        return found

    whole = logprobs([0, 40])
    assert [one.token_id for one in whole] == prompt[1:]
    assert whole[6].logprob == pytest.approx(float(wanted[6, prompt[7]]), abs=1e-6)
    assert whole[6].top[0][1] == pytest.approx(float(wanted[6].max()), abs=1e-6)
    assert len(whole[6].top) == 2
    assert logprobs([0, 7, 33, 40]) == whole


def test_a_seeded_draw_depends_on_neither_batch_nor_chunks(folder: Path) -> None:
    runner = runner_of(folder, mode="deterministic")
    sampling = SamplingParams(temperature=1.3, top_p=0.9, seed=7)
    alone = runner.execute(StepBatch(slices=[slice_of(PROMPT[:30], 0, [1, 2], sampling)]))[0]
    others = [slice_of(PROMPT[: 3 + n], 0, [10 + n], SamplingParams(seed=n)) for n in range(5)]
    runner.execute(StepBatch(slices=[slice_of(PROMPT[:20], 0, [3, 4])]))
    mixed = runner.execute(StepBatch(slices=[*others, slice_of(PROMPT[20:30], 20, [3, 4], sampling)]))[-1]
    assert mixed == alone


def test_a_store_of_another_size_serves_as_the_first_did(folder: Path) -> None:
    runner = runner_of(folder, mode="deterministic")
    cold = logits_of(runner, PROMPT[:40])
    runner.resize(7, num_host_blocks=0)
    assert runner.kv.num_blocks == 7
    assert torch.equal(logits_of(runner, PROMPT[:40]), cold)


def test_decode_steps_are_recorded_for_every_number_of_rows_up_to_the_largest() -> None:
    assert sizes(1) == [1, 2, 4, 8]
    assert sizes(12) == [1, 2, 4, 8, 16]
    assert sizes(32) == [1, 2, 4, 8, 16, 24, 32]


def test_deterministic_mode_refuses_a_backend_whose_shapes_are_not_fixed(folder: Path) -> None:
    with pytest.raises(ValueError, match="sdpa"):
        runner_of(folder, mode="deterministic", attention="tiled")
    with pytest.raises(ValueError, match="no attention backend 'flash'"):
        runner_of(folder, attention="flash")


def test_kv_bytes_per_token_follow_the_shape_and_what_is_kept(folder: Path) -> None:
    runner = runner_of(folder, dtype="bfloat16")
    assert runner.kv_bytes_per_token == 2 * 3 * 2 * 24 * 2 == runner.config.kv_bytes_per_token(2)
    wide = runner_of(folder, dtype="bfloat16", kv_cache_dtype="float32")
    assert wide.kv_bytes_per_token == 2 * runner.kv_bytes_per_token
    for name in ("int8", "fp8"):
        small = runner_of(folder, dtype="bfloat16", kv_cache_dtype=name)
        assert small.kv_bytes_per_token == 2 * 3 * 2 * (24 + 2) == small.config.kv_bytes_per_token(1, 2)


def test_a_kv_cache_dtype_that_is_unknown_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ValueError, match="unknown KV cache dtype 'int4'; there are: auto, bfloat16, float32, int8"):
        runner_of(folder, kv_cache_dtype="int4")
