"""What placing a request costs a router: naming its blocks, looking them up, choosing a replica. CPU of one thread.

    python -P bench/decision.py [--quick]

A prompt of 4,600 tokens on 8 and on 1,000 replicas and one of 128,000 tokens, with a front that was seen before and at
first sight. Caches are as the tenants load (traces/tenants.py) leaves those of 8 replicas. Of 1,000 the other 992 hold
as many blocks of other prompts; once more, 125 of them hold what one of the 8 does. ``hash_us`` is the time of the
hashes alone, in the same run.

Then the tenants load itself: which share of its requests had a known front, and what its decisions cost. And a chat of
64,000 tokens with its next turn, from messages to block keys: what the tokenizer's thread uses counts too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import runpy
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from warmfront_pb.v1 import common_pb2, inference_pb2, worker_pb2

from cache.block_hash import ROOT_KEY, HashScheme
from cache.events import Snapshot, Stored
from cache.prefix_index import PrefixIndex
from router.chain_memo import ChainMemo
from router.load import LoadBook
from router.placement import Placement
from router.tokenizer import ModelProfile
from warmfront.replay.settings import Settings
from warmfront.replay.simulation import simulate
from warmfront.replay.trace import Job, Turn, name_blocks
from worker.loading import default_model_path
from worker.loading.tokenizer import load_tokenizer

# bench/ is no package and not on the path: cache.py in it would hide ours.
tenants_load = runpy.run_path(str(Path(__file__).parent / "traces" / "tenants.py"))["tenants_load"]

PROMPT_TOKENS, LONG_PROMPT_TOKENS = 4_600, 128_000
NUM_REPLICAS, NUM_MANY_REPLICAS = 8, 1_000
KV_BLOCKS = 2_669  # of each replica: 40 % of the load's distinct blocks on 8
CHAT_TOKENS, CHAT_MESSAGES = 64_000, 80
KNOWN_GOAL_US, FIRST_SIGHT_GOAL_US, LONG_GOAL_US, MANY_GOAL_RATIO = 80, 40, 1_000, 2
NEXT_TURN_GOAL_RATIO = 0.2


class Router:
    """All of a router that takes part in a decision."""

    def __init__(self, scheme: HashScheme, snapshots: Iterable[Snapshot]) -> None:
        self.scheme = scheme
        self.memo = ChainMemo(scheme)
        self.index = PrefixIndex()
        self.caches: dict[str, common_pb2.CacheState] = {}
        for number, like in enumerate(snapshots):
            name = f"r{number}"
            blocks = max(KV_BLOCKS, like.num_blocks)
            self.caches[name] = common_pb2.CacheState(prefix_caching=True, kv_blocks=blocks, lru_age_s=30)
            self.index.load(name, Snapshot(name, like.generation, like.seq, like.runs))
        self.placement = Placement(self.index, LoadBook(), "warmfront", random.Random(8))

    def decide(self, packed: bytes) -> tuple[float, float, float]:
        """Microseconds of the memo, of the look-up alone, and of look-up and placement together."""
        began_ns = time.thread_time_ns()
        keys = self.memo.keys(packed)
        named_ns = time.thread_time_ns()
        self.index.match(keys)
        looked_up_ns = time.thread_time_ns()
        now = time.monotonic()
        placed = self.placement.place(len(packed) // 4, keys, self.scheme.block_size, self.caches, now)
        placed_ns = time.thread_time_ns()
        placed.ticket.close(now)
        steps = (named_ns - began_ns, looked_up_ns - named_ns, placed_ns - looked_up_ns)
        return steps[0] / 1000, steps[1] / 1000, steps[2] / 1000

    def hash_us(self, packed: bytes) -> float:
        began_ns = time.thread_time_ns()
        self.scheme.keys(packed)
        return (time.thread_time_ns() - began_ns) / 1000


def say(case: str, times: Sequence[tuple[float, float, float]], **more: Any) -> float:
    """One line; the median of memo, look-up and placement together, in microseconds."""
    totals = sorted(memo + place for memo, _, place in times)
    median = statistics.median(totals)
    memo, match, place = (statistics.median(part) for part in zip(*times, strict=True))
    figures = {"p50_us": median, "p99_us": totals[len(totals) * 99 // 100], "memo_us": memo, "match_us": match}
    figures |= {"placement_us": place - match, **more}
    rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"bench": "decision", "case": case, **rounded}), flush=True)
    return median


def others(snapshots: Sequence[Snapshot], rng: random.Random) -> Iterator[Snapshot]:
    """Caches of the same shape that hold other prompts."""
    for like in itertools.cycle(snapshots):
        mask = np.uint64(rng.getrandbits(64))

        def renamed(run: Stored, mask: np.uint64 = mask) -> Stored:
            keys = array("Q", (np.frombuffer(run.keys, dtype=np.uint64) ^ mask).tobytes())
            return Stored(run.parent ^ int(mask) if run.parent else run.parent, keys)

        yield Snapshot(like.replica, like.generation, like.seq, tuple(map(renamed, like.runs)))


def packed(tokens: array[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def fresh(rng: random.Random, count: int) -> bytes:
    return np.random.default_rng(rng.getrandbits(63)).integers(1000, 32_000, count, "<u4").tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description="What placing a request costs a router.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    quick = parser.parse_args().quick
    rounds = 100 if quick else 1000
    rng = random.Random(8)
    jobs, prompts = tenants()
    scheme = HashScheme()
    outcome = simulate(jobs, scheme, Settings(num_replicas=NUM_REPLICAS, kv_blocks=KV_BLOCKS, in_flight=32))
    snapshots = [cache.snapshot() for cache in outcome.final_caches]
    like = next(prompt for prompt in reversed(prompts) if len(prompt) >= 4 * PROMPT_TOKENS)[: 4 * PROMPT_TOKENS]

    def news() -> bytes:  # what a turn adds to a known front
        return like[: -4 * 100] + fresh(rng, 100)

    few = Router(scheme, snapshots)
    known_us = measure(few, "known front, 8 replicas", lambda: like, rounds, goal_us=KNOWN_GOAL_US)
    measure(few, "known front and 100 new tokens, 8 replicas", news, rounds)
    measure_first_sight(few, "first sight, 8 replicas", PROMPT_TOKENS, rounds, rng)
    many = Router(scheme, [*snapshots, *itertools.islice(others(snapshots, rng), NUM_MANY_REPLICAS - NUM_REPLICAS)])
    goal_us = MANY_GOAL_RATIO * known_us
    measure(many, "known front, 1,000 replicas", lambda: like, rounds, goal_us=goal_us)
    measure_first_sight(many, "first sight, 1,000 replicas", PROMPT_TOKENS, rounds, rng)
    alike = Router(scheme, snapshots * (NUM_MANY_REPLICAS // NUM_REPLICAS))
    num_holders = len(alike.index.match(scheme.keys(like)))
    measure(alike, f"known front, 1,000 replicas, {num_holders} of them hold some of it", lambda: like, rounds)
    long = fresh(rng, LONG_PROMPT_TOKENS)
    first, *rest = snapshots
    holder = Snapshot(first.replica, first.generation, first.seq, (*first.runs, Stored(ROOT_KEY, scheme.keys(long))))
    one = Router(scheme, [holder, *rest])
    measure(one, "known front of 128,000 tokens, 8 replicas", lambda: long, rounds // 4, goal_us=LONG_GOAL_US)
    measure_first_sight(one, "first sight of 128,000 tokens, 8 replicas", LONG_PROMPT_TOKENS, rounds // 10, rng)
    tell_tenants(Router(scheme, snapshots), prompts)
    asyncio.run(measure_turns(scheme, 3 if quick else 11, rng))


def measure(router: Router, case: str, prompt: Callable[[], bytes], rounds: int, goal_us: float | None = None) -> float:
    router.decide(prompt())
    times = [router.decide(prompt()) for _ in range(rounds)]
    totals = statistics.median(memo + place for memo, _, place in times)
    more = {} if goal_us is None else {"goal_us": goal_us, "goal_met": totals <= goal_us}
    return say(case, times, **more)


def measure_first_sight(router: Router, case: str, num_tokens: int, rounds: int, rng: random.Random) -> None:
    times, hash_us = [], []
    for _ in range(max(5, rounds // 4)):
        prompt = fresh(rng, num_tokens)
        hash_us.append(router.hash_us(prompt))
        times.append(router.decide(prompt))
    hashes_us = statistics.median(hash_us)
    over_us = statistics.median(memo + place for memo, _, place in times) - hashes_us
    goals = {"goal_us": FIRST_SIGHT_GOAL_US, "goal_met": over_us <= FIRST_SIGHT_GOAL_US}
    say(case, times, hash_us=hashes_us, over_hash_us=over_us, **(goals if num_tokens == PROMPT_TOKENS else {}))


def tell_tenants(router: Router, prompts: Sequence[bytes]) -> None:
    """The load's decisions in order, by how much of the prompt's front the memo knew."""
    kinds: dict[str, list[tuple[float, float, float]]] = {"known front": [], "first sight": []}
    num_blocks = num_hashed = 0
    for prompt in prompts:
        before = router.memo.num_hashed_blocks
        times = router.decide(prompt)
        blocks = len(prompt) // (4 * router.scheme.block_size)
        hashed = router.memo.num_hashed_blocks - before
        num_blocks, num_hashed = num_blocks + blocks, num_hashed + hashed
        kinds["first sight" if hashed == blocks else "known front"].append(times)
    for kind, times in kinds.items():
        share = len(times) / len(prompts)
        say(f"tenants load, {kind}", times, share_of_requests=share)
    say(
        "tenants load",
        [one for times in kinds.values() for one in times],
        share_of_blocks_hashed=num_hashed / num_blocks,
    )


async def measure_turns(scheme: HashScheme, rounds: int, rng: random.Random) -> None:
    """A long chat at first sight, and the next turn of it, by the packaged model's template and tokenizer."""
    files = load_tokenizer(default_model_path())
    model = worker_pb2.GetModelResponse(max_model_len=2 * CHAT_TOKENS, vocab_size=65_536)
    model.tokenizer_json, model.chat_template = files.tokenizer_json, files.chat_template or ""
    profile, memo = ModelProfile(model), ChainMemo(scheme)
    words = [word[1:] for word in json.loads(files.tokenizer_json)["model"]["vocab"] if word[1:].isalpha()]

    async def name(chat: inference_pb2.Chat) -> tuple[float, int]:
        began_ns = time.process_time_ns()
        packed = await profile.chat_ids(chat)
        memo.keys(packed)
        return (time.process_time_ns() - began_ns) / 1e6, len(packed) // 4

    first, second = [], []
    for _ in range(rounds):
        chat = inference_pb2.Chat()
        for number in range(CHAT_MESSAGES):
            text = " ".join(rng.choices(words, k=CHAT_TOKENS // CHAT_MESSAGES))
            chat.messages.add(role=("user", "assistant")[number % 2], content=text)
        first.append(await name(chat))
        chat.messages.add(role="assistant", content="A short answer.")
        chat.messages.add(role="user", content="And then?")
        second.append(await name(chat))
    profile.close()
    first_ms, second_ms = (statistics.median(ms for ms, _ in found) for found in (first, second))
    figures = {"tokens": statistics.median(count for _, count in first), "first_ms": first_ms, "next_ms": second_ms}
    figures |= {"ratio": second_ms / first_ms, "goal": NEXT_TURN_GOAL_RATIO}
    rounded = {name: round(value, 3) for name, value in figures.items()}
    goal_met = second_ms <= NEXT_TURN_GOAL_RATIO * first_ms
    print(json.dumps({"bench": "decision", "case": "next turn of a long chat", **rounded, "goal_met": goal_met}))


def tenants() -> tuple[list[Job], list[bytes]]:
    turns = [
        Turn(
            at_s=line["timestamp_ms"] / 1000,
            session=line["session"],
            num_tokens=len(line["token_ids"]),
            num_output_tokens=line["output_tokens"],
            token_ids=array("i", line["token_ids"]),
            output_token_ids=array("i", line["output_token_ids"]),
        )
        for line in tenants_load()
    ]
    return name_blocks(turns, HashScheme()), [packed(turn.token_ids) for turn in turns if turn.token_ids is not None]


if __name__ == "__main__":
    main()
