"""One long prefix shared by many requests, with reuse and without: tokens computed, and requests per second.

    python -P bench/shared_prefix.py [--requests 64] [--at-once 16] [--shared 1024] [--own 200] [--output 32]
                                     [--count-only] [--threads 2]

The engine, its scheduler and its prefix cache run as in a worker; all requests are there from the start. Prints one
JSON line per run and one with the ratios. With ``--count-only`` no model runs: the counts are the same, and there are
no times.
"""

import argparse
import asyncio
import json
import time
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from cache.block_hash import HashScheme
from cache.prefix_cache import BlockCopies, PrefixCache
from worker.batch import SamplingParams, SliceResult, StepBatch
from worker.detokenizer import TokenTable
from worker.engine import Ending, Engine, Piece, Request, StepReport
from worker.loading import default_model_path, load_model
from worker.loading.tokenizer import load_tokenizer
from worker.model_runner import ModelRunner
from worker.scheduler import Limits

BLOCK_SIZE = 16
STEP_TOKENS = 512


class Counting:
    """A runner that counts what it is asked to compute; without a model behind it, it draws the same token always."""

    def __init__(self, model: ModelRunner | None) -> None:
        self._model = model
        self.num_tokens = 0

    def copy(self, copies: Sequence[BlockCopies]) -> None:
        if self._model is not None:
            self._model.copy(copies)

    def execute(self, batch: StepBatch) -> list[SliceResult]:
        self.num_tokens += batch.num_tokens
        if self._model is not None:
            return self._model.execute(batch)
        return [SliceResult(token_id=None if one.sampling is None else 5) for one in batch.slices]


async def run(options: argparse.Namespace, model: ModelRunner | None, table: TokenTable, reuse: bool) -> dict[str, Any]:
    """All requests through one engine; the pool is new, so nothing is warm."""
    runner, cold, preemptions = Counting(model), 0, 0

    def on_step(report: StepReport) -> None:
        nonlocal cold, preemptions
        cold += sum(one.num_cached_tokens == 0 for one in report.admitted)
        preemptions += report.num_preemptions

    def on_death(error: BaseException) -> None:
        raise SystemExit(f"the engine died: {error}")

    engine = Engine(
        runner=runner,
        cache=PrefixCache(num_blocks(options), HashScheme(block_size=BLOCK_SIZE), reuse),
        limits=Limits(options.at_once, STEP_TOKENS, options.requests),
        table=table,
        eos_token_ids=frozenset(),
        on_step=on_step,
        on_death=on_death,
    )
    engine.start()
    loop, begin = asyncio.get_running_loop(), time.perf_counter()
    endings = [loop.create_future() for _ in range(options.requests)]
    front = [(index * index * 31 + 17 * index + 3) % 40_000 for index in range(options.shared)]
    for number, ending in enumerate(endings):
        own = [(index * 37 + 1009 * number + 7) % 40_000 for index in range(options.own)]

        def sink(item: Piece | Ending, ending: asyncio.Future[Ending] = ending) -> None:
            if isinstance(item, Ending):
                ending.set_result(item)

        prompt, greedy = array("i", front + own), SamplingParams(temperature=0)
        engine.submit(
            Request(id=str(number), token_ids=prompt, sampling=greedy, max_tokens=options.output, ignore_eos=True), sink
        )
    ended = await asyncio.gather(*endings)
    took = time.perf_counter() - begin
    engine.stop()
    if any(one.failure for one in ended):
        raise SystemExit("a request failed")
    decoded = sum(one.num_output_tokens - 1 for one in ended)  # the first token is drawn by the prefill
    figures: dict[str, Any] = {
        "reuse": reuse,
        "prompt_tokens_computed": runner.num_tokens - decoded,
        "prompt_tokens": len(ended) * (options.shared + options.own),
        "cold_requests": cold,
        "preemptions": preemptions,
    }
    return figures if model is None else figures | {"requests_per_s": round(len(ended) / took, 3)}


def num_blocks(options: argparse.Namespace) -> int:
    """Room for all that run at once without sharing, and scratch."""
    longest: int = options.shared + options.own + options.output
    at_once: int = options.at_once
    return 1 + at_once * -(-longest // BLOCK_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("requests", 64), ("at-once", 16), ("shared", 1024), ("own", 200), ("output", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--count-only", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path, model = default_model_path(), None
    if not options.count_only:
        loaded = load_model(path, dtype="bfloat16", device=torch.device("cpu"))
        model = ModelRunner(loaded, num_blocks=num_blocks(options), block_size=BLOCK_SIZE)
    table = TokenTable.from_tokenizer_json(load_tokenizer(path).tokenizer_json)
    plain, shared = (asyncio.run(run(options, model, table, reuse)) for reuse in (False, True))
    for figures in (plain, shared):
        print(json.dumps(figures))
    ratios = {"computed_ratio": round(plain["prompt_tokens_computed"] / shared["prompt_tokens_computed"], 2)}
    if model is not None:
        ratios["requests_per_s_ratio"] = round(shared["requests_per_s"] / plain["requests_per_s"], 2)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
