"""The engine's own speed on this machine, beside transformers and the physical floors, in one run.

    python bench/engine.py [--threads 2] [--repeats 5] [--quick] [--clock wall|cpu]

Prints one JSON line per figure. A figure is the best of several rounds, in which ours and theirs take turns, so that
noise on a shared machine hits both; ``ratio`` is ours / theirs for times and for tokens per second alike.
On a machine that others load too, ``--threads 1 --clock cpu`` counts processor time and still compares fairly.
Everything runs in mode fast, bfloat16, on the packaged SmolLM2; nothing is compiled.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from worker.batch import SamplingParams, SequenceSlice, StepBatch
from worker.loading import LoadedModel, default_model_path, load_model
from worker.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0)
BLOCK_SIZE = 16
CHUNK_TOKENS = 2048
WARM_TOKENS = 32
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64


clock: Callable[[], float] = time.perf_counter


class Ours:
    """The runner, driven as the scheduler drives it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def prefill(self, prompt: Sequence[int], num_cached: int = 0) -> int:
        """First token of ``prompt``, its first ``num_cached`` tokens warm."""
        blocks = range(1, 2 + len(prompt) // BLOCK_SIZE)
        token = None
        for start in range(num_cached, len(prompt), CHUNK_TOKENS):
            chunk = prompt[start : start + CHUNK_TOKENS]
            sampling = GREEDY if start + len(chunk) == len(prompt) else None
            token = self._step([self._slice(chunk, start, blocks, sampling)])[0]
        assert token is not None
        return token

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Seconds for ``num_tokens`` steps of all ``prompts`` together, prefill not counted."""
        per_prompt = -(-(len(prompts[0]) + num_tokens) // BLOCK_SIZE)
        tables = [range(1 + index * per_prompt, 1 + (index + 1) * per_prompt) for index in range(len(prompts))]
        tokens = self._step(
            [self._slice(prompt, 0, table, GREEDY) for prompt, table in zip(prompts, tables, strict=True)]
        )
        begin = clock()
        for position in range(len(prompts[0]), len(prompts[0]) + num_tokens):
            rows = [self._slice([token], position, table, GREEDY) for token, table in zip(tokens, tables, strict=True)]
            tokens = self._step(rows)
        return clock() - begin

    def _step(self, slices: list[SequenceSlice]) -> list[Any]:
        return [result.token_id for result in self._runner.execute(StepBatch(slices=slices))]

    @staticmethod
    def _slice(
        token_ids: Sequence[int], start: int, blocks: Sequence[int], sampling: SamplingParams | None
    ) -> SequenceSlice:
        return SequenceSlice(request_id="", token_ids=token_ids, start=start, block_ids=blocks, sampling=sampling)


class Theirs:
    """transformers with its default attention (SDPA) and a dynamic cache."""

    def __init__(self, loaded: LoadedModel) -> None:
        config = loaded.config
        shape = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_context,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=True,
        )
        self._model = LlamaForCausalLM(shape).to(loaded.dtype).eval()
        self._model.load_state_dict(loaded.weights, strict=False)
        self._model.tie_weights()
        self._warm: dict[int, DynamicCache] = {}

    def prefill(self, prompt: Sequence[int], num_cached: int = 0) -> int:
        cache = self._cache_of(prompt, num_cached) if num_cached else DynamicCache()
        token = int(self._forward([prompt[num_cached:]], cache)[0])
        if num_cached:
            cache.crop(-len(prompt) + num_cached)  # negative: so many tokens off the end
        return token

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        cache = DynamicCache()
        tokens = self._forward(prompts, cache)
        begin = clock()
        for _ in range(num_tokens):
            tokens = self._forward(tokens[:, None].tolist(), cache)
        return clock() - begin

    def _cache_of(self, prompt: Sequence[int], num_cached: int) -> DynamicCache:
        if num_cached not in self._warm:
            self._warm[num_cached] = DynamicCache()
            self._forward([prompt[:num_cached]], self._warm[num_cached])
        return self._warm[num_cached]

    @torch.inference_mode()
    def _forward(self, token_ids: Sequence[Sequence[int]], cache: DynamicCache) -> Tensor:
        out = self._model(torch.tensor(token_ids), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(dim=-1)


class NoAttention:
    """What a step costs when attention is free."""

    name = "none"

    def plan(self, spans: Any, num_rows: int) -> None:
        return None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, plan: None) -> Tensor:
        return queries.flatten(1)


def seconds(work: Callable[[], Any]) -> float:
    begin = clock()
    work()
    return clock() - begin


def best(works: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """The best of ``repeats`` rounds for each of ``works``, which take turns; one round before is not counted."""
    rounds = [[work() for work in works] for _ in range(repeats + 1)]
    return [min(times) for times in zip(*rounds[1:], strict=True)]


def emit(figure: str, unit: str, **values: float) -> None:
    print(
        json.dumps({"figure": figure, "unit": unit, **{name: round(value, 4) for name, value in values.items()}}),
        flush=True,
    )


def floors(repeats: int) -> None:
    size = 2048
    a, b = torch.randn(size, size).bfloat16(), torch.randn(size, size).bfloat16()
    (took,) = best([lambda: seconds(lambda: a @ b)], repeats)
    emit("floor: bf16 matmul 2048", "GFLOP/s", value=2 * size**3 / took / 1e9)
    big = torch.ones(64 * 2**20)
    (took,) = best([lambda: seconds(lambda: big.sum())], repeats)
    emit("floor: memory read", "GB/s", value=big.numel() * 4 / took / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the short prompts and small batches only")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    if options.clock == "cpu":
        global clock
        clock = time.process_time
    torch.set_num_threads(options.threads)
    path, device = default_model_path(), torch.device("cpu")
    loaded = load_model(path, dtype="bfloat16", device=device)
    theirs = Theirs(loaded)
    runner = ModelRunner(loaded, num_blocks=600, block_size=BLOCK_SIZE)
    ours = Ours(runner)
    emit("setting", options.clock, threads=options.threads, repeats=options.repeats)
    floors(options.repeats)
    prompt = [(index * index * 31 + 17 * index + 3) % 49000 for index in range(4096)]

    lengths = (512,) if options.quick else (512, 2048, 4096)
    for length in lengths:
        cold = prompt[:length]
        mine, other = best(
            [lambda: seconds(lambda: ours.prefill(cold)), lambda: seconds(lambda: theirs.prefill(cold))],  # noqa: B023
            max(2, options.repeats * 512 // length),
        )
        emit(f"TTFT cold {length}", "ms", ours=mine * 1e3, transformers=other * 1e3, ratio=mine / other)
    for length in lengths:
        warm, cached = prompt[:length], length - WARM_TOKENS
        ours.prefill(warm)
        mine, other = best(
            [
                lambda: seconds(lambda: ours.prefill(warm, cached)),  # noqa: B023
                lambda: seconds(lambda: theirs.prefill(warm, cached)),  # noqa: B023
            ],
            options.repeats,
        )
        emit(f"TTFT warm {length}", "ms", ours=mine * 1e3, transformers=other * 1e3, ratio=mine / other)
    for size in (1, 8) if options.quick else (1, 8, 32):
        prompts = [prompt[index * 7 : index * 7 + PROMPT_TOKENS] for index in range(size)]
        mine, other = best(
            [lambda: ours.decode(prompts, OUTPUT_TOKENS), lambda: theirs.decode(prompts, OUTPUT_TOKENS)],  # noqa: B023
            max(2, options.repeats // 2),
        )
        rate, other_rate = size * OUTPUT_TOKENS / mine, size * OUTPUT_TOKENS / other
        emit(f"decode batch {size}", "tokens/s", ours=rate, transformers=other_rate, ratio=rate / other_rate)

    free = ModelRunner(load_model(path, dtype="bfloat16", device=device), num_blocks=250, block_size=BLOCK_SIZE)
    free._attention = NoAttention()  # the floor under every backend
    (took,) = best([lambda: seconds(lambda: Ours(free).prefill(prompt[:32]))], options.repeats)
    emit("floor: 32-token prefill without attention", "ms", value=took * 1e3)
    for size in (1, 8, 32):
        prompts = [prompt[:PROMPT_TOKENS]] * size
        (took,) = best([lambda: Ours(free).decode(prompts, 16)], 2)  # noqa: B023
        emit(f"floor: decode batch {size} without attention", "tokens/s", value=size * 16 / took)


if __name__ == "__main__":
    main()
