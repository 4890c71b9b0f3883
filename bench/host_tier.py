"""A prefix on the device, in host memory, or nowhere: time to the first token, in one run.

    python -P bench/host_tier.py [--tokens 1024 4096] [--rounds 3] [--kv-cache-dtype auto]

The packaged model, its prefix cache and its copies as in a worker, without the scheduler: a prompt is admitted, what it
needs is copied, and it is computed in chunks of 512 until its first token. All but its last 32 tokens are warm. Between
``device`` and ``host`` every block of the device is taken for something else. Cases take turns; the best of the rounds
counts. Times are CPU time of one thread, so that a busy machine says the same. Prints one JSON line per length:
milliseconds and ratios.
"""

import argparse
import itertools
import json
import time

import torch

from cache.block_hash import HashScheme
from cache.prefix_cache import PrefixCache
from worker.batch import SamplingParams, SequenceSlice, StepBatch
from worker.loading import default_model_path, load_model
from worker.model_runner import ModelRunner

BLOCK_SIZE = 16
STEP_TOKENS = 512
OWN_TOKENS = 32
GREEDY = SamplingParams(temperature=0)


class Bench:
    """One cache over one model; prompts one at a time."""

    def __init__(self, model: ModelRunner, num_host_blocks: int) -> None:
        self._model = model
        self._scheme = HashScheme(block_size=BLOCK_SIZE)
        self.cache = PrefixCache(model.kv.num_blocks, self._scheme, policy="lru", num_host_blocks=num_host_blocks)
        self._numbers = itertools.count()

    def first_token_s(self, token_ids: list[int]) -> tuple[float, int, int]:
        """CPU seconds from admission to the first token, tokens found, and how many of those in host memory."""
        number = next(self._numbers)
        chain = self._scheme.chain(token_ids)
        began = time.process_time()
        admission = self.cache.admit(number, chain, number)
        assert admission is not None
        self._model.copy(self.cache.take_copies())
        for start in range(admission.num_cached_tokens, len(token_ids), STEP_TOKENS):
            piece = token_ids[start : start + STEP_TOKENS]
            draws = start + len(piece) == len(token_ids)
            self._model.execute(
                StepBatch(
                    slices=[
                        SequenceSlice(
                            request_id="r",
                            token_ids=piece,
                            start=start,
                            block_ids=admission.block_ids,
                            sampling=GREEDY if draws else None,
                        )
                    ]
                )
            )
        took = time.process_time() - began
        self.cache.commit(number, len(token_ids))
        self.cache.free(number, number)
        return took, admission.num_cached_tokens, admission.num_host_tokens

    def take_every_block(self) -> float:
        """Something else needs the whole device; CPU seconds that the copies out take."""
        number = next(self._numbers)
        taken = self.cache.admit(number, self._scheme.chain([1] * (self.cache.num_free_blocks * BLOCK_SIZE)), number)
        assert taken is not None
        began = time.process_time()
        self._model.copy(self.cache.take_copies())
        took = time.process_time() - began
        self.cache.free(number, number)
        return took


def measure(model: ModelRunner, num_tokens: int, rounds: int) -> dict[str, object]:
    """The best time of each case for one length, and what a copy out took."""
    best = dict.fromkeys(("cold", "device", "host"), float("inf"))
    out_s, num_out = float("inf"), 0
    bench = Bench(model, num_host_blocks=model.kv.num_blocks)
    for number in range(rounds):
        front = [(index * index * 31 + 17 * index + 7919 * number) % 40_000 for index in range(num_tokens - OWN_TOKENS)]
        prompts = [front + [(index * 37 + 101 * tail) % 40_000 for index in range(OWN_TOKENS)] for tail in range(3)]
        assert bench.cache.reset()
        for case, prompt in zip(best, prompts, strict=True):
            if case == "host":
                num_out = bench.cache.num_cached_blocks * BLOCK_SIZE
                out_s = min(out_s, bench.take_every_block())
            took, num_cached, num_from_host = bench.first_token_s(prompt)
            assert (num_cached, num_from_host) == {
                "cold": (0, 0),
                "device": (len(front), 0),
                "host": (len(front), len(front)),
            }[case]
            best[case] = min(best[case], took)
    return {
        "tokens": num_tokens,
        "kv": model.kv.format.name,
        **{f"{case}_ms": round(1000 * seconds, 1) for case, seconds in best.items()},
        "device_to_cold": round(best["device"] / best["cold"], 4),
        "host_to_cold": round(best["host"] / best["cold"], 4),
        "host_to_device": round(best["host"] / best["device"], 3),
        "out_to_cold": round(out_s / num_out / (best["cold"] / num_tokens), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-dtype", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for num_tokens in options.tokens:
        loaded = load_model(default_model_path(), dtype="bfloat16", device=torch.device("cpu"))
        num_blocks = 1 + 2 * -(-num_tokens // BLOCK_SIZE)
        model = ModelRunner(
            loaded,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            kv_cache_dtype=options.kv_cache_dtype,
            num_host_blocks=num_blocks,
        )
        print(json.dumps(measure(model, num_tokens, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
