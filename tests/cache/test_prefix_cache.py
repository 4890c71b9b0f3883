"""What a request finds, what it leaves, and what is told of it."""

import random

import pytest

from cache.block_hash import HashScheme, extra_keys
from cache.events import RemovalReason, Removed, Stored
from cache.history import EvictionHistory
from cache.prefix_cache import PrefixCache
from tests.cache.support import SCHEME, CollidingScheme, EventLog, chain, resident_of, run


def test_the_last_token_is_always_computed_again() -> None:
    cache = PrefixCache(10, SCHEME)
    assert run(cache, 0, range(8)) == 0
    assert run(cache, 1, range(8)) == 4
    assert run(cache, 2, range(9)) == 8
    assert cache.match(chain(range(4))) == 0


@pytest.mark.parametrize(("shared", "reused"), [(17, 16), (33, 32), (37, 32), (49, 48)])
def test_prompts_reuse_the_whole_blocks_of_what_they_share(shared: int, reused: int) -> None:
    scheme = HashScheme(block_size=16)
    cache = PrefixCache(20, scheme)
    assert run(cache, 0, [*range(shared), *[900] * 20]) == 0
    assert run(cache, 1, [*range(shared), *[901] * 20]) == reused


def test_looking_changes_nothing_and_tells_nothing() -> None:
    cache = PrefixCache(10, SCHEME)
    run(cache, 0, range(8))
    cache.take_events()
    before = cache.free_queue()
    for _ in range(100):
        cache.match(chain(range(9)))
        cache.pending(chain(range(9)))
        cache.explain(chain(range(9)))
    assert cache.free_queue() == before
    assert cache.take_events() is None


def test_nothing_is_visible_before_it_is_computed() -> None:
    cache = PrefixCache(20, SCHEME)
    cache.admit("a", chain(range(9)))
    assert cache.match(chain(range(9))) == 0
    assert cache.pending(chain([*range(8), 5])) == 8, "but it is known to be coming"
    assert cache.pending(chain([0, 1, 2, 3, 9, 9, 9, 9, 9])) == 4
    assert cache.pending(chain([5, 5, 5, 5, 5])) == 0
    cache.commit("a", 5)
    assert cache.match(chain(range(9))) == 4
    assert cache.pending(chain(range(9))) == 4
    cache.commit("a", 9)
    assert (cache.match(chain(range(9))), cache.pending(chain(range(9)))) == (8, 0)
    cache.check_invariants()


def test_two_equal_requests_of_one_step_never_read_each_others_unwritten_blocks() -> None:
    cache = PrefixCache(20, SCHEME)
    first, second = cache.admit("a", chain(range(9))), cache.admit("b", chain(range(9)))
    assert first is not None and second is not None
    assert not set(first.block_ids) & set(second.block_ids)
    cache.commit("a", 9)
    cache.commit("b", 9)
    cache.check_invariants()
    events = cache.take_events()
    assert events is not None
    assert [len(event.keys) for event in events.events if isinstance(event, Stored)] == [2], "told once"


def test_a_request_that_ends_early_takes_what_it_was_computing_off_the_list() -> None:
    cache = PrefixCache(20, SCHEME)
    cache.admit("a", chain(range(9)))
    cache.free("a")
    assert cache.pending(chain(range(9))) == 0
    assert cache.match(chain(range(9))) == 0
    assert cache.num_free_blocks == 19


def test_when_blocks_are_short_nothing_changes() -> None:
    cache = PrefixCache(6, SCHEME)
    run(cache, 0, range(12))
    cache.admit("a", chain(range(9)))
    cache.commit("a", 9)
    cache.take_events()
    before = (cache.free_queue(), cache.cached_block_hashes(), cache.stats.num_query_tokens)
    assert cache.admit("b", chain([*range(8), *[7] * 12])) is None
    assert not cache.append("a", [5] * 12)
    assert (cache.free_queue(), cache.cached_block_hashes(), cache.stats.num_query_tokens) == before
    assert cache.num_tokens("a") == 9
    assert cache.take_events() is None
    cache.check_invariants()


def test_a_prompt_larger_than_the_pool_is_short_for_ever() -> None:
    assert PrefixCache(4, SCHEME).admit("a", chain(range(13))) is None
    assert PrefixCache(4, SCHEME).admit("a", chain(range(12))) is not None


