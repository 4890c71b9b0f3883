"""The router's index beside one that keeps a plain set of keys per replica and tier."""

import hashlib
import os
import random
import time
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cache.block_hash import HashScheme
from cache.events import Cleared, Event, EventBatch, Malformed, RemovalReason, Removed, Snapshot, Stored, Tier
from cache.eviction import EvictionPolicy
from cache.prefix_cache import PrefixCache
from cache.prefix_index import Depths, Outcome, PrefixIndex
from tests.cache.support import chain

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def key_of(path: Iterable[int]) -> int:
    """A key that names a whole path, as a hash does: equal keys, equal prefixes."""
    return int.from_bytes(hashlib.blake2b(bytes(path), digest_size=8).digest(), "big")


def keys_of(path: list[int]) -> "array[int]":
    return array("Q", [key_of(path[: end + 1]) for end in range(len(path))])


def batch(first_seq: int, *events: Event, generation: str = "g1", replica: str = "w0") -> EventBatch:
    return EventBatch(replica, generation, first_seq, events)


def stored(path: list[int], start: int = 0, tier: Tier = DEVICE) -> Stored:
    return Stored(key_of(path[:start]) if start else 0, keys_of(path)[start:], tier)


def removed(path: list[int], *positions: int, tier: Tier = DEVICE) -> Removed:
    keys = keys_of(path)
    return Removed(array("Q", [keys[position] for position in positions]), RemovalReason.EVICTED, tier)


def depth(index: PrefixIndex, path: list[int], replica: str = "w0") -> int:
    index.check_invariants()
    return index.match(keys_of(path)).get(replica, Depths(0, 0)).total


def test_the_depth_is_that_of_the_common_front() -> None:
    index = PrefixIndex()
    assert index.apply("w0", batch(1, stored([1, 2, 3]))) is Outcome.APPLIED
    assert index.apply("w1", batch(1, stored([1, 2]), replica="w1")) is Outcome.APPLIED
    assert dict(index.match(keys_of([1, 2, 3, 4]))) == {"w0": Depths(3, 3), "w1": Depths(2, 2)}
    assert dict(index.match(keys_of([1, 9]))) == {"w0": Depths(1, 1), "w1": Depths(1, 1)}
    assert not index.match(keys_of([2]))
    assert not index.match(array("Q"))
    assert (index.num_blocks("w0"), index.num_blocks("w1"), index.num_blocks("w2"), len(index)) == (3, 2, 0, 3)


def test_a_match_ends_at_the_first_gap() -> None:
    index = PrefixIndex()
    index.apply("w0", batch(1, stored([1, 2, 3, 4]), removed([1, 2, 3, 4], 1)))
    assert depth(index, [1, 2, 3, 4]) == 1
    assert index.num_blocks("w0") == 3
    index.apply("w0", batch(3, removed([1, 2, 3, 4], 0)))
    assert depth(index, [1, 2, 3, 4]) == 0
    index.apply("w0", batch(4, stored([1, 2])))
    assert depth(index, [1, 2, 3, 4]) == 4, "what stood behind the gap counts again"


def test_chains_branch_in_the_middle_of_a_run() -> None:
    index = PrefixIndex()
    index.apply("w0", batch(1, stored([1, 2, 3, 4])))
    index.apply("w1", batch(1, stored([1, 2]), stored([1, 2, 7, 8], start=2), replica="w1"))
    assert dict(index.match(keys_of([1, 2, 7, 8, 9]))) == {"w0": Depths(2, 2), "w1": Depths(4, 4)}
    assert dict(index.match(keys_of([1, 2, 3, 4]))) == {"w0": Depths(4, 4), "w1": Depths(2, 2)}
    index.drop("w0")
    assert dict(index.match(keys_of([1, 2, 3, 4]))) == {"w1": Depths(2, 2)}
    assert len(index) == 4, "keys that nobody holds are let go"
    index.drop("w1")
    index.check_invariants()
    assert len(index) == 0


def test_tiers_are_counted_apart_and_together() -> None:
    index = PrefixIndex()
    path = [1, 2, 3, 4]
    index.apply("w0", batch(1, stored(path)))
    # Chain ends are demoted first: the host holds the far end.
    index.apply(
        "w0",
        batch(2, Removed(keys_of(path)[2:], RemovalReason.DEMOTED), stored(path, start=2, tier=HOST)),
    )
    assert dict(index.match(keys_of([*path, 5]))) == {"w0": Depths(device=2, total=4)}
    assert (index.num_blocks("w0"), index.num_blocks("w0", HOST)) == (2, 2)
    index.apply("w0", batch(4, removed(path, 2, tier=HOST)))
    assert dict(index.match(keys_of(path))) == {"w0": Depths(2, 2)}
    index.check_invariants()


