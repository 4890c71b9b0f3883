"""One long prefix shared by many requests, with reuse and without: tokens computed, and requests per second.

    python -P bench/shared_prefix.py [--requests 64] [--at-once 16] [--shared 1024] [--own 200] [--output 32]
                                     [--rounds 2] [--count-only] [--threads 2]

The engine, its scheduler and its prefix cache run as in a worker; all requests are there from the start, and the pool
is cold. Prints one JSON line per way and one with the ratios; the two ways take turns, and the best of ``--rounds``
counts. With ``--count-only`` no model runs: the counts are the same, and there are no times.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

import torch

from worker.detokenizer import TokenTable
from worker.loading import default_model_path, load_model
from worker.loading.tokenizer import load_tokenizer
from worker.model_runner import ModelRunner

sys.path.append(str(Path(__file__).parent / "lib"))  # not first: bench/cache.py is no package of ours
from serving import BLOCK_SIZE, Served, Server, made_up


async def run(options: argparse.Namespace, model: ModelRunner | None, table: TokenTable, reuse: bool) -> Served:
    server = Server(model, table, num_blocks=num_blocks(options), max_num_seqs=options.at_once, reuse=reuse)
    try:
        front = made_up(options.shared, 0)
        prompts = [front + made_up(options.own, 1 + number) for number in range(options.requests)]
        return await server.answer(prompts, options.output)
    finally:
        server.stop()


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
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path, model = default_model_path(), None
    if not options.count_only:
        loaded = load_model(path, dtype="bfloat16", device=torch.device("cpu"))
        model = ModelRunner(loaded, num_blocks=num_blocks(options), block_size=BLOCK_SIZE)
    table = TokenTable.from_tokenizer_json(load_tokenizer(path).tokenizer_json)
    best: dict[bool, Served] = {}
    for _ in range(1 if model is None else options.rounds):
        for reuse in (False, True):
            served = asyncio.run(run(options, model, table, reuse))
            if reuse not in best or served.seconds < best[reuse].seconds:
                best[reuse] = served
    for reuse, served in best.items():
        figures = {
            "figure": "shared prefix",
            "reuse": reuse,
            "prompt_tokens_computed": served.computed_prompt_tokens,
            "prompt_tokens": served.prompt_tokens,
            "cold_requests": served.num_cached.count(0),
            "preemptions": served.num_preemptions,
        }
        if model is not None:
            figures |= {"requests_per_s": round(served.requests_per_s, 3)}
        print(json.dumps(figures))
    plain, shared = best[False], best[True]
    ratios = {"computed_ratio": round(plain.computed_prompt_tokens / shared.computed_prompt_tokens, 2)}
    if model is not None:
        ratios["requests_per_s_ratio"] = round(shared.requests_per_s / plain.requests_per_s, 2)
    print(json.dumps({"figure": "shared prefix, with reuse / without"} | ratios))


if __name__ == "__main__":
    main()