def test_blocks_that_cache_nothing_are_taken_before_cached_ones() -> None:
    cache = PrefixCache(8, SCHEME)
    run(cache, 0, range(6))  # one full block and a partial one
    run(cache, 1, range(100, 120))
    assert cache.match(chain(range(6))) == 4


def test_the_end_of_a_chain_goes_first_and_the_cold_branch_before_the_hot_one() -> None:
    """A-B-C and A-B-D: the branch not asked for lately loses its last block, the shared front stays."""
    cache = PrefixCache(8, SCHEME, policy="lru")
    front = [*[1] * 4, *[2] * 4]
    run(cache, "C", [*front, *[3] * 4], now=1)
    run(cache, "D", [*front, *[4] * 4], now=2)
    run(cache, "C again", [*front, *[3] * 4, 0], now=3)
    run(cache, "flood", [9] * 16, now=4)
    assert cache.match(chain([*front, *[3] * 4, 0])) == 12
    assert cache.match(chain([*front, *[4] * 4, 0])) == 8


def test_a_hit_renews_a_block_so_a_shared_prompt_outlives_one_shot_prompts() -> None:
    for policy in ("lru", "slru"):
        cache = PrefixCache(12, SCHEME, policy=policy)  # type: ignore[arg-type]
        system = list(range(8))
        run(cache, "first", system)
        for number in range(50):
            run(cache, f"one-shot {number}", [100 + number] * 12, now=number)
            assert run(cache, number, [*system, number, number], now=number) == 8


def test_under_slru_a_flood_between_two_hits_does_not_wash_a_hot_prefix_away() -> None:
    """A third of the pool is flooded through ten times; plain LRU loses the prefix, segmented LRU keeps it."""
    kept = {}
    for policy in ("lru", "slru"):
        cache = PrefixCache(30, SCHEME, policy=policy)  # type: ignore[arg-type]
        system = list(range(20))
        run(cache, "first", system)
        run(cache, "second", [*system, 1])
        for number in range(50):
            run(cache, f"flood {number}", [100 + number] * 24, now=number)
        kept[policy] = cache.match(chain([*system, 1]))
    assert kept == {"lru": 0, "slru": 20}


def test_what_the_next_waiting_request_will_hit_is_not_evicted_for_another() -> None:
    for renewed in (True, False):
        cache = PrefixCache(9, SCHEME)
        run(cache, "P", [1] * 12, now=1)
        run(cache, "Q", [2] * 12, now=2)
        if renewed:
            cache.renew(chain([*[1] * 12, 0]), now=3)
        run(cache, "other", [3] * 16, now=4)
        kept = cache.match(chain([*[1] * 12, 0])), cache.match(chain([*[2] * 12, 0]))
        assert kept == ((12, 4) if renewed else (4, 12))


def test_preemption_is_counted_as_recompute_and_never_as_a_hit() -> None:
    cache = PrefixCache(20, SCHEME)
    cache.admit("a", chain(range(9)))
    cache.commit("a", 9)
    cache.free("a", recompute=True)
    admission = cache.admit("a", chain(range(9)))
    assert admission is not None and admission.num_cached_tokens == 8
    stats = cache.stats
    assert (stats.num_query_tokens, stats.num_hit_tokens, stats.num_recomputed_tokens) == (9, 0, 1)
    cache.free("a", recompute=True)
    cache.free("a")  # cancelled while it waited
    with pytest.raises(KeyError):
        cache.free("a")
    run(cache, "a", range(9))
    assert cache.stats.num_query_tokens == 18


def test_hits_are_counted_from_the_same_value_that_answers_carry() -> None:
    cache = PrefixCache(20, SCHEME)
    rng = random.Random(1)
    total = sum(run(cache, number, [rng.randrange(2) for _ in range(14)]) for number in range(40))
    assert cache.stats.num_hit_tokens == total > 0
    assert cache.stats.num_query_tokens == 40 * 14


def test_synthetic_traffic_is_apart() -> None:
    cache = PrefixCache(20, SCHEME)
    run(cache, 0, range(9), synthetic=True)
    assert cache.stats.num_query_tokens == 0
    assert run(cache, 1, range(9)) == 8, "it warms all the same"