def test_events_seen_twice_change_nothing_and_one_removal_still_removes() -> None:
    index = PrefixIndex()
    one, two, three = stored([1]), stored([1, 2], start=1), removed([1, 2], 1)
    index.apply("w0", batch(1, one, two))
    assert index.apply("w0", batch(1, one, two)) is Outcome.STALE
    assert index.apply("w0", batch(1, one, two, three)) is Outcome.APPLIED, "its end is new"
    assert depth(index, [1, 2]) == 1
    assert index.last_seq("w0") == 3


def test_a_gap_applies_nothing_until_a_snapshot_heals_it() -> None:
    index = PrefixIndex()
    index.apply("w0", batch(1, stored([1])))
    assert index.apply("w0", batch(3, stored([9]))) is Outcome.GAP
    assert depth(index, [9]) == 0
    index.load("w0", Snapshot("w0", "g1", 4, (stored([1, 2]), stored([9]))))
    assert depth(index, [1, 2]) == 2
    assert index.apply("w0", batch(4, removed([1, 2], 1), stored([7]))) is Outcome.APPLIED
    assert (depth(index, [1, 2]), depth(index, [7])) == (2, 1), "event 4 is in the snapshot, event 5 is not"
    index.load("w0", Snapshot("w0", "g1", 2, ()))
    assert (depth(index, [1, 2]), index.last_seq("w0")) == (0, 2), "an older one is a step back"


def test_a_snapshot_is_taken_in_by_parts_and_stands_all_at_once() -> None:
    index = PrefixIndex(part_blocks=1)
    index.apply("w0", batch(1, stored([1, 2, 3])))
    index.apply("w1", batch(1, stored([1, 2]), replica="w1"))
    num_parts = 0
    for _ in index.loading("w0", "g1", 4, iter((stored([1, 2]), stored([1, 2, 4], start=2), stored([9])))):
        num_parts += 1
        assert (depth(index, [1, 2, 3]), depth(index, [1, 2, 4]), depth(index, [9])) == (3, 2, 0)
        assert (index.num_blocks("w0"), index.last_seq("w0")) == (2 + num_parts, num_parts)
        index.apply("w0", batch(num_parts + 1, stored([60 + num_parts])))
    assert num_parts == 3
    assert (depth(index, [1, 2, 3]), depth(index, [1, 2, 4]), depth(index, [9]), depth(index, [61])) == (2, 3, 1, 0)
    assert (index.num_blocks("w0"), index.last_seq("w0")) == (4, 4)
    assert index.apply("w0", batch(5, stored([1, 2, 3], start=2))) is Outcome.APPLIED


def test_a_snapshot_that_is_given_up_half_way_or_is_bad_changes_nothing() -> None:
    index = PrefixIndex(part_blocks=1)
    index.apply("w0", batch(1, stored([1, 2])))

    def bad() -> Iterator[Stored]:
        yield stored([5, 6])
        raise ValueError("no run")

    given_up = index.loading("w0", "g1", 7, (stored([n]) for n in range(20, 30)))
    for _ in range(4):
        next(given_up)
    given_up.close()
    with pytest.raises(ValueError, match="no run"):
        list(index.loading("w0", "g1", 7, bad()))
    assert (depth(index, [1, 2]), depth(index, [20]), index.last_seq("w0")) == (2, 0, 1)
    while index.sweep():
        pass
    index.check_invariants()
    assert len(index) == 2


def test_what_a_replica_held_that_has_gone_is_let_go_of_by_parts_and_matches_nothing_at_once() -> None:
    index = PrefixIndex(part_blocks=1)
    for name in ("w0", "w1"):
        index.load(name, Snapshot(name, "g1", 1, tuple(stored([n, 0, 0]) for n in range(10 if name == "w0" else 2))))
    index.drop("w0")
    assert not index.match(keys_of([5, 0, 0]))
    assert dict(index.match(keys_of([1, 0, 0]))) == {"w1": Depths(3, 3)}
    assert 6 < len(index) < 30
    index.load("w0", Snapshot("w0", "g2", 1, (stored([5, 0]),)))
    assert depth(index, [5, 0, 0]) == 2, "what the old one held is not the new one's"
    num_parts = 1
    while index.sweep():
        num_parts += 1
        index.check_invariants()
    assert num_parts >= 8
    assert len(index) == 8


