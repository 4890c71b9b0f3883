"""The table of places beside a dict, with few and many keys at once."""

import random
from array import array

import pytest

from cache.key_table import ABSENT, KeyTable


@pytest.mark.parametrize("seed", range(6))
def test_the_table_agrees_with_a_dict_whatever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    table, places = KeyTable(), {}
    # Few low bits: slots collide all the time. Zero and the largest key are keys like any other.
    pool = [rng.getrandbits(64) & ~0x3F0 for _ in range(4000)] + [0, 2**64 - 1]
    for step in range(300):
        if rng.random() < 0.55:
            count = rng.choice([1, 3, 30, 200])
            keys = array("Q", [key for key in dict.fromkeys(rng.choices(pool, k=count)) if key not in places])
            table.insert_run(keys, step * 1000)
            places |= {key: step * 1000 + offset for offset, key in enumerate(keys)}
        elif places:
            gone = rng.sample(sorted(places), min(len(places), rng.choice([1, 5, 40, 400])))
            strangers = [key for key in rng.choices(pool, k=5) if key not in places]
            table.delete_many(array("Q", dict.fromkeys([*gone, *strangers])))
            for key in gone:
                del places[key]
        assert len(table) == len(places)
        asked = array("Q", rng.choices(pool, k=rng.choice([2, 60])))
        assert [table.find(key) for key in asked] == [places.get(key, ABSENT) for key in asked]
        absent = next((count for count, key in enumerate(asked) if key in places), len(asked))
        assert table.num_absent(asked) == absent
    keys, found = table.items()
    assert dict(zip(keys.tolist(), found.tolist(), strict=True)) == places


def test_memory_stays_within_a_small_factor_through_churn() -> None:
    table = KeyTable()
    for round_ in range(200):
        keys = array("Q", [hash((round_, number)) & 2**64 - 1 for number in range(500)])
        table.insert_run(keys, 0)
        table.delete_many(keys)
    assert len(table) == 0
    assert table.num_bytes <= 16 * 4096
