"""What a block size costs: tokens lost inside blocks, time to name them, memory to know where they are."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence

from cache.block_hash import HashScheme
from cache.prefix_cache import PrefixCache
from cache.prefix_index import PrefixIndex
from warmfront.replay.report import Costs
from warmfront.replay.trace import Turn

_NUM_HASHED = 64  # prompts that are hashed to see what that takes


def costs_of(turns: Sequence[Turn], scheme: HashScheme, num_blocks: int, caches: Sequence[PrefixCache]) -> Costs:
    """Of one setting: ``num_blocks`` in all replicas together, and their caches as a run left them."""
    return Costs(
        block_size=scheme.block_size,
        sub_block_loss=sub_block_loss(turns, scheme, num_blocks),
        hash_ms=hash_ms(turns, scheme),
        index_bytes=index_bytes(caches),
    )


def sub_block_loss(turns: Sequence[Turn], scheme: HashScheme, num_blocks: int) -> float | None:
    """The share of prompt tokens that one cache of the summed size would hit besides, were its blocks single tokens."""
    cache = PrefixCache(num_blocks + 1, scheme, token_reuse_min=1)
    for number, turn in enumerate(turns):
        if turn.token_ids is None:
            return None
        now = float(number)
        admission = cache.admit(number, scheme.chain(turn.token_ids), now)
        assert admission is not None
        answer = turn.output_token_ids
        if answer:
            cache.append(number, answer, now)
        cache.commit(number, turn.num_tokens + (len(answer) - 1 if answer else 0))
        cache.free(number, now)
        cache.take_events()
        cache.take_copies()
    return cache.stats.num_copied_tokens / cache.stats.num_query_tokens


def hash_ms(turns: Sequence[Turn], scheme: HashScheme) -> float:
    """Milliseconds to name the blocks of a mean prompt, at first sight, on this machine."""
    mean_tokens = sum(turn.num_tokens for turn in turns) / len(turns)
    sample = turns[:: max(1, len(turns) // _NUM_HASHED)]
    prompts = [turn.token_ids if turn.token_ids is not None else range(turn.num_tokens) for turn in sample]
    started = time.perf_counter()
    for prompt in prompts:
        scheme.keys(prompt)
    return (time.perf_counter() - started) * 1000 * mean_tokens / sum(map(len, prompts))


def index_bytes(caches: Sequence[PrefixCache]) -> int:
    """What one router keeps in memory to know what stands in ``caches``."""
    snapshots = [cache.snapshot() for cache in caches]
    was_tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    index = PrefixIndex()
    for snapshot in snapshots:
        index.load(snapshot.replica, snapshot)
    after, _ = tracemalloc.get_traced_memory()
    if not was_tracing:
        tracemalloc.stop()
    return after - before + index.table_bytes
