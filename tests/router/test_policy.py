"""Placement as tables: given what each replica holds and has waiting, who is chosen and at what cost."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest
from warmfront_pb.v1 import common_pb2

from cache.block_hash import HashScheme
from cache.events import Snapshot, Stored
from cache.prefix_index import PrefixIndex
from router.load import LoadBook
from router.placement import Placement
from router.policy import POLICIES, Ask, Candidate, Decision, choose, marginal_costs

WARMFRONT = "warmfront"


def decide(policy: str, num_tokens: int, *candidates: Candidate, ask: Ask | None = None, seed: int = 0) -> Decision:
    return choose(policy, ask or Ask(num_tokens), candidates, random.Random(seed))


def test_the_cost_is_the_sum_of_its_terms() -> None:
    candidates = [
        Candidate(
            "a",
            matched_tokens=600,
            waiting_tokens=500,
            waiting_requests=2,
            since_progress_s=1.0,
            speed=100,
            free_tokens=100,
            lru_age_s=10,
        ),
        Candidate("b", speed=200, lru_age_s=30),
    ]
    a, b = marginal_costs(1000, candidates)
    assert a.wait_s == 500 / 100 - 1.0
    assert a.miss_s == 4.0
    assert a.displaced_s == 300 / 100 * (20 / 10)  # mean age 20 over its own 10
    assert a.total_s == 4.0 + (1.25 + 2) * 4.0 + 2.5 * 6.0
    assert (b.wait_s, b.miss_s, b.displaced_s, b.total_s) == (0, 5.0, 0, 1.25 * 5.0)


def test_what_my_prefill_takes_from_others_counts() -> None:
    """Of 4 seconds each: of two that wait, and 0.3 of three answers."""
    (cost,) = marginal_costs(400, [Candidate("a", waiting_requests=2, in_flight=5, speed=100)])
    assert cost.miss_s == 4.0
    assert cost.delayed_s == pytest.approx((2 + 0.3 * 3) * 4.0)
    assert cost.total_s == pytest.approx(1.25 * cost.miss_s + cost.delayed_s)
    assert cost.before_answers_s == pytest.approx((1.25 + 2) * 4.0)


def test_answers_that_grow_count_for_less_than_a_prompt_that_waits() -> None:
    answering = Candidate("answering", in_flight=3)
    waiting = Candidate("waiting", in_flight=1, waiting_requests=1)
    assert decide(WARMFRONT, 100, answering, waiting).chosen.replica == "answering"
    assert decide(WARMFRONT, 100, answering, Candidate("idle")).chosen.replica == "idle"


def test_progress_never_makes_a_wait_negative() -> None:
    (cost,) = marginal_costs(10, [Candidate("a", waiting_tokens=10, waiting_requests=1, since_progress_s=99, speed=10)])
    assert cost.wait_s == 0


def test_an_old_victim_makes_displacement_cheap_and_a_young_one_at_most_four_times_dear() -> None:
    def displaced(own_age_s: float) -> float:
        full = Candidate("a", speed=100, free_tokens=0, lru_age_s=own_age_s)
        other = Candidate("b", lru_age_s=1000.0)
        return marginal_costs(100, [full, other])[0].displaced_s

    assert displaced(1000.0) == 1.0
    assert displaced(1.0) == 4.0
    assert displaced(9000.0) == pytest.approx(5000 / 9000)


@pytest.mark.parametrize(
    ("name", "candidates", "expected"),
    [
        ("the warm one, when both are idle", [Candidate("cold"), Candidate("warm", matched_tokens=800)], "warm"),
        (
            "an idle cold one rather than a warm one with a long queue",
            [
                Candidate("cold", speed=1000),
                Candidate("warm", matched_tokens=800, waiting_tokens=9000, waiting_requests=3, speed=1000),
            ],
            "cold",
        ),
        (
            "the warm one with a short queue, since a repeat costs more than the wait",
            [
                Candidate("cold", speed=1000),
                Candidate("warm", matched_tokens=992, waiting_tokens=300, waiting_requests=1, speed=1000),
            ],
            "warm",
        ),
        (
            "of two cold ones the one whose victims are older",
            [
                Candidate("young", free_tokens=0, lru_age_s=10),
                Candidate("old", free_tokens=0, lru_age_s=100),
            ],
            "old",
        ),
        (
            "of two idle cold ones the empty one",
            [Candidate("full", free_tokens=0, lru_age_s=50), Candidate("empty")],
            "empty",
        ),
        (
            "the idle one with a full cache for a prompt nobody knows, not the busy one with an empty cache",
            [
                Candidate("busy", waiting_tokens=20_000, waiting_requests=5, speed=1000),
                Candidate("idle", free_tokens=0, lru_age_s=50, speed=1000),
            ],
            "idle",
        ),
        (
            "the faster one when both miss",
            [Candidate("slow", speed=100), Candidate("fast", speed=1000)],
            "fast",
        ),
        (
            "3,000 shared of 17,000 tokens over an idle cold one",
            [Candidate("cold", speed=1000), Candidate("home", matched_tokens=3000, speed=1000)],
            "home",
        ),
        (
            "the idle cold one where 14,000 of 17,000 tokens would hold up two answers",
            [Candidate("cold", speed=1000), Candidate("home", matched_tokens=3000, in_flight=2, speed=1000)],
            "cold",
        ),
        ("of equal ones the fewest in flight", [Candidate("a", in_flight=3), Candidate("b", in_flight=2)], "b"),
    ],
)
def test_the_choice_is(name: str, candidates: list[Candidate], expected: str) -> None:
    num_tokens = 17_000 if "17,000" in name else 1000
    assert decide(WARMFRONT, num_tokens, *candidates).chosen.replica == expected


def test_a_new_replica_is_neither_starved_nor_flooded() -> None:
    """Three full replicas and an empty fourth under a steady load of unique prompts."""
    counts: Counter[str] = Counter()
    waiting = dict.fromkeys("abcd", 0)
    rng = random.Random(1)
    free = {"a": 0, "b": 0, "c": 0, "d": 20_000}
    for turn in range(400):
        candidates = [
            Candidate(
                name,
                waiting_tokens=1000 * waiting[name],
                waiting_requests=waiting[name],
                in_flight=waiting[name],
                speed=1000,
                free_tokens=max(0, free[name]),
                lru_age_s=0 if free[name] > 0 else 60,
            )
            for name in "abcd"
        ]
        chosen = choose(WARMFRONT, Ask(1000), candidates, rng).chosen.replica
        counts[chosen] += 1
        waiting[chosen] += 1
        free[chosen] -= 1000
        if turn % 2:  # each serves one prompt per four arrivals: the fleet keeps up
            busy = [name for name in "abcd" if waiting[name]]
            for name in rng.sample(busy, min(2, len(busy))):
                waiting[name] -= 1
    first = counts["d"] / 400
    assert 0.10 < first < 0.50


def test_eight_prompts_in_one_moment_spread_two_each_over_four_slow_replicas() -> None:
    waiting = dict.fromkeys("abcd", 0)
    rng = random.Random(3)
    for _ in range(8):
        candidates = [
            Candidate(name, waiting_tokens=1000 * n, waiting_requests=n, in_flight=n, speed=1000)
            for name, n in waiting.items()
        ]
        waiting[choose(WARMFRONT, Ask(1000), candidates, rng).chosen.replica] += 1
    assert set(waiting.values()) == {2}


def test_idle_replicas_of_about_one_speed_share_a_light_load() -> None:
    idle = [Candidate(name, speed=speed) for name, speed in zip("abcd", (900, 1000, 1100, 1200), strict=True)]
    rng = random.Random(0)
    counts = Counter(choose(WARMFRONT, Ask(500), idle, rng).chosen.replica for _ in range(1000))
    assert all(200 <= counts[name] <= 300 for name in "abcd")
    slower_but_warm = [Candidate("cold", speed=1200), Candidate("warm", speed=1000, matched_tokens=16)]
    assert decide(WARMFRONT, 500, *slower_but_warm).chosen.replica == "warm"


def test_ties_are_broken_evenly_and_by_the_seed_alone() -> None:
    idle = [Candidate(name) for name in "abcd"]
    rng = random.Random(0)
    counts = Counter(choose(WARMFRONT, Ask(8), idle, rng).chosen.replica for _ in range(1000))
    assert all(200 <= counts[name] <= 300 for name in "abcd")
    assert decide(WARMFRONT, 8, *idle, seed=4).chosen == decide(WARMFRONT, 8, *idle, seed=4).chosen


def test_regret_is_what_the_best_holder_held_more() -> None:
    decision = decide("random", 100, Candidate("a", matched_tokens=64), Candidate("b", matched_tokens=16), seed=1)
    assert decision.regret_tokens == 64 - decision.chosen.matched_tokens


def test_every_policy_names_itself_and_chooses_somebody() -> None:
    for name in POLICIES:
        decision = decide(name, 100, Candidate("a"), Candidate("b"), ask=Ask(100, "s", True, 3))
        assert decision.policy == name
        assert decision.chosen.replica in "ab"


def test_round_robin_goes_round_whatever_the_order_of_the_candidates() -> None:
    order = [
        decide("round_robin", 1, *candidates, ask=Ask(1, turn=turn)).chosen.replica
        for turn, candidates in enumerate([[Candidate("a"), Candidate("b")], [Candidate("b"), Candidate("a")]] * 2)
    ]
    assert order == ["a", "b", "a", "b"]


def test_a_session_stays_home_and_most_sessions_stay_when_a_replica_joins() -> None:
    homes = {}
    for count in (4, 5):
        candidates = [Candidate(f"w{number}") for number in range(count)]
        homes[count] = [
            decide("session", 1, *candidates, ask=Ask(1, f"s{number}", True)).chosen.replica for number in range(500)
        ]
    moved = sum(old != new for old, new in zip(homes[4], homes[5], strict=True))
    assert 50 < moved < 150  # a fifth, all of them to the new one
    assert all(new in (old, "w4") for old, new in zip(homes[4], homes[5], strict=True))


def test_bounded_hashing_never_puts_more_on_one_replica_than_its_bound() -> None:
    """200 replicas, 60 in flight, a quarter of them with one prefix: the bound has a floor, nobody gets it all."""
    in_flight = {f"w{number}": 0 for number in range(200)}
    rng = random.Random(0)
    for number in range(60):
        affinity = "hot" if number % 4 == 0 else f"p{number}"
        candidates = [Candidate(name, in_flight=count) for name, count in in_flight.items()]
        in_flight[choose("consistent_hash", Ask(1, affinity), candidates, rng).chosen.replica] += 1
    assert max(in_flight.values()) <= 3


def test_bounded_hashing_spreads_prefixes_while_replicas_come_and_go() -> None:
    names = [f"w{number}" for number in range(10)]
    for gone in (set(), {"w1", "w5", "w9"}, {"w0"}):
        counts: Counter[str] = Counter()
        rng = random.Random(0)
        for number in range(500):
            candidates = [Candidate(name, in_flight=counts[name]) for name in names if name not in gone]
            counts[choose("consistent_hash", Ask(1, f"p{number}"), candidates, rng).chosen.replica] += 1
        mean = 500 / (10 - len(gone))
        assert max(counts.values()) / mean <= 1.26


def test_longest_prefix_takes_the_holder_and_least_load_the_idle_one() -> None:
    holder = Candidate("holder", matched_tokens=64, waiting_tokens=500, waiting_requests=1, in_flight=1)
    idle = Candidate("idle")
    assert decide("longest_prefix", 100, holder, idle).chosen.replica == "holder"
    assert decide("least_load", 100, holder, idle).chosen.replica == "idle"
    assert decide("predicted_ttft", 100, holder, idle).chosen.replica == "idle"


def test_a_long_prompt_that_is_held_whole_is_charged_next_to_nothing() -> None:
    keys = HashScheme().keys(list(range(64_000)))
    index = PrefixIndex()
    index.load("w0", Snapshot("w0", "g", 1, (Stored(0, keys),)))
    loads = LoadBook()
    caches = {"w0": common_pb2.CacheState(prefix_caching=True, kv_blocks=5000)}
    Placement(index, loads, WARMFRONT, random.Random(0)).place(64_000, keys, 16, caches, 0.0)
    assert loads.of("w0").waiting_tokens == 16


def large_fleet(num_replicas: int, num_holders: int) -> tuple[Placement, dict[str, common_pb2.CacheState], array[int]]:
    keys = HashScheme().keys(list(range(640)))
    index = PrefixIndex()
    for number in range(num_replicas):
        runs = (Stored(0, keys),) if number < num_holders else ()
        index.load(f"w{number}", Snapshot(f"w{number}", "g", 1, runs))
    caches = {f"w{n}": common_pb2.CacheState(prefix_caching=True, kv_blocks=1000) for n in range(num_replicas)}
    return Placement(index, LoadBook(), WARMFRONT, random.Random(0)), caches, keys


def test_in_a_large_fleet_the_only_holder_is_always_seen() -> None:
    placement, caches, keys = large_fleet(500, 1)
    for now in range(50):
        placed = placement.place(640, keys, 16, caches, now)
        placed.ticket.close(now)
        assert placed.replica == "w0"


def test_in_a_large_fleet_a_prompt_just_sent_somewhere_is_seen_there_before_any_event() -> None:
    placement, caches, _ = large_fleet(500, 0)
    for family in range(30):
        keys = HashScheme().keys([family, *range(639)])
        first = placement.place(640, keys, 16, caches, family)
        first.ticket.first_token(family + 0.1)
        again = placement.place(640, keys, 16, caches, family + 0.2)
        assert again.replica == first.replica
        assert again.decision.chosen.pending_tokens == 624


def test_in_a_large_fleet_new_prompts_spread() -> None:
    placement, caches, _ = large_fleet(200, 0)
    for number in range(400):
        placement.place(640, HashScheme().keys([number, *range(639)]), 16, caches, 0)
    in_flight = [placement._loads.of(name).in_flight for name in caches]
    assert max(in_flight) <= 4


def test_what_is_foreseen_is_what_is_drawn_next() -> None:
    placement, caches, _ = large_fleet(4, 0)
    for number in range(20):
        keys = HashScheme().keys([number, *range(639)])
        foreseen = placement.preview(640, keys, 16, caches, 0.0).chosen.replica
        assert placement.preview(640, keys, 16, caches, 0.0).chosen.replica == foreseen
        assert placement.place(640, keys, 16, caches, 0.0).replica == foreseen


def test_strangers_requests_and_those_that_are_queued_for_a_replica_wait_there_too() -> None:
    placement, caches, keys = large_fleet(2, 0)
    loads = placement._loads
    loads.of("w0").told(requests=2, waiting_tokens=500)
    loads.hold("w0", 300)
    first, second = placement.preview(640, keys, 16, caches, 0.0).candidates
    assert (first.replica, first.waiting_tokens, first.waiting_requests, first.in_flight) == ("w0", 800, 1, 2)
    assert (second.waiting_tokens, second.waiting_requests, second.in_flight) == (0, 0, 0)


def test_the_sticky_setting_goes_on_waiting_for_a_holder_where_the_default_takes_a_copy() -> None:
    holder = Candidate("holder", matched_tokens=90, waiting_tokens=110, waiting_requests=1, speed=100)
    idle = Candidate("idle", speed=100)
    assert decide("warmfront", 100, holder, idle).chosen.replica == "idle"
    assert decide("warmfront_sticky", 100, holder, idle).chosen.replica == "holder"


def homes(hint: str, candidates: Sequence[Candidate], num_draws: int = 20) -> set[str]:
    ask = Ask(100, hint, has_session=bool(hint))
    return {choose(WARMFRONT, ask, candidates, random.Random(seed)).chosen.replica for seed in range(num_draws)}


def test_where_no_prefix_speaks_a_session_has_one_home_and_sessions_spread() -> None:
    idle = [Candidate(f"w{number}") for number in range(4)]
    assert len(homes("", idle)) == 4
    found = [homes(f"s{number}", idle) for number in range(200)]
    assert all(len(one) == 1 for one in found)
    counts = Counter(next(iter(one)) for one in found)
    assert min(counts.values()) > 25


def test_a_hint_never_outweighs_what_is_held_nor_load() -> None:
    (home,) = homes("s", [Candidate("a"), Candidate("b")])
    other = "b" if home == "a" else "a"
    assert homes("s", [Candidate(home), Candidate(other, matched_tokens=16)]) == {other}
    assert homes("s", [Candidate(home, waiting_tokens=50, waiting_requests=1), Candidate(other)]) == {other}
    assert homes("s", [Candidate(home, in_flight=9), Candidate(other)]) == {other}
    assert homes("s", [Candidate(home, in_flight=2), Candidate(other)]) == {home}
    full = [Candidate(home, free_tokens=0, lru_age_s=10), Candidate(other, free_tokens=0, lru_age_s=20)]
    assert homes("s", full) == {other}
