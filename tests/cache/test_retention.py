"""Prefixes that were asked to stay: soft, bounded, and in the order of their worth."""

import pytest

from cache.prefix_cache import PrefixCache
from cache.retention import Retention, RetentionBudget
from tests.cache.support import SCHEME, chain, run

MINUTES_5, HOUR = 300.0, 3600.0
SYSTEM = list(range(16))


def flood(cache: PrefixCache, count: int, now: float = 0.0) -> None:
    for number in range(count):
        run(cache, f"flood {now} {number}", [1000 + number] * 40, now=now)


def test_a_retained_prefix_outlives_ten_times_the_pool_of_one_shot_prompts() -> None:
    for marks, kept in (([Retention(16, MINUTES_5)], 16), ([], 0)):
        cache = PrefixCache(30, SCHEME)
        run(cache, "a", SYSTEM, retention=marks)
        flood(cache, 30)
        assert cache.match(chain([*SYSTEM, 1])) == kept


def test_after_its_time_it_is_an_ordinary_block_as_if_just_used() -> None:
    cache = PrefixCache(30, SCHEME)
    run(cache, "a", SYSTEM, retention=[Retention(16, MINUTES_5)], now=0)
    flood(cache, 3, now=299)
    assert (cache.match(chain([*SYSTEM, 1])), cache.num_retained_blocks) == (16, 4)
    flood(cache, 1, now=300)
    assert (cache.match(chain([*SYSTEM, 1])), cache.num_retained_blocks) == (16, 0)
    flood(cache, 3, now=301)
    assert cache.match(chain([*SYSTEM, 1])) == 0


def test_each_hit_starts_the_time_anew_for_whoever_hits() -> None:
    cache = PrefixCache(30, SCHEME)
    run(cache, "a", SYSTEM, retention=[Retention(16, MINUTES_5)], now=0)
    for turn in range(1, 5):
        assert run(cache, f"hit {turn}", [*SYSTEM, turn], now=turn * 290.0) == 16
        flood(cache, 4, now=turn * 290.0 + 280)
    assert cache.match(chain([*SYSTEM, 1])) == 16


def test_an_allocation_never_fails_because_of_retention() -> None:
    cache = PrefixCache(20, SCHEME, retention=RetentionBudget(100, 100))
    for number in range(6):
        run(cache, number, [number] * 20, retention=[Retention(20, HOUR)])
    assert cache.admit("all", chain(range(500, 576))) is not None
    cache.check_invariants()
    assert cache.num_retained_blocks == 0


def test_the_lowest_priority_goes_first_and_then_the_one_unused_for_longest() -> None:
    cache = PrefixCache(14, SCHEME, retention=RetentionBudget(100, 100))
    for name, priority in (("high", 9), ("low", 1), ("low later", 1)):
        run(cache, name, [len(name)] * 12, retention=[Retention(12, HOUR, priority)])
    run(cache, "plain", [77] * 12)
    run(cache, "other", [78] * 16)
    kept = [cache.match(chain([len(name)] * 12 + [0])) for name in ("high", "low", "low later")]
    assert kept == [12, 12, 12], "the unretained block went first"
    run(cache, "more", [79] * 28)
    kept = [cache.match(chain([len(name)] * 12 + [0])) for name in ("high", "low", "low later")]
    assert kept == [12, 0, 12]
    run(cache, "still more", [80] * 40)
    kept = [cache.match(chain([len(name)] * 12 + [0])) for name in ("high", "low", "low later")]
    assert kept == [12, 0, 0]


def test_the_budget_of_a_tenant_keeps_the_front_of_what_it_marks() -> None:
    cache = PrefixCache(40, SCHEME, retention=RetentionBudget(max_blocks=5, max_blocks_per_tenant=3))
    run(cache, "a", [1] * 20, retention=[Retention(20, HOUR)], tenant="t")
    assert cache.num_retained_blocks == 3
    run(cache, "b", [2] * 20, retention=[Retention(20, HOUR)], tenant="t")
    assert cache.num_retained_blocks == 3, "the tenant has no more"
    run(cache, "c", [3] * 20, retention=[Retention(20, HOUR)], tenant="u")
    assert cache.num_retained_blocks == 5, "all tenants have no more"
    flood(cache, 20)
    assert [cache.match(chain([tokens] * 20 + [0])) for tokens in (1, 2, 3)] == [12, 0, 8]


def test_breakpoints_nest_and_the_front_is_kept_longest() -> None:
    cache = PrefixCache(40, SCHEME)
    marks = [Retention(8, HOUR), Retention(16, MINUTES_5)]
    run(cache, "a", SYSTEM, retention=marks, now=0)
    flood(cache, 20, now=299)
    assert cache.match(chain([*SYSTEM, 1])) == 16
    flood(cache, 20, now=302)
    flood(cache, 20, now=303)
    assert cache.match(chain([*SYSTEM, 1])) == 8


def test_what_is_no_mark_is_refused() -> None:
    for number, ttl_s, priority in ((0, 300, 0), (4, 0, 0), (4, 3601, 0), (4, 300, 101), (4, 300, -1)):
        with pytest.raises(ValueError, match="retention"):
            Retention(number, ttl_s, priority)
    with pytest.raises(ValueError, match="at most 4"):
        PrefixCache(9, SCHEME).admit("a", chain([1]), retention=[Retention(1, 300)] * 5)
