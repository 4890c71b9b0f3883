"""The engine on real models: what breaks harms nobody else, and a crowd gets what each request gets alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.adapter import Adapter
from tests.worker.adapters import random_adapter
from tests.worker.engine_bench import BLOCK, TABLE, Bench, running
from tests.worker.engine_load import Load, answers_alone, answers_in_a_crowd, check_engine, check_equal
from tests.worker.tiny_models import CPU, random_model, write_folder
from worker.detokenizer import TokenTable
from worker.loading import default_model_path, load_model
from worker.loading.tokenizer import load_tokenizer
from worker.model_runner import MODES, Mode, ModelRunner
from worker.peft import CONFIG_FILE, TENSORS_FILE
from worker.request import Failure

PROMPT = [100 + index for index in range(40)]
VOCAB_SIZE = 301
TINY = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ADAPTERS = [Adapter(name, name * 64) for name in "ab"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(random_model("llama", **TINY), tmp_path_factory.mktemp("tiny"))


def broken_runner(
    path: Path, token_ids: Iterable[int], *, dtype: str = "float32", num_blocks: int = 64, **settings: Any
) -> ModelRunner:
    """A model to which ``token_ids`` are no numbers; none of its scores is broken by that alone."""
    loaded = load_model(path, dtype=dtype, device=CPU)
    embedding = loaded.weights["model.embed_tokens.weight"]
    if loaded.config.tie_word_embeddings:
        loaded.weights["lm_head.weight"] = embedding.clone()
        loaded = replace(loaded, config=replace(loaded.config, tie_word_embeddings=False))
    embedding[list(token_ids)] = float("nan")
    return ModelRunner(loaded, num_blocks=num_blocks + 1, block_size=BLOCK, **settings)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", [3, 20, 38])
async def test_a_request_that_breaks_in_any_chunk_of_its_prompt_leaves_nothing_that_harms_others(
    folder: Path, mode: Mode, place: int
) -> None:
    broken = VOCAB_SIZE - 1
    bad_prompt = [*PROMPT[:place], broken, *PROMPT[place:]]
    prompts = [PROMPT, PROMPT[:place], PROMPT[:7], [*range(5, 30)]]
    with running(Bench(broken_runner(folder, [broken], mode=mode), budget=16)) as bench:
        bad = await bench.answer(bad_prompt)
        num_kept = len(bench.resident)
        after = [(await bench.answer(prompt, 40, ignore_eos=True)).token_ids() for prompt in prompts]
        bench.check_all_is_free()
    with running(Bench(broken_runner(folder, [broken], mode=mode), budget=16)) as bench:
        without = [(await bench.answer(prompt, 40, ignore_eos=True)).token_ids() for prompt in prompts]
    assert bad.ending is not None
    assert bad.ending.failure is Failure.POISONED
    assert num_kept == place // BLOCK  # of the chunks before the broken one
    assert [len(one) for one in without] == [40] * len(prompts)
    assert after == without


async def test_a_model_that_computes_no_numbers_for_anyone_dies_loudly(folder: Path) -> None:
    with running(Bench(broken_runner(folder, range(VOCAB_SIZE)))) as bench:
        answer = await bench.answer(PROMPT)
        while not bench.deaths:
            await asyncio.sleep(0.01)
    assert answer.ending is not None
    assert answer.ending.failure is Failure.STOPPED
    assert "no finite numbers" in str(bench.deaths[0])


async def add_adapters(bench: Bench, runner: ModelRunner, folder: Path) -> None:
    for seed, adapter in enumerate(ADAPTERS):
        files = random_adapter(folder / adapter.name, runner.config, rank=4, seed=seed, size=0.05)
        weights, _ = runner.lora_reader(4)((files / CONFIG_FILE).read_bytes(), (files / TENSORS_FILE).read_bytes())
        await asyncio.wrap_future(bench.engine.add_adapter(str(adapter), weights, len(ADAPTERS)))


async def fuzz(
    load: Load, crowded: ModelRunner, sole: ModelRunner, folder: Path, table: TokenTable = TABLE, **settings: Any
) -> None:
    """Bit for bit the same answers in a crowd, over few blocks, as alone, without a cache. One runner may be both."""
    with running(Bench(crowded, table=table, **settings)) as bench:
        await add_adapters(bench, crowded, folder)
        crowd = await answers_in_a_crowd(bench, load, 20)
    with running(Bench(sole, table=table, max_num_seqs=3, caching=False)) as other:
        await add_adapters(other, sole, folder)
        check_equal(load, crowd, await answers_alone(other, load))
    check_engine(bench)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For products so small that a second thread costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("num_asks", "num_wishes", "token_reuse_min", "num_host_blocks", "kv_cache_dtype"),
    [(2000, 400, 2, 16, "auto"), (200, 50, None, 0, "int8")],
)
async def test_in_deterministic_mode_a_crowd_gets_of_a_real_model_what_each_gets_alone(
    folder: Path,
    tmp_path: Path,
    num_asks: int,
    num_wishes: int,
    token_reuse_min: int | None,
    num_host_blocks: int,
    kv_cache_dtype: str,
) -> None:
    load = Load(
        12, VOCAB_SIZE, num_asks=num_asks, num_wishes=num_wishes, max_prompt=60, max_output=6, adapters=ADAPTERS
    )

    def runner(**more: int) -> ModelRunner:
        broken = [load.broken_token_id]
        return broken_runner(folder, broken, mode="deterministic", kv_cache_dtype=kv_cache_dtype, **more)

    crowded = runner(num_blocks=10, num_host_blocks=num_host_blocks)
    cache: dict[str, Any] = {"token_reuse_min": token_reuse_min, "num_host_blocks": num_host_blocks}
    await fuzz(load, crowded, runner(), tmp_path, num_blocks=10, budget=40, **cache)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_in_deterministic_mode_a_crowd_gets_of_smollm2_what_each_gets_alone(tmp_path: Path) -> None:
    path = default_model_path()
    load = Load(13, 49_152, num_asks=2000, num_wishes=500, max_prompt=120, max_output=8, adapters=ADAPTERS)
    table = TokenTable.from_tokenizer_json(load_tokenizer(path).tokenizer_json)
    runner = broken_runner(
        path, [load.broken_token_id], dtype="bfloat16", mode="deterministic", num_blocks=64, num_host_blocks=60
    )
    cache: dict[str, Any] = {"token_reuse_min": 4, "num_host_blocks": 60}
    await fuzz(load, runner, runner, tmp_path, table, num_blocks=24, budget=128, **cache)
