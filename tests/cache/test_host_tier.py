"""Blocks that leave the device for host memory, and come back."""

import random

import pytest

from cache.block_hash import BlockHash, HashScheme
from cache.events import Cleared, RemovalReason, Removed, Stored, Tier
from cache.prefix_cache import BlockCopies, PrefixCache
from cache.prefix_index import Outcome, PrefixIndex
from cache.retention import Retention, RetentionBudget
from tests.cache.support import SCHEME, EventLog, chain, resident_of, run

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def tiered(num_blocks: int = 5, num_host_blocks: int = 8, **more: object) -> PrefixCache:
    more.setdefault("policy", "lru")
    return PrefixCache(num_blocks, SCHEME, num_host_blocks=num_host_blocks, **more)  # type: ignore[arg-type]


def test_what_the_device_evicts_comes_back_by_copies_and_is_told_by_tier() -> None:
    cache = tiered()
    first = chain(range(9)).keys
    run(cache, "a", range(9))  # blocks 1 to 3, of which 1 and 2 are full
    cache.take_events()
    run(cache, "b", range(100, 116))  # all four: block 2 goes before block 1
    batch = cache.take_events()
    assert batch is not None
    assert batch.events[:2] == (
        Stored(0, first, HOST),
        Removed(first[::-1], RemovalReason.DEMOTED, DEVICE),
    )
    assert cache.take_copies() == [BlockCopies([2, 1], [1, 2], 4, DEVICE, HOST)]
    assert cache.match(chain(range(9))) == 8
    assert (cache.num_cached_blocks, cache.num_host_cached_blocks) == (4, 2)

    admission = cache.admit("c", chain(range(9)), 1.0)
    assert admission is not None
    assert (admission.num_cached_tokens, admission.num_host_tokens) == (8, 8)
    out, back = cache.take_copies()
    assert (out.source_tier, out.target_tier) == (DEVICE, HOST)
    assert back == BlockCopies([2, 1], list(admission.block_ids[:2]), 4, HOST, DEVICE)
    batch = cache.take_events()
    assert batch is not None
    assert batch.events[-1] == Stored(0, first, DEVICE)
    assert cache.stats.num_host_hit_tokens == 8
    cache.check_invariants()


def test_hits_on_the_device_go_before_those_in_host_memory() -> None:
    cache = tiered()
    run(cache, "a", range(12), 0)
    run(cache, "b", [9] * 4, 1)  # the fourth block
    run(cache, "c", [8] * 4, 2)  # takes the end of a's chain
    admission = cache.admit("d", chain(range(13)), 3)
    assert admission is not None
    assert (admission.num_cached_tokens, admission.num_host_tokens) == (12, 4)
    assert list(admission.block_ids[:2]) == [1, 2]


def test_a_block_that_came_back_costs_no_copy_when_it_goes_again() -> None:
    cache = tiered()
    run(cache, "a", range(16), 0)
    run(cache, "b", range(100, 116), 1)
    run(cache, "a again", range(16), 2)
    cache.take_copies()
    cache.take_events()
    run(cache, "c", range(200, 216), 3)
    assert cache.stats.num_demoted_blocks == 4 + 4 + 4
    assert cache.take_copies() == [], "three had come back, the last was computed again: all stand there still"


def test_doubles_give_way_before_what_stands_in_host_memory_alone() -> None:
    cache = tiered(num_blocks=5, num_host_blocks=7)
    for number in range(4):
        run(cache, number, range(100 * number, 100 * number + 8), number)  # two blocks each: 0 and 1 leave the device
    run(cache, "0 again", range(9), 4)  # in both tiers now; 2 and half of 3 left for it, and host memory is full
    run(cache, "4", range(400, 404), 5)  # where the ninth token stood
    assert cache.num_host_cached_blocks == 7
    run(cache, "5", range(500, 504), 6)  # the rest of 3 leaves the device
    assert cache.num_host_cached_blocks == 7
    assert [cache.match(chain(range(100 * number, 100 * number + 9))) for number in range(4)] == [8] * 4
    assert cache.stats.num_evicted_blocks == 0


