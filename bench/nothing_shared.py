"""What the engine costs where its cache saves nothing: caching on / off, and its Python beside the model's work.

    python -P bench/nothing_shared.py [--requests 24] [--prompt 256] [--output 32] [--rounds 5] [--threads 2]

No two prompts share a block. TTFT is of requests one at a time, throughput of all at once; caching on and off take
turns round by round, and the ratio is the median over the rounds. The scheduler's share is processor time of the
engine's thread between two steps over all of it, for decode steps of at least 8 rows. One JSON line each.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from statistics import median

import torch

from worker.detokenizer import TokenTable
from worker.loading import default_model_path, load_model
from worker.loading.tokenizer import load_tokenizer
from worker.model_runner import ModelRunner

sys.path.append(str(Path(__file__).parent / "lib"))  # not first: bench/cache.py is no package of ours
from serving import BLOCK_SIZE, Served, Server, made_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = (("requests", 24), ("prompt", 256), ("output", 32), ("rounds", 5), ("threads", 2))
    for name, default in defaults:
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = default_model_path()
    num_blocks = 1 + options.requests * -(-(options.prompt + options.output) // BLOCK_SIZE)
    loaded = load_model(path, dtype="bfloat16", device=torch.device("cpu"))
    model = ModelRunner(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    table = TokenTable.from_tokenizer_json(load_tokenizer(path).tokenizer_json)
    alone: dict[bool, list[float]] = {True: [], False: []}
    together: dict[bool, list[Served]] = {True: [], False: []}
    for number in range(options.rounds):
        for reuse in (True, False) if number % 2 else (False, True):
            one, many = asyncio.run(_round(options, model, table, num_blocks, number, reuse))
            alone[reuse].append(one)
            together[reuse].append(many)
    ttft = median(on / off for on, off in zip(alone[True], alone[False], strict=True))
    speed = median(
        on.requests_per_s / off.requests_per_s for on, off in zip(together[True], together[False], strict=True)
    )
    _emit("nothing shared: TTFT, caching on / off", median(alone[True]), median(alone[False]), ttft)
    on, off = (median(one.requests_per_s for one in together[reuse]) for reuse in (True, False))
    _emit("nothing shared: requests per second, caching on / off", on, off, speed)
    for rows in (8, 16):
        steps = [
            step
            for one in together[True]
            for step in one.steps
            if step.rows == step.tokens and rows <= step.rows < 2 * rows
        ]
        if steps:
            engine, model_s = median(one.engine_s for one in steps), median(one.model_s for one in steps)
            print(
                json.dumps(
                    {
                        "figure": f"the engine's Python per decode step of {rows} to {2 * rows - 1} rows",
                        "engine_ms": round(engine * 1e3, 3),
                        "model_ms": round(model_s * 1e3, 3),
                        "share": round(engine / (engine + model_s), 4),
                        "steps": len(steps),
                    }
                )
            )


async def _round(
    options: argparse.Namespace, model: ModelRunner, table: TokenTable, num_blocks: int, number: int, reuse: bool
) -> tuple[float, Served]:
    """Median TTFT of requests one at a time, and what became of all at once."""
    server = Server(model, table, num_blocks=num_blocks, reuse=reuse)
    try:
        prompts = [made_up(options.prompt, 1 + index + number * options.requests) for index in range(options.requests)]
        ttfts = [(await server.answer([prompt], 1)).ttft_s for prompt in prompts[:8]]
    finally:
        server.stop()
    server = Server(model, table, num_blocks=num_blocks, reuse=reuse)
    try:
        return median(ttfts), await server.answer(prompts, options.output)
    finally:
        server.stop()


def _emit(figure: str, on: float, off: float, ratio: float) -> None:
    print(json.dumps({"figure": figure, "on": round(on, 5), "off": round(off, 5), "ratio": round(ratio, 4)}))


if __name__ == "__main__":
    main()
