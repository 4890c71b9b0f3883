"""Reuse inside a block: the front of a block of another prefix is copied, never more than both have in common."""

import pytest

from cache.block_hash import HashScheme, extra_keys
from cache.prefix_cache import BlockCopies, PrefixCache
from tests.cache.support import SCHEME, chain, run


def reusing(num_blocks: int = 30, least: int = 1, scheme: HashScheme = SCHEME) -> PrefixCache:
    return PrefixCache(num_blocks, scheme, token_reuse_min=least)


@pytest.mark.parametrize("shared", [17, 33, 37, 49])
def test_all_that_prompts_share_is_reused(shared: int) -> None:
    cache = reusing(scheme=HashScheme(block_size=16))
    run(cache, 0, [*range(shared), *[900] * 20])
    assert run(cache, 1, [*range(shared), *[901] * 20]) == shared


def test_an_equal_prompt_is_reused_but_for_the_token_that_must_be_computed() -> None:
    for length in range(1, 14):
        cache = reusing()
        run(cache, 0, range(length))
        assert run(cache, 1, range(length)) == length - 1


def test_the_partial_last_block_of_a_request_that_ended_is_found() -> None:
    cache = reusing()
    run(cache, 0, [1, 2, 3, 4, 5, 6, 7])
    admission = cache.admit(1, chain([1, 2, 3, 4, 5, 6, 9, 9]))
    assert admission is not None
    assert admission.num_cached_tokens == 6
    assert cache.take_copies() == [BlockCopies([2], [admission.block_ids[1]], num_tokens=2)]
    assert cache.match(chain([1, 2, 3, 4, 5, 6, 9, 9])) == 4, "predictions compare blocks only"
    cache.check_invariants()


def test_what_is_reused_within_a_block_is_never_told_to_the_router() -> None:
    cache = reusing()
    run(cache, 0, [1, 2, 3])
    assert cache.take_events() is None
    assert run(cache, 1, [1, 2, 3]) == 2
    assert cache.take_events() is None
    assert cache.num_cached_blocks == 0


def test_salt_adapter_and_image_are_never_crossed() -> None:
    tokens = list(range(7))
    kinds = [
        None,
        extra_keys(7, 4, cache_salt="x"),
        extra_keys(7, 4, lora=("x", "/x@1")),
        extra_keys(7, 4, media=[("x", 1, 3)]),
        extra_keys(7, 4, media=[("y", 1, 3)]),
    ]
    cache = reusing()
    for name, extra in enumerate(kinds):
        admission = cache.admit(name, SCHEME.chain(tokens, extra))
        assert admission is not None
        assert admission.num_cached_tokens == 0
        cache.commit(name, 7)
        cache.free(name)
    for extra in kinds:
        admission = cache.admit("again", SCHEME.chain(tokens, extra))
        assert admission is not None
        assert admission.num_cached_tokens == 6
        cache.free("again")


def test_too_few_tokens_are_not_worth_a_copy_and_are_counted() -> None:
    cache = reusing(least=3)
    run(cache, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert run(cache, 1, [1, 2, 3, 4, 5, 6, 0, 0, 0]) == 4
    assert cache.stats.num_lost_tokens == 2
    assert run(cache, 2, [1, 2, 3, 4, 5, 6, 7, 0, 0]) == 7
    assert cache.stats.num_copied_tokens == 3


def test_it_never_evicts_to_make_room() -> None:
    cache = reusing(num_blocks=4)
    run(cache, 0, range(12))
    # All three blocks are needed: the one that could be copied from is among them.
    admission = cache.admit(1, chain([0, 1, 2, *[9] * 9]))
    assert admission is not None
    assert (admission.num_cached_tokens, cache.take_copies()) == (0, [])
    cache.check_invariants()


def test_the_source_is_not_given_to_the_request_that_copies_it() -> None:
    cache = reusing(num_blocks=5)
    run(cache, 0, range(16))
    admission = cache.admit(1, chain([0, 1, 2, *[9] * 8]))
    assert admission is not None
    (copy,) = cache.take_copies()
    assert copy.sources[0] not in admission.block_ids
    assert (copy.targets, copy.num_tokens) == ([admission.block_ids[0]], 3)


def test_a_preempted_request_leaves_no_partial_block_behind() -> None:
    cache = reusing()
    cache.admit("a", chain(range(7)))
    cache.commit("a", 7)
    cache.free("a", recompute=True)
    assert run(cache, "b", range(7)) == 4
