"""Blocks in host memory are worth more than none and less than blocks on the device."""

from __future__ import annotations

import random

import pytest
from warmfront_pb.v1 import common_pb2

from cache.block_hash import HashScheme
from cache.events import Snapshot, Stored, Tier
from cache.prefix_index import PrefixIndex
from router.load import LoadBook
from router.placement import Placement
from router.policy import Ask, Candidate, choose, marginal_costs

KEYS = HashScheme().keys(list(range(640)))  # 40 blocks


def placement(policy: str = "warmfront", **tiers: tuple[int, int]) -> tuple[Placement, LoadBook]:
    """Replicas that hold so many leading blocks on the device, and so many, of any, in host memory."""
    index = PrefixIndex()
    for name, (on_device, in_host) in tiers.items():
        runs = [
            Stored(0, KEYS[:count], tier) for tier, count in ((Tier.DEVICE, on_device), (Tier.HOST, in_host)) if count
        ]
        index.load(name, Snapshot(name, "g", 1, tuple(runs)))
    loads = LoadBook()
    return Placement(index, loads, policy, random.Random(0)), loads


def caches(*names: str) -> dict[str, common_pb2.CacheState]:
    return {name: common_pb2.CacheState(prefix_caching=True, kv_blocks=1000) for name in names}


def test_what_lies_in_host_memory_alone_is_matched_and_told_apart() -> None:
    one, loads = placement(a=(10, 30))
    chosen = one.place(640, KEYS, 16, caches("a"), 0.0).decision.chosen
    assert (chosen.matched_tokens, chosen.host_tokens, chosen.pending_tokens) == (480, 320, 0)
    assert loads.of("a").waiting_tokens == 160 + 32


def test_a_copy_on_both_tiers_counts_as_on_the_device() -> None:
    one, _ = placement(a=(20, 20))
    assert one.place(640, KEYS, 16, caches("a"), 0.0).decision.chosen.host_tokens == 0


@pytest.mark.parametrize("policy", ["warmfront", "predicted_ttft", "longest_prefix"])
def test_device_goes_before_host_and_host_before_nothing(policy: str) -> None:
    for tiers, home in (
        ({"device": (30, 0), "host": (0, 30), "cold": (0, 0)}, "device"),
        ({"host": (0, 30), "cold": (0, 0)}, "host"),
        ({"host": (0, 30), "less": (20, 0)}, "host"),
        ({"host": (0, 30), "nearly": (28, 0)}, "nearly"),
    ):
        one, _ = placement(policy, **tiers)
        assert one.place(640, KEYS, 16, caches(*tiers), 0.0).replica == home


def test_blocks_that_come_back_from_host_memory_displace_nothing_since_what_gives_way_goes_there() -> None:
    full = Candidate("a", matched_tokens=100, host_tokens=80, speed=100, free_tokens=0)
    (cost,) = marginal_costs(100, [full])
    assert cost.miss_s == pytest.approx(0.08)
    assert cost.displaced_s == 0


def test_a_block_from_host_memory_costs_what_the_replica_measured() -> None:
    one, loads = placement(a=(10, 30))
    view = caches("a")
    view["a"].host_kv_blocks = 1000
    view["a"].host_tokens_per_s = 4 * loads.of("a").speed
    assert one.place(640, KEYS, 16, view, 0.0).decision.chosen.work_tokens(640) == 160 + 320 // 4


def test_only_what_host_memory_has_no_room_for_is_displaced() -> None:
    one, _ = placement(a=(40, 30))
    view = {"a": common_pb2.CacheState(prefix_caching=True, kv_blocks=40, host_kv_blocks=35)}
    other = HashScheme().keys(list(range(1000, 1640)))
    assert one.place(640, other, 16, view, 0.0).decision.chosen.free_tokens == 5 * 16


def test_the_discount_is_in_what_a_decision_reckons_with() -> None:
    host = Candidate("host", matched_tokens=96, host_tokens=96, speed=100)
    busy = Candidate("busy", matched_tokens=96, waiting_tokens=50, waiting_requests=1, speed=100)
    assert choose("warmfront", Ask(100), [host, busy], random.Random(0)).chosen.replica == "host"
