"""Which blocks of a run a replica holds, as one integer.

Nearly always it is the first n of them, since replicas evict chain ends first: then the integer is n. Any other set (a
gap, a host tier that holds the far end) is ``~mask``, below 0, where bit i of the mask stands for block i.
"""

from __future__ import annotations

from typing import TypeAlias

Held: TypeAlias = int


def num_held(held: Held) -> int:
    """How many blocks it is."""
    return held if held >= 0 else (~held).bit_count()


def front_of(held: Held) -> int:
    """How many of the first blocks there are before the first gap."""
    if held >= 0:
        return held
    mask = ~held
    return (~mask & mask + 1).bit_length() - 1


def length_of(held: Held) -> int:
    """Up to where it reaches: one more than the position of its last block."""
    return held if held >= 0 else (~held).bit_length()


def with_range(held: Held, start: int, end: int) -> Held:
    """These blocks too: from ``start`` to before ``end``."""
    if start <= held:  # so the front only gets longer
        return max(held, end)
    return _of_mask(_mask_of(held) | (1 << end) - (1 << start))


def without_range(held: Held, start: int, end: int) -> Held:
    """All but these blocks: from ``start`` to before ``end``."""
    if end == held:
        return start
    return _of_mask(_mask_of(held) & ~((1 << end) - (1 << start)))


def either(one: Held, other: Held) -> Held:
    """What is in one or in both."""
    return _of_mask(_mask_of(one) | _mask_of(other))


def is_canonical(held: Held) -> bool:
    """Whether it is the one integer that its set has: a front is never a mask."""
    return held == _of_mask(_mask_of(held))


def _mask_of(held: Held) -> int:
    return (1 << held) - 1 if held >= 0 else ~held


def _of_mask(mask: int) -> Held:
    return ~mask if mask & mask + 1 else mask.bit_length()