def test_a_run_with_many_branches_is_let_go_of_in_time_linear_in_them() -> None:
    index = PrefixIndex()
    trunk = array("Q", range(1, 101))

    def seconds_to_drop(num_branches: int) -> float:
        rng = random.Random(1)
        branches = [Stored(100, array("Q", [rng.getrandbits(64)])) for _ in range(num_branches)]
        index.load("w0", Snapshot("w0", "g1", 1, (Stored(0, trunk), *branches)))
        started = time.process_time()
        index.drop("w0")
        while index.sweep():
            pass
        return time.process_time() - started

    few = min(seconds_to_drop(1_000) for _ in range(3))
    assert min(seconds_to_drop(8_000) for _ in range(3)) < 24 * few, "8 times as many; each beside each is 64 times"


def test_removing_an_unknown_hash_is_nothing_and_the_known_one_goes() -> None:
    index = PrefixIndex()
    unknown = key_of([5, 5])
    index.apply("w0", batch(1, stored([1, 2])))
    index.apply("w0", batch(2, Removed(array("Q", [unknown, key_of([1, 2])]))))
    assert depth(index, [1, 2]) == 1


def test_a_bad_event_between_two_good_ones_is_counted_and_skipped() -> None:
    index = PrefixIndex()
    index.apply("w0", batch(1, stored([1]), Malformed("what"), stored([2])))
    assert (depth(index, [1]), depth(index, [2]), index.num_bad_events("w0")) == (1, 1, 1)
    assert index.last_seq("w0") == 3


def test_keys_that_contradict_what_is_known_are_bad_events_and_harm_nothing() -> None:
    index = PrefixIndex()
    index.apply("w0", batch(1, stored([1, 2, 3])))
    known = keys_of([1, 2, 3])
    circles = [
        Stored(0, array("Q", [known[2]])),
        Stored(known[2], array("Q", [known[0]])),
        Stored(77, array("Q", [77])),
        Stored(0, array("Q", [88, 88])),
    ]
    index.apply("w0", batch(4 - 2, *circles))
    index.check_invariants()
    assert index.num_bad_events("w0") == len(circles)
    index.apply("w0", batch(6, Stored(1001, array("Q", [1002])), Stored(1002, array("Q", [1001]))))
    index.check_invariants()
    assert depth(index, [1, 2, 3]) == 3
    index.drop("w0")
    index.check_invariants()
    assert len(index) == 0


def test_children_that_come_before_their_parent_count_once_it_is_there() -> None:
    index = PrefixIndex()
    index.apply("w0", batch(1, stored([1, 2, 3], start=1)))
    assert depth(index, [1, 2, 3]) == 0
    index.apply("w1", batch(1, stored([1]), replica="w1"))
    assert dict(index.match(keys_of([1, 2, 3]))) == {"w1": Depths(1, 1)}
    index.apply("w0", batch(2, stored([1])))
    assert depth(index, [1, 2, 3]) == 3


def test_late_events_of_a_dropped_replica_do_not_bring_it_back() -> None:
    index = PrefixIndex()
    index.apply("w0", batch(1, stored([1]), generation="g1"))
    index.drop("w0")
    assert index.apply("w0", batch(1, stored([1]), generation="g1")) is Outcome.STALE
    assert index.apply("w0", batch(2, stored([2]), generation="g1")) is Outcome.STALE
    assert index.num_blocks("w0") == 0
    assert index.apply("w0", batch(2, stored([2]), generation="g2")) is Outcome.GAP
    assert index.apply("w0", batch(1, stored([3]), generation="g2")) is Outcome.APPLIED
    assert depth(index, [3]) == 1
    assert index.apply("w0", batch(2, stored([1]), generation="g1")) is Outcome.STALE


def test_an_event_that_is_no_news_shows_that_the_index_was_wrong() -> None:
    index = PrefixIndex()
    assert index.apply("w0", batch(1, stored([1, 2, 3]), stored([1, 9], start=1))) is Outcome.APPLIED
    again = [
        batch(3, stored([1, 2])),  # stands here already
        batch(4, stored([1, 2, 3, 4], start=1)),  # its front does
        batch(5, removed([8], 0)),  # never stored
        batch(6, removed([1, 2, 3, 4, 5], 4, 3)),  # one of the two
        batch(7, removed([1, 2], 0, tier=HOST)),  # it is on the device
        batch(8, Stored(0, keys_of([1, 2])[1:])),  # after another block
    ]
    for one in again:
        assert index.apply("w0", one) is Outcome.CONTRADICTED
    assert (index.num_blocks("w0"), depth(index, [1, 2, 3]), depth(index, [1, 9])) == (4, 3, 2)
    assert index.apply("w0", batch(9, stored([1, 2, 3, 4], start=3))) is Outcome.APPLIED, "of each batch anew"


