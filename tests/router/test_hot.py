"""Hot prefixes: which are kept, in what order, in which bytes; and what a router writes of them."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.block_hash import HashScheme
from cache.hot import (
    HALF_LIFE_S,
    HotDecodeError,
    HotPrefix,
    HotSet,
    HotTable,
    by_value,
    decode_hot,
    encode_hot,
    merged,
    saved_tokens,
)
from common.redis_client import connect_redis
from tests.router.conftest import Cluster
from tests.support import packed

SIZE = 8
SCHEME = HashScheme(block_size=SIZE)


def blocks(*numbers: int) -> list[int]:
    """A block per number, full of it."""
    return [number for number in numbers for _ in range(SIZE)]


def prefix(*numbers: int, hits: float = 1.0, **more: str) -> HotPrefix:
    return HotPrefix(packed(blocks(*numbers)), hits, **more)


def ends(ranked: Sequence[Any]) -> list[list[int]]:
    """Per prefix the number of each of its blocks."""
    return [list(array("I", one.prefix.token_ids)[::SIZE]) for one in ranked]


def serve(table: HotTable, numbers: Sequence[int], num_cached_blocks: int, now: float = 0.0, **more: str) -> None:
    token_ids = [*blocks(*numbers), 7, 7, 7]
    table.credit(SCHEME.keys(token_ids), packed(token_ids), num_cached_blocks * SIZE, SIZE, now, **more)


def test_a_system_prompt_of_many_sessions_beats_one_long_conversation() -> None:
    table = HotTable()
    for session in range(10, 16):  # six sessions share blocks 1 and 2
        serve(table, [1, 2, session], 2)
    for turn in range(3, 7):  # one conversation, every turn two blocks longer
        serve(table, list(range(20, 20 + 2 * turn)), 2 * turn - 2)
    ranked = by_value(table.prefixes(0.0, 60.0), max_tokens=1000)
    assert ends(ranked)[0] == [1, 2]
    assert ranked[0].value == 6
    assert ends(ranked)[1:] == [list(range(20, 20 + size)) for size in (4, 6, 8, 10)]
    assert [one.value for one in ranked[1:]] == [4, 3, 2, 1]
    assert [one.num_new_tokens for one in ranked] == [16, 32, 16, 16, 16]


def test_fronts_in_common_are_counted_once() -> None:
    found = [prefix(1, 2, hits=1), prefix(1, 2, 3, hits=5), prefix(1, 2, 4, hits=3)]
    ranked = by_value(found, max_tokens=1000)
    assert ends(ranked) == [[1, 2], [1, 2, 3], [1, 2, 4]]
    assert [one.value for one in ranked] == [9, 5, 3]
    assert sum(one.saved_tokens for one in ranked) == saved_tokens(found) == (1 * 2 + 5 * 3 + 3 * 3) * SIZE


def test_what_finds_no_room_still_speaks_for_its_front() -> None:
    ranked = by_value([prefix(1, 2, hits=1), prefix(1, 2, 3, 4, hits=5)], max_tokens=3 * SIZE)
    assert ends(ranked) == [[1, 2]]
    assert ranked[0].prefix.hits == ranked[0].value == 6


def test_adapters_and_salts_keep_equal_tokens_apart() -> None:
    table = HotTable()
    serve(table, [1, 2], 2)
    serve(table, [1, 2], 2, lora="a")
    serve(table, [1, 2], 2, cache_salt="s")
    ranked = by_value(table.prefixes(0.0, 60.0), max_tokens=1000)
    assert {(one.prefix.lora, one.prefix.cache_salt) for one in ranked} == {("", ""), ("a", ""), ("", "s")}
    assert all(one.value == 1 and one.parent == -1 for one in ranked)


def test_hits_are_halved_and_old_prefixes_forgotten() -> None:
    table = HotTable()
    for _ in range(4):
        serve(table, [1, 2], 2, now=0.0)
    serve(table, [3, 4], 2, now=HALF_LIFE_S)
    hits = {one.token_ids[0]: one.hits for one in table.prefixes(HALF_LIFE_S, 1e6)}
    assert hits == {1: 2.0, 3: 1.0}
    assert [one.token_ids[0] for one in table.prefixes(HALF_LIFE_S + 10, 20)] == [3]
    table.check_invariants()


def test_what_fills_no_block_or_was_not_cached_is_not_counted() -> None:
    table = HotTable()
    serve(table, [1, 2], 0)
    table.credit(SCHEME.keys(blocks(1)), packed(blocks(1)), SIZE - 1, SIZE, 0.0)
    assert len(table) == 0
    table.credit(SCHEME.keys(blocks(1, 2)), packed(blocks(1, 2)), 2 * SIZE - 1, SIZE, 0.0)
    assert table.prefixes(0.0, 60.0) == [prefix(1)]


def test_a_full_table_forgets_what_was_hit_least() -> None:
    table = HotTable(max_prefixes=8, max_bytes=8 * 2 * SIZE * 4)
    for _ in range(3):
        serve(table, [1, 2], 2)
    for number in range(100, 150):
        serve(table, [number, 2], 2, now=number / 100)
        table.check_invariants()
    found = {one.token_ids[0]: one.hits for one in table.prefixes(2.0, 60.0)}
    assert found[1] > 2.9
    assert 149 in found
    assert 100 not in found


prefixes = st.lists(
    st.builds(
        lambda numbers, hits, lora: prefix(*numbers, hits=hits, lora=lora),
        st.lists(st.integers(1, 3), min_size=1, max_size=5),
        st.floats(0.1, 100),
        st.sampled_from(["", "a"]),
    ),
    max_size=25,
    unique_by=lambda one: (one.lora, one.token_ids),
)


@given(prefixes, st.integers(0, 30 * SIZE))
def test_any_choice_is_whole_fronts_that_fit_and_its_bytes_read_back(found: list[HotPrefix], room: int) -> None:
    ranked = by_value(found, room)
    for place, one in enumerate(ranked):
        assert one.parent < place
        front = ranked[one.parent].prefix if one.parent >= 0 else HotPrefix(b"", 0)
        assert one.prefix.token_ids.startswith(front.token_ids)
        assert one.prefix.num_tokens - front.num_tokens == one.num_new_tokens
        assert one.parent < 0 or ranked[one.parent].value >= one.value
    assert sum(one.num_new_tokens for one in ranked) <= room
    data = encode_hot(ranked, 5, "t")
    assert decode_hot(data) == HotSet(written_ms=5, tokenizer="t", prefixes=tuple(one.prefix for one in ranked))
    for end in range(0, len(data), 7):
        with pytest.raises(HotDecodeError):
            decode_hot(data[:end])


def test_rubbish_is_refused() -> None:
    for data in (b"", b"\x02" * 40, b"\x01" * 40, encode_hot(by_value([prefix(1)], 99), 1, "t") + b"x"):
        with pytest.raises(HotDecodeError):
            decode_hot(data)


def test_several_routers_hits_are_added_up_and_old_sets_left_out() -> None:
    def written(at_ms: int, *found: HotPrefix) -> HotSet:
        return HotSet(written_ms=at_ms, tokenizer="t", prefixes=found)

    now_ms = round(HALF_LIFE_S * 1000)
    sets = [written(now_ms, prefix(1, hits=3)), written(0, prefix(1, hits=4), prefix(2)), written(-(10**9), prefix(3))]
    assert merged(sets, now_ms, max_age_s=1000) == [prefix(1, hits=5), prefix(2, hits=0.5)]


# A router


async def hot_in_redis(cluster: Cluster) -> list[HotSet]:
    client: Any = connect_redis(cluster.redis_url, fleet="tests", timeout_s=2.0)
    try:
        key = f"wf:{{{cluster.fleet}}}:hot"
        names = await client.zrange(key, 0, -1)
        for name in [key, *(f"{key}:{name.decode()}" for name in names)] if names else ():
            assert await client.pttl(name) > 0
        return [decode_hot(await client.get(f"{key}:{name.decode()}")) for name in names]
    finally:
        await client.aclose()


async def ask(cluster: Cluster, prompt: str, times: int = 2, router: int = 0, **more: Any) -> None:
    for _ in range(times):
        body = {"prompt": prompt, "max_tokens": 2, **more}
        answer = await cluster.clients[router].post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


async def until_hits(cluster: Cluster, hits: float) -> list[HotSet]:
    """What the routers have written once they have counted so many hits."""
    for _ in range(400):
        found = await hot_in_redis(cluster)
        if sum(prefix.hits for one in found for prefix in one.prefixes) > hits - 0.1:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"never written: {found}")


async def test_routers_write_what_their_requests_hit_with_a_time_to_live(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    for _ in range(2):
        await cluster.add_router(heartbeat_s=0.05)
    for router in range(2):
        await ask(cluster, "the same front of every prompt " * 4, 3, router)
    sets = await until_hits(cluster, 5)  # all but the very first
    assert len(sets) == 2
    assert len({one.tokenizer for one in sets}) == 1
    (both,) = merged(sets, max(one.written_ms for one in sets), 60.0)
    assert both.hits == pytest.approx(5, abs=0.1)
    whole = worker.requests[0].token_ids
    assert whole.startswith(both.token_ids)
    assert len(whole) - len(both.token_ids) <= 2 * 4 * worker.spec.block_size


async def test_nothing_of_a_router_that_dies_stays_beyond_the_maximum_age(cluster: Cluster) -> None:
    """What was written last may have been hit half of it ago, so its key has the other half."""
    await cluster.add_worker("w0")
    router = await cluster.add_router(heartbeat_s=0.05, hot_max_age_s=4000.0)
    await ask(cluster, "the front of a prompt " * 4, 3)
    await until_hits(cluster, 2)
    client = connect_redis(cluster.redis_url, fleet=cluster.fleet, timeout_s=5)
    names = await client.zrange(f"wf:{{{cluster.fleet}}}:hot", 0, -1)
    for key in (f"wf:{{{cluster.fleet}}}:hot", f"wf:{{{cluster.fleet}}}:hot:{names[0].decode()}"):
        assert 0 < await client.pttl(key) <= 2_000_000
    await client.aclose()
    table = router.fleet.hot.table
    assert table.prefixes(time.monotonic() + 1800, 2000)
    assert not table.prefixes(time.monotonic() + 2001, 2000)


@pytest.mark.parametrize(
    ("settings", "salt", "is_written"),
    [({}, "tenant-1", False), ({"hot_salted": True}, "tenant-1", True), ({"hot": False}, None, False)],
)
async def test_salted_prompts_are_written_only_where_allowed_and_nothing_without_hot(
    cluster: Cluster, settings: dict[str, Any], salt: str | None, is_written: bool
) -> None:
    await cluster.add_worker("w0")
    router = await cluster.add_router(heartbeat_s=0.05, **settings)
    secret = "a secret that nobody else may read " * 4
    await ask(cluster, secret, 3, **({"cache_salt": salt} if salt else {}))
    if settings.get("hot", True):
        await ask(cluster, "a prompt that anybody may read " * 4, 3)
        (one,) = await until_hits(cluster, 4 if is_written else 2)
        assert {prefix.cache_salt for prefix in one.prefixes} == ({"", salt} if is_written else {""})
    else:
        assert len(router.fleet.hot.table) == 0
        assert await hot_in_redis(cluster) == []