def test_when_host_memory_is_short_ends_of_chains_are_lost_and_remembered() -> None:
    cache = tiered(num_blocks=6, num_host_blocks=2)
    run(cache, "a", range(20), now=10)
    cache.take_events()
    run(cache, "b", range(100, 120), now=25)
    batch = cache.take_events()
    assert batch is not None
    keys = chain(range(20)).keys
    assert batch.events[:3] == (
        Stored(0, keys[:2], HOST),
        Removed(keys[:1:-1], RemovalReason.EVICTED, DEVICE),
        Removed(keys[1::-1], RemovalReason.DEMOTED, DEVICE),
    )
    assert cache.match(chain(range(21))) == 8
    found = cache.explain(chain(range(21)))
    assert (found.reason, found.num_matched_tokens) == ("evicted", 8)
    assert found.eviction is not None
    assert (found.eviction.culprit, found.eviction.idle_s) == ("b", 15)
    assert (cache.stats.num_demoted_blocks, cache.stats.num_evicted_blocks) == (2, 3)


def test_the_age_of_a_cache_is_that_of_what_is_lost_next() -> None:
    cache = tiered(num_blocks=3, num_host_blocks=2)
    run(cache, "a", range(8), now=10)
    run(cache, "b", range(100, 104), now=20)
    assert cache.lru_age_s(30) == 0, "host memory has room"
    run(cache, "c", range(200, 208), now=40)
    assert cache.lru_age_s(50) == 40, "the end of a's chain"
    assert cache.stats.num_evicted_blocks == 1


def test_a_waiting_prompt_renews_its_front_in_both_tiers() -> None:
    cache = tiered(num_blocks=4, num_host_blocks=4)
    run(cache, "a", range(12), 0)
    run(cache, "b", range(100, 112), 1)
    run(cache, "c", range(200, 204), 2)  # host memory is full: a's three blocks and the end of b's
    cache.renew(chain(range(13)), 3)
    run(cache, "d", range(300, 304), 4)
    assert cache.match(chain(range(13))) == 12
    assert cache.match(chain(range(100, 113))) == 8


def test_a_prompt_never_loses_in_host_memory_what_it_is_about_to_get_from_there() -> None:
    cache = tiered(num_blocks=5, num_host_blocks=4)
    run(cache, "a", range(16), 0)
    run(cache, "b", range(100, 116), 1)  # both full: bringing a back means sending b out
    admission = cache.admit("c", chain([*range(16)]), 2)
    assert admission is not None
    assert (admission.num_cached_tokens, admission.num_host_tokens) == (12, 12)
    cache.check_invariants()


def test_salt_and_adapter_are_not_crossed_in_host_memory() -> None:
    cache = tiered()
    run(cache, "a", range(9))
    run(cache, "b", range(100, 116))
    assert cache.match(chain(range(9), salt="x")) == 0
    assert cache.match(chain(range(9))) == 8


def test_a_retained_block_that_must_leave_the_device_is_an_ordinary_one_in_host_memory() -> None:
    cache = tiered(retention=RetentionBudget(2, 2))
    run(cache, "a", range(9), 0, retention=[Retention(8, 100.0)], tenant="t")
    assert cache.num_retained_blocks == 2
    run(cache, "b", range(100, 116), 1)
    assert cache.num_retained_blocks == 0
    assert cache.match(chain(range(9))) == 8


def test_a_reset_forgets_both_tiers() -> None:
    cache = tiered()
    run(cache, "a", range(9))
    run(cache, "b", range(100, 116))
    assert cache.reset()
    batch = cache.take_events()
    assert batch is not None
    assert batch.events[-1] == Cleared()
    assert (cache.num_cached_blocks, cache.num_host_cached_blocks, cache.take_copies()) == (0, 0, [])
    assert cache.snapshot().runs == ()
    assert run(cache, "c", range(9)) == 0


def test_without_prefix_caching_there_is_no_host_tier() -> None:
    cache = PrefixCache(5, SCHEME, enabled=False, num_host_blocks=8)
    run(cache, "a", range(9))
    run(cache, "b", range(100, 116))
    assert (cache.num_host_blocks, cache.take_copies(), cache.take_events()) == (0, [], None)


def test_less_than_no_host_block_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 blocks"):
        PrefixCache(5, SCHEME, num_host_blocks=-1)