def test_salt_adapter_and_image_divide_the_cache() -> None:
    cache = PrefixCache(40, SCHEME)
    tokens = list(range(9))
    kinds = [
        None,
        extra_keys(9, 4, cache_salt="x"),
        extra_keys(9, 4, lora=("x", "/x@1")),
        extra_keys(9, 4, lora=("x", "/x@2")),
        extra_keys(9, 4, media=[("x", 0, 3)]),
    ]
    for name, extra in enumerate(kinds):
        admission = cache.admit(name, SCHEME.chain(tokens, extra))
        assert admission is not None and admission.num_cached_tokens == 0
        cache.commit(name, 9)
    for extra in kinds:
        assert cache.match(SCHEME.chain(tokens, extra)) == 8
    late = extra_keys(9, 4, media=[("x", 4, 3)])
    assert cache.match(SCHEME.chain(tokens, late)) == 4, "text before the image is shared"


def test_decoded_blocks_are_found_by_the_next_turn() -> None:
    cache = PrefixCache(20, SCHEME)
    prompt, answer = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]
    cache.admit("turn 1", chain(prompt))
    cache.commit("turn 1", 5)
    for token in answer:
        assert cache.append("turn 1", [token])
        cache.commit("turn 1", cache.num_tokens("turn 1") - 1)
    cache.free("turn 1")
    events = cache.take_events()
    assert events is not None
    told = [key for event in events.events if isinstance(event, Stored) for key in event.keys]
    following = chain([*prompt, *answer, 11])
    assert told == list(following.keys)
    assert cache.match(following) == 8


def test_with_caching_off_blocks_come_and_go_and_nothing_else_happens() -> None:
    cache = PrefixCache(6, SCHEME, enabled=False)
    for number in range(5):
        assert run(cache, number, range(12)) == 0
    assert cache.admit("a", chain(range(24))) is None
    assert cache.take_events() is None
    assert cache.snapshot().runs == ()
    assert (cache.num_cached_blocks, cache.match(chain(range(12))), cache.pending(chain(range(12)))) == (0, 0, 0)
    assert cache.reset()
    assert cache.last_seq == 0
    assert cache.stats.num_query_tokens == 0


def test_what_cannot_be_admitted_is_an_error() -> None:
    cache = PrefixCache(6, SCHEME)
    cache.admit("a", chain([1]))
    with pytest.raises(ValueError, match="'a' is running"):
        cache.admit("a", chain([1]))
    with pytest.raises(ValueError, match="no tokens"):
        cache.admit("b", chain([]))
    with pytest.raises(ValueError, match="hashed by HashScheme"):
        cache.admit("b", HashScheme(block_size=8).chain([1]))
    with pytest.raises(ValueError, match="5 tokens computed of 1"):
        cache.commit("a", 5)
    with pytest.raises(ValueError, match="1 blocks"):
        PrefixCache(1, SCHEME)
    with pytest.raises(ValueError, match="'fifo'"):
        PrefixCache(9, SCHEME, policy="fifo")  # type: ignore[arg-type]


def test_under_a_colliding_hash_no_request_gets_anothers_blocks() -> None:
    scheme = CollidingScheme()
    cache = PrefixCache(20, scheme)
    assert run(cache, 0, [1] * 12) == 0
    assert run(cache, 1, [2] * 12) == 0, "another prompt of the same hash"
    assert cache.stats.num_collisions == 2, "the second block of the first request, the first of the second"
    assert run(cache, 2, [1] * 12) == 4, "only the very first block may be shared: same tokens, nothing before it"
    salted = scheme.chain([1] * 12, extra_keys(12, 4, cache_salt="s"))
    assert cache.match(salted) == 0
    assert cache.num_cached_blocks == 1


def test_under_xxhash_equal_tokens_are_found_as_under_sha256() -> None:
    cache = PrefixCache(20, HashScheme("xxhash", 4, "secret"))
    assert [run(cache, number, range(14)) for number in range(3)] == [0, 12, 12]
    assert cache.stats.num_collisions == 0


def test_events_replayed_give_exactly_the_resident_set() -> None:
    rng = random.Random(3)
    for policy in ("lru", "slru"):
        cache = PrefixCache(24, SCHEME, policy=policy)  # type: ignore[arg-type]
        log = EventLog()
        running: list[int] = []
        for step in range(500):
            if running and rng.random() < 0.5:
                cache.free(running.pop(rng.randrange(len(running))), step)
            elif not running and rng.random() < 0.05:
                assert cache.reset()
            else:
                tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
                if cache.admit(step, chain(tokens), step) is not None:
                    cache.commit(step, rng.randrange(len(tokens) + 1))
                    running.append(step)
            log.read(cache.take_events())
            assert log.resident == resident_of(cache.snapshot())
            assert len(log.resident) == cache.num_cached_blocks