def test_after_a_skip_events_go_on_as_if_nothing_had_been_between() -> None:
    index = PrefixIndex()
    index.apply("w0", batch(1, stored([1])))
    index.skip_to("w0", 2**40)
    assert (depth(index, [1]), index.num_bad_events("w0")) == (1, 0)
    assert index.apply("w0", batch(2, stored([2]))) is Outcome.STALE
    assert index.apply("w0", batch(2**40 + 1, stored([2]))) is Outcome.APPLIED


def test_blocks_whose_front_was_never_told_are_counted() -> None:
    index = PrefixIndex()
    index.apply("w0", batch(1, stored([1, 2, 3, 4], start=2), stored([1, 2, 3, 7], start=3), stored([5])))
    assert index.num_parentless() == 3
    index.apply("w1", batch(1, stored([1, 2]), replica="w1"))
    assert index.num_parentless() == 0
    assert depth(index, [1, 2, 3, 7]) == 0, "its own front is not told yet"
    assert index.apply("w0", batch(4, stored([1, 2]))) is Outcome.APPLIED
    assert depth(index, [1, 2, 3, 7]) == 4


def test_a_new_generation_replaces_the_old_one() -> None:
    index = PrefixIndex()
    index.apply("w0", batch(1, stored([1]), generation="g1"))
    assert index.apply("w0", batch(2, stored([2]), generation="g2")) is Outcome.GAP
    assert depth(index, [1]) == 1
    assert index.apply("w0", batch(1, stored([2]), generation="g2")) is Outcome.APPLIED
    assert (depth(index, [1]), depth(index, [2]), index.generation("w0")) == (0, 1, "g2")


def test_a_thousand_replicas_are_all_found() -> None:
    index = PrefixIndex()
    for number in range(1024):
        index.apply(f"w{number}", batch(1, stored(list(range(1 + number % 50))), replica=f"w{number}"))
    found = index.match(keys_of(list(range(60))))
    assert len(found) == 1024
    assert all(found[f"w{number}"].device == 1 + number % 50 for number in range(1024))


def test_the_coldest_runs_are_forgotten_when_the_bound_is_reached() -> None:
    index = PrefixIndex(max_blocks=100)
    for number in range(9):
        index.apply("w0", batch(number + 1, stored([number, *range(9)])))
    index.match(keys_of([0]))
    for number in range(9, 30):
        index.apply("w0", batch(number + 1, stored([number, *range(9)])))
        index.match(keys_of([0]))
        assert len(index) <= 100
    assert depth(index, [0, *range(9)]) == 10, "it was looked up all the time"
    assert depth(index, [1, *range(9)]) == 0
    assert not index.is_complete("w0")
    assert index.num_blocks("w0") == len(index)
    assert index.apply("w0", batch(31, stored([0]), removed([1, *range(9)], 9))) is Outcome.APPLIED, "it may be right"
    assert index.has_room(90 - len(index)) and not index.has_room(91 - len(index))
    index.apply("w0", batch(33, Cleared()))
    assert index.is_complete("w0")


@pytest.mark.parametrize(("policy", "size"), [("lru", 4), ("slru", 4), ("slru", 8), ("slru", 32)])
def test_an_index_fed_by_a_cache_predicts_its_hits_exactly(policy: EvictionPolicy, size: int) -> None:
    """Prompts and answers; every prediction is what the cache then does."""
    rng = random.Random(5)
    scheme = HashScheme("sha256_cbor", size)
    cache = PrefixCache(40, scheme, replica="w0", generation="g1", policy=policy)
    index = PrefixIndex()
    history: list[list[int]] = [[]]
    for step in range(300):
        prompt = rng.choice(history)[: 15 * size] + [rng.randrange(9) for _ in range(rng.randrange(1, 3 * size))]
        asked = chain(prompt, scheme=scheme)
        limit = (len(prompt) - 1) // size
        predicted = index.match(asked.keys[:limit]).get("w0", Depths(0, 0)).device
        admission = cache.admit(step, asked, float(step))
        assert admission is not None
        assert admission.num_cached_tokens == predicted * size
        cache.commit(step, len(prompt))
        if cache.append(step, [rng.randrange(9) for _ in range(5)]):
            cache.commit(step, len(asked) - 1)
        cache.free(step, float(step))
        history = [*history[-20:], list(asked.token_ids)]
        taken = cache.take_events()
        if taken is not None:
            assert index.apply("w0", taken) is Outcome.APPLIED
        index.check_invariants()
        assert index.num_blocks("w0") == cache.num_cached_blocks
    fresh = PrefixIndex()
    fresh.load("w0", cache.snapshot())
    assert fresh.num_blocks("w0") == index.num_blocks("w0")
    for tokens in history:
        keys = scheme.keys(tokens)
        assert fresh.match(keys) == index.match(keys)