def test_an_index_that_reads_every_event_equals_one_that_loads_the_snapshot() -> None:
    rng = random.Random(3)
    cache = tiered(num_blocks=24, num_host_blocks=40, replica="w0", generation="g")
    index, log = PrefixIndex(), EventLog()
    trunks = [[rng.randrange(99) for _ in range(60)] for _ in range(5)]
    for step in range(600):
        trunk = rng.choice(trunks)
        tokens = [*trunk[: rng.randrange(1, 60)], *(rng.randrange(99) for _ in range(rng.randrange(9)))]
        run(cache, step, tokens, step)
        batch = cache.take_events()
        if batch is not None:
            assert index.apply("w0", batch) is Outcome.APPLIED
            log.read(batch)
        if step % 100 == 99:
            index.check_invariants()
            fresh = PrefixIndex()
            fresh.load("w0", cache.snapshot())
            for tier in Tier:
                assert log.tiers[tier] == resident_of(cache.snapshot(), tier)
                assert index.num_blocks("w0", tier) == fresh.num_blocks("w0", tier) == len(log.tiers[tier])
            for one in trunks:
                prompt = chain([*one, 0])
                depths = index.match(prompt.keys).get("w0")
                assert depths == fresh.match(prompt.keys).get("w0")
                assert (depths.total if depths else 0) * 4 == cache.match(prompt)
    assert cache.stats.num_host_hit_tokens > 1000


class Memory:
    """Two tiers of blocks that hold, for each slot, the front of the prompt up to it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tiers: dict[Tier, dict[int, list[object]]] = {tier: {} for tier in Tier}

    def do(self, copies: list[BlockCopies]) -> None:
        for some in copies:
            for source, target in zip(some.sources, some.targets, strict=True):
                kept = self.tiers[some.source_tier][source][: some.num_tokens]
                into = self.tiers[some.target_tier].setdefault(target, [None] * self.size)
                into[: some.num_tokens] = kept

    def compute(self, block_ids: list[int], tokens: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            block = self.tiers[DEVICE].setdefault(block_ids[position // self.size], [None] * self.size)
            block[position % self.size] = hash(tuple(tokens[: position + 1]))


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash_cbor"])
@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(16, 24), (12, 3), (30, 90)])
def test_under_churn_every_block_of_both_tiers_holds_what_its_hash_says(
    algorithm: str, num_blocks: int, num_host_blocks: int
) -> None:
    """Requests run beside one another, are cut in chunks, preempted and cancelled; copies come before each step."""
    rng = random.Random(num_blocks)
    scheme = HashScheme(algorithm, 4, "seed")
    cache = PrefixCache(num_blocks, scheme, num_host_blocks=num_host_blocks, token_reuse_min=1, policy="slru")
    memory = Memory(4)
    expected: dict[BlockHash, list[int]] = {}
    running: dict[int, tuple[list[int], list[int], int]] = {}  # tokens, table, computed
    trunks = [[rng.randrange(3) for _ in range(24)] for _ in range(4)]
    for step in range(1500):
        now = float(step)
        if len(running) < 3:
            trunk = rng.choice(trunks)
            tokens = [*trunk[: rng.randrange(1, 24)], *(rng.randrange(3) for _ in range(rng.randrange(6)))]
            prompt = chain(tokens, scheme=scheme)
            for depth, name in enumerate(prompt.hashes):
                expected[name] = [hash(tuple(tokens[: depth * 4 + offset + 1])) for offset in range(4)]
            admission = cache.admit(step, prompt, now)
            if admission is not None:
                running[step] = (tokens, admission.block_ids, admission.num_cached_tokens)
        memory.do(cache.take_copies())
        for name, (tokens, table, computed) in list(running.items()):
            end = min(len(tokens), computed + rng.randrange(1, 9))
            for position in range(computed):
                held = memory.tiers[DEVICE][table[position // 4]][position % 4]
                assert held == hash(tuple(tokens[: position + 1])), "KV of another prefix"
            memory.compute(table, tokens, computed, end)
            cache.commit(name, end)
            running[name] = (tokens, table, end)
            if end == len(tokens) or rng.random() < 0.1:
                cache.free(name, now, recompute=False)
                del running[name]
        for block, block_hash in cache.cached_block_hashes().items():
            assert memory.tiers[DEVICE][block] == expected[block_hash]
        for block, block_hash in cache.host_block_hashes().items():
            assert memory.tiers[HOST][block] == expected[block_hash]
        if step % 50 == 0:
            cache.check_invariants()
            cache.take_events()
    assert cache.stats.num_host_hit_tokens > 50
    assert cache.stats.num_demoted_blocks > 100
