"""A multi-tenant chat load as JSON lines, reproducible from its seed.

    tenants.py [--seed 8] [--tenants 40] [--conversations 420] > tenants.jsonl

Each tenant has a system prompt of 2,000 to 4,000 tokens. Conversations choose a tenant by Zipf(1.0), arrive at 2 per
second and have up to 16 turns (5 on average) of 30 to 400 user and 30 to 300 answer tokens, with 3 s + Exp(40 s)
between them. A line: timestamp_ms, session, turn, tenant, token_ids (the whole prompt), output_token_ids,
output_tokens. Standard error tells the distinct blocks of 16 tokens, and how many each of 8 replicas holds at 20, 40
and 80 % of them.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

NUM_REPLICAS = 8


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 32000) for _ in range(count)]


def tenants_load(seed: int = 8, tenants: int = 40, conversations: int = 420) -> Iterator[dict[str, Any]]:
    """The trace's lines in order of time."""
    rng = random.Random(seed)
    system = [_tokens(rng, rng.randrange(2000, 4001)) for _ in range(tenants)]
    weights = [1 / (rank + 1) for rank in range(tenants)]
    order = list(range(tenants))
    rng.shuffle(order)
    turns = []
    start_s = 0.0
    for session in range(conversations):
        start_s += rng.expovariate(2.0)
        tenant = order[rng.choices(range(tenants), weights)[0]]
        at_s, prompt = start_s, list(system[tenant])
        for turn in range(min(16, 1 + int(rng.expovariate(1 / 4.5)))):
            prompt = prompt + _tokens(rng, rng.randrange(30, 400))
            answer = _tokens(rng, rng.randrange(30, 300))
            turns.append((at_s, session, turn, tenant, prompt, answer))
            prompt = prompt + answer
            at_s += 3 + rng.expovariate(1 / 40)
    for at_s, session, turn, tenant, prompt, answer in sorted(turns, key=lambda one: one[0]):
        yield {
            "timestamp_ms": round(at_s * 1000),
            "session": f"s{session}",
            "turn": turn,
            "tenant": f"t{tenant}",
            "token_ids": prompt,
            "output_token_ids": answer,
            "output_tokens": len(answer),
        }


def num_distinct_blocks(lines: list[dict[str, Any]], block_size: int = 16) -> int:
    """Blocks of prompts and answers that differ in their own tokens or in what comes before them."""
    distinct = set()
    for line in lines:
        whole, chain = line["token_ids"] + line["output_token_ids"], 0
        for end in range(block_size, len(whole) + 1, block_size):
            chain = hash((chain, tuple(whole[end - block_size : end])))
            distinct.add(chain)
    return len(distinct)


def main() -> None:
    parser = argparse.ArgumentParser(description="A multi-tenant chat load as JSON lines.")
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--tenants", type=int, default=40)
    parser.add_argument("--conversations", type=int, default=420)
    options = parser.parse_args()
    lines = list(tenants_load(options.seed, options.tenants, options.conversations))
    for line in lines:
        print(json.dumps(line, separators=(",", ":")))
    distinct = num_distinct_blocks(lines)
    shares = ", ".join(f"{share} % {distinct * share // (100 * NUM_REPLICAS)}" for share in (20, 40, 80))
    print(
        f"{len(lines)} requests, {sum(len(line['token_ids']) for line in lines)} prompt tokens, {distinct} distinct "
        f"blocks; blocks per replica of {NUM_REPLICAS}: {shares}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