REPLICAS = st.sampled_from(["w0", "w1", "w2"])
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


class IndexMachine(RuleBasedStateMachine):
    """Any events at all, gaps in chains included: the index equals a set of keys per replica and tier."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(part_blocks=2)
        self.coming: dict[str, tuple[Generator[None, None, None], int, list[list[int]]]] = {}
        self.held: dict[str, tuple[set[int], set[int]]] = {}
        self.seq: dict[str, int] = {}
        self.paths: list[list[int]] = []

    def send(self, replica: str, event: Event, is_news: bool = True) -> None:
        seq = self.seq.get(replica, 0)
        outcome = self.index.apply(replica, batch(seq + 1, event, generation="g9", replica=replica))
        assert outcome is (Outcome.APPLIED if is_news else Outcome.CONTRADICTED)
        self.seq[replica] = seq + 1

    def blocks(self, replica: str, tier: Tier) -> set[int]:
        return self.held.setdefault(replica, (set(), set()))[tier]

    def send_removed(self, replica: str, path: list[int], positions: Sequence[int], tier: Tier) -> None:
        keys, held = [keys_of(path)[position] for position in positions], self.blocks(replica, tier)
        self.send(replica, removed(path, *positions, tier=tier), len(set(keys) & held) == len(keys))
        held.difference_update(keys)

    @rule(replica=REPLICAS, path=PATHS, start=st.integers(0, 6), tier=st.sampled_from([DEVICE, DEVICE, HOST]))
    def store(self, replica: str, path: list[int], start: int, tier: Tier) -> None:
        start = min(start, len(path) - 1)
        self.paths.append(path)
        keys, held = keys_of(path)[start:], self.blocks(replica, tier)
        self.send(replica, stored(path, start, tier), held.isdisjoint(keys))
        held.update(keys)

    @rule(replica=REPLICAS, path=PATHS, data=st.data(), tier=st.sampled_from([DEVICE, DEVICE, HOST]))
    def remove(self, replica: str, path: list[int], data: st.DataObject, tier: Tier) -> None:
        if self.paths and data.draw(st.booleans()):
            path = data.draw(st.sampled_from(self.paths))
        positions = data.draw(st.lists(st.integers(0, len(path) - 1), max_size=7))
        self.send_removed(replica, path, positions, tier)

    @rule(replica=REPLICAS, count=st.integers(1, 7), path=PATHS)
    def evict_the_end(self, replica: str, count: int, path: list[int]) -> None:
        self.send_removed(replica, path, range(len(path) - 1, max(-1, len(path) - 1 - count), -1), DEVICE)

    @rule(replica=REPLICAS)
    def clear(self, replica: str) -> None:
        self.send(replica, Cleared())
        self.held[replica] = (set(), set())

    @rule(replica=REPLICAS, paths=st.lists(PATHS, max_size=4))
    def reload(self, replica: str, paths: list[list[int]]) -> None:
        self.seq[replica] = self.seq.get(replica, 0) + 3
        self.index.load(replica, Snapshot(replica, "g9", self.seq[replica], tuple(stored(path) for path in paths)))
        self.held[replica] = ({key for path in paths for key in keys_of(path)}, set())
        self.paths += paths

    @rule(replica=REPLICAS, paths=st.lists(PATHS, min_size=2, max_size=4), ahead=st.integers(-2, 2))
    def begin_to_reload(self, replica: str, paths: list[list[int]], ahead: int) -> None:
        self.give_up_to_reload(replica)
        seq = max(0, self.seq.get(replica, 0) + ahead)
        self.coming[replica] = (self.index.loading(replica, "g9", seq, map(stored, paths)), seq, paths)

    @rule(replica=REPLICAS)
    def go_on_to_reload(self, replica: str) -> None:
        if replica not in self.coming:
            return
        parts, seq, paths = self.coming[replica]
        if next(parts, self) is self:
            del self.coming[replica]
            self.seq[replica] = seq
            self.held[replica] = ({key for path in paths for key in keys_of(path)}, set())
            self.paths += paths

    @rule(replica=REPLICAS)
    def give_up_to_reload(self, replica: str) -> None:
        if replica in self.coming:
            self.coming.pop(replica)[0].close()

    @rule()
    def sweep(self) -> None:
        self.index.sweep()

    @rule(replica=REPLICAS)
    def drop_and_return(self, replica: str) -> None:
        self.index.drop(replica)
        assert self.index.num_blocks(replica) == 0
        self.index.load(replica, Snapshot(replica, "g9", 0, ()))
        self.seq[replica] = 0
        self.held[replica] = (set(), set())

    @rule(path=PATHS)
    def look_up(self, path: list[int]) -> None:
        expected = {}
        for replica, (device, host) in self.held.items():
            keys = keys_of(path)
            on_device = next((n for n, key in enumerate(keys) if key not in device), len(keys))
            total = next((n for n, key in enumerate(keys) if key not in device | host), len(keys))
            if total:
                expected[replica] = Depths(on_device, total)
        assert dict(self.index.match(keys_of(path))) == expected

    @invariant()
    def agree(self) -> None:
        self.index.check_invariants()
        for replica, held in self.held.items():
            assert [self.index.num_blocks(replica, tier) for tier in Tier] == [len(keys) for keys in held]
            assert self.index.num_bad_events(replica) == 0
        if self.paths:
            self.look_up_last()

    def look_up_last(self) -> None:
        path = self.paths[-1]
        keys = keys_of(path)
        found = self.index.match(keys)
        for replica, (device, host) in self.held.items():
            total = next((n for n, key in enumerate(keys) if key not in device | host), len(keys))
            assert found.get(replica, Depths(0, 0)).total == total


def test_the_index_equals_plain_sets_after_every_event() -> None:
    run_state_machine_as_test(
        IndexMachine,
        settings=settings(
            max_examples=int(os.environ.get("WARMFRONT_TEST_EXAMPLES", "150")),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_long_chains_of_many_replicas_agree_with_plain_sets() -> None:
    """Batches of hundreds of keys, branches in the middle of runs, ends evicted and chains stored again."""
    rng = random.Random(11)
    index = PrefixIndex()
    held: dict[str, set[int]] = {f"w{number}": set() for number in range(6)}
    seqs = dict.fromkeys(held, 0)
    chains: list[list[int]] = [[rng.getrandbits(64) for _ in range(400)]]
    for step in range(400):
        if rng.random() < 0.2:
            base = rng.choice(chains)
            cut = rng.randrange(len(base))
            chains.append(base[:cut] + [rng.getrandbits(64) for _ in range(rng.choice([1, 40, 300]))])
        replica, keys = rng.choice(list(held)), rng.choice(chains)
        events: list[Event] = []
        if rng.random() < 0.6:
            front = keys[: rng.randrange(1, len(keys) + 1)]
            events.append(Stored(0, array("Q", front)))
            is_news = held[replica].isdisjoint(front)
            held[replica] |= set(front)
        else:
            count = rng.randrange(1, len(keys) + 1)
            # Every branch beyond this point goes too: prefix-closed, ends first.
            root = keys[-count]
            gone = [key for chain in chains if root in chain for key in reversed(chain[chain.index(root) :])]
            events.append(Removed(array("Q", gone)))
            is_news = len(held[replica].intersection(gone)) == len(gone)
            held[replica] -= set(gone)
        outcome = index.apply(replica, batch(seqs[replica] + 1, *events, replica=replica))
        assert outcome is (Outcome.APPLIED if is_news else Outcome.CONTRADICTED)
        seqs[replica] += 1
        if step % 10 == 0:
            index.check_invariants()
        for asked in rng.choices(chains, k=3):
            found = index.match(array("Q", asked))
            for name, keys_held in held.items():
                expected = next((n for n, key in enumerate(asked) if key not in keys_held), len(asked))
                assert found.get(name, Depths(0, 0)).device == expected
    assert [index.num_blocks(name) for name in held] == [len(keys_held) for keys_held in held.values()]
