"""The table of places beside a dict, with few and many keys at once."""

import itertools
import random
from array import array

import pytest

from cache.key_table import ABSENT, KeyTable


@pytest.mark.parametrize("is_slow_to_grow", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_table_agrees_with_a_dict_whatever_comes_and_goes(seed: int, is_slow_to_grow: bool) -> None:
    rng = random.Random(seed)
    table, places = KeyTable(step_buckets=1 if is_slow_to_grow else 300), {}
    stored, evicted = ([1, 2, 30], [1, 2, 20]) if is_slow_to_grow else ([1, 3, 30, 200], [1, 5, 40, 400])
    sizes = []
    # Few low bits: slots collide all the time. Zero and the largest key are keys like any other.
    pool = [rng.getrandbits(64) & ~0x3F0 for _ in range(4000)] + [0, 2**64 - 1]
    for step in range(600):
        if rng.random() < (0.55 if step < 400 else 0.4):
            count = rng.choice(stored)
            keys = array("Q", [key for key in dict.fromkeys(rng.choices(pool, k=count)) if key not in places])
            table.insert_run(keys, step * 1000)
            places |= {key: step * 1000 + offset for offset, key in enumerate(keys)}
        elif places:
            gone = rng.sample(sorted(places), min(len(places), rng.choice(evicted)))
            strangers = [key for key in rng.choices(pool, k=5) if key not in places]
            table.delete_many(array("Q", dict.fromkeys([*gone, *strangers])))
            for key in gone:
                del places[key]
        sizes.append(table.num_buckets)
        assert len(table) == len(places)
        asked = array("Q", rng.choices(pool, k=rng.choice([2, 60])))
        assert [table.find(key) for key in asked] == [places.get(key, ABSENT) for key in asked]
        absent = next((count for count, key in enumerate(asked) if key in places), len(asked))
        assert table.num_absent(asked) == absent
    keys, found = table.items()
    assert dict(zip(keys.tolist(), found.tolist(), strict=True)) == places
    if is_slow_to_grow:
        assert sum(size.bit_count() > 1 for size in sizes) > 2, "for many steps it is between two sizes"


def test_no_single_event_pays_for_the_table_to_double_or_to_shrink() -> None:
    """And at every moment between two sizes the table is right."""
    rng = random.Random(3)
    keys = array("Q", [rng.getrandbits(64) for _ in range(21_000)])
    table, sizes = KeyTable(step_buckets=16), [8]
    for start in range(0, len(keys), 10):
        table.insert_run(keys[start : start + 10], start)
        sizes.append(table.num_buckets)
        asked = rng.sample(range(len(keys)), 5)
        assert [table.find(keys[at]) for at in asked] == [at if at < start + 10 else ABSENT for at in asked]
        assert table.num_absent(keys[start + 10 : start + 40] + keys[start : start + 1]) == len(
            keys[start + 10 : start + 40]
        )
    assert [table.find(key) for key in keys] == list(range(len(keys)))
    assert max(sizes) == 8192
    for start in range(0, len(keys), 10):
        table.delete_many(keys[start : start + 10])
        sizes.append(table.num_buckets)
        asked = rng.sample(range(len(keys)), 5)
        assert [table.find(keys[at]) for at in asked] == [at if at >= start + 10 else ABSENT for at in asked]
        assert table.num_absent(keys[max(0, start - 20) : start + 11]) == min(30, start + 10)
    assert table.num_buckets == 8
    assert max(abs(after - before) for before, after in itertools.pairwise(sizes)) <= 16 + 2 * 10


def test_a_key_that_is_bytes_of_two_others_is_not_found_between_them() -> None:
    first, second = 0x1111_1111_0000_0000, 0x2222_2222_3333_3330  # one bucket, and one slot beside the other
    table = KeyTable()
    table.insert_run(array("Q", [first, second]), 7)
    assert (table.find(first), table.find(second)) == (7, 8)
    for shift in range(8, 64, 8):
        assert table.find((first >> shift | second << 64 - shift) & 2**64 - 1) == ABSENT
    table.delete_many(array("Q", [first]))
    table.insert_run(array("Q", [0x4400_0000_0000_0000]), 9)  # zeros reach over its edge: the free slot is after them
    assert (table.find(second), table.find(0x4400_0000_0000_0000)) == (8, 9)


def test_memory_stays_within_a_small_factor_through_churn() -> None:
    table = KeyTable()
    for round_ in range(200):
        keys = array("Q", [hash((round_, number)) & 2**64 - 1 for number in range(500)])
        table.insert_run(keys, 0)
        table.delete_many(keys)
    assert len(table) == 0
    assert table.num_bytes <= 16 * 4096