def test_a_hit_never_returns_a_block_that_was_written_for_another_prefix() -> None:
    """Every block carries the tokens last written into it; a hit must find its own, whatever was evicted since."""
    rng = random.Random(4)
    cache = PrefixCache(16, SCHEME, token_reuse_min=1)
    written: dict[int, list[int]] = {}
    for step in range(800):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        admission = cache.admit(step, chain(tokens), step)
        assert admission is not None
        for copy in cache.take_copies():
            written[copy.targets[0]] = written[copy.sources[0]][: copy.num_tokens]
        cached = admission.num_cached_tokens
        for position in range(cached):
            front = tokens[: position + 1]
            block = written[admission.block_ids[position // 4]]
            assert block[position % 4] == hash(tuple(front)), "KV of another prefix"
        for position in range(cached, len(tokens)):
            block = written.setdefault(admission.block_ids[position // 4], [])
            del block[position % 4 :]
            block.append(hash(tuple(tokens[: position + 1])))
        cache.commit(step, len(tokens))
        cache.free(step, step)


def test_an_explanation_tells_what_became_of_the_missing_block() -> None:
    cache = PrefixCache(6, SCHEME, policy="lru")
    prompt = chain(range(9))
    assert cache.explain(chain([1, 2])).reason == "below_block"
    assert cache.explain(prompt).reason == "never_seen"
    run(cache, "victim", range(9), now=10)
    assert cache.explain(prompt).reason == "hit"
    run(cache, "culprit", [9] * 16, now=25)
    found = cache.explain(prompt)
    assert (found.reason, found.num_matched_tokens) == ("evicted", 4)
    assert found.eviction is not None
    assert (found.eviction.culprit, found.eviction.time_s, found.eviction.idle_s) == ("culprit", 25, 15)
    assert found.eviction.reason is RemovalReason.EVICTED
    run(cache, "victim again", range(9), now=30)
    stats = cache.stats
    assert (stats.num_requests, stats.num_misses, stats.num_misses_at_root, stats.num_misses_of_evicted) == (3, 3, 2, 1)


def test_the_history_is_a_ring() -> None:
    import numpy as np

    history = EvictionHistory(4)
    assert history.find(0) is None
    for step in range(10):
        history.add(np.array([step, 100 + step], dtype=np.uint64), step, 0.0, RemovalReason.EVICTED, ("r", step))
    assert len(history) == 4
    found = history.find(109)
    assert found is not None and found.culprit == ("r", 9)
    assert history.find(7) is None
    history.add(np.array([8, 8, 8], dtype=np.uint64), 11.0, 0.0, RemovalReason.EVICTED, "new")
    found = history.find(8)
    assert found is not None and found.time_s == 11.0
    history.add(np.arange(9, dtype=np.uint64), 12.0, 0.0, RemovalReason.EVICTED, "many")
    assert [history.find(key) is not None for key in range(9)] == [False] * 5 + [True] * 4


def test_the_age_at_the_lru_end_is_zero_while_there_are_empty_blocks() -> None:
    cache = PrefixCache(6, SCHEME)
    run(cache, 0, range(8), now=3)
    assert cache.lru_age_s(10) == 0
    run(cache, 1, range(100, 112), now=5)
    assert cache.lru_age_s(10) == 7


def test_removals_are_told_once_per_hash_when_the_last_copy_goes() -> None:
    cache = PrefixCache(8, SCHEME, policy="lru")
    for name in ("a", "b"):
        cache.admit(name, chain(range(5)))
    for name in ("a", "b"):
        cache.commit(name, 5)
    for name in ("a", "b"):
        cache.free(name)
    cache.take_events()
    cache.admit("c", chain([9] * 24))  # six of seven blocks: one copy stays
    batch = cache.take_events()
    assert batch is None
    assert cache.match(chain(range(5))) == 4
    cache.free("c")
    cache.admit("d", chain([8] * 28))
    batch = cache.take_events()
    assert batch is not None
    assert [list(event.keys) for event in batch.events if isinstance(event, Removed)] == [list(chain(range(4)).keys)]
