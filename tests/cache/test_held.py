"""Sets of positions as one integer, beside plain sets."""

import random

from cache.held import Held, either, front_of, is_canonical, length_of, num_held, with_range, without_range


def positions(held: Held) -> set[int]:
    return set(range(held)) if held >= 0 else {bit for bit in range((~held).bit_length()) if ~held >> bit & 1}


def test_a_front_is_its_length_and_anything_else_a_mask() -> None:
    assert with_range(0, 0, 3) == 3
    assert with_range(3, 5, 6) == ~0b100111
    assert with_range(~0b100111, 3, 5) == 6, "the gap is closed"
    assert without_range(6, 4, 6) == 4
    assert without_range(6, 0, 1) == ~0b111110
    assert without_range(~0b111110, 1, 6) == 0


def test_every_change_is_that_of_a_plain_set() -> None:
    rng = random.Random(3)
    held, expected = 0, set[int]()
    for _ in range(3_000):
        start = rng.randrange(12)
        end = start + rng.randrange(1, 6)
        if rng.random() < 0.5:
            held = with_range(held, start, end)
            expected |= set(range(start, end))
        else:
            held = without_range(held, start, end)
            expected -= set(range(start, end))
        assert positions(held) == expected
        assert is_canonical(held)
        assert num_held(held) == len(expected)
        assert length_of(held) == max(expected, default=-1) + 1
        assert front_of(held) == next(position for position in range(100) if position not in expected)
        other = with_range(0, start, end)
        assert positions(either(held, other)) == expected | set(range(start, end))
        assert is_canonical(either(held, other))
