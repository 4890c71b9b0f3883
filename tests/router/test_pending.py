"""Pending blocks: what is looked up is what has been added and not yet removed, whatever the pieces are."""

from __future__ import annotations

import random
from array import array
from collections import Counter

from router.pending import PendingBlocks, Piece


def chain(rng: random.Random, length: int) -> array[int]:
    """Keys as hashes are: with all kinds of low bits."""
    return array("Q", [rng.getrandbits(64) for _ in range(length)])


def test_a_piece_is_found_from_any_of_its_keys_on() -> None:
    keys = chain(random.Random(1), 300)
    pending = PendingBlocks()
    piece = pending.add(keys[40:240])
    assert [pending.depth(keys, held) for held in (0, 39, 40, 41, 77, 239)] == [0, 39, 240, 240, 240, 240]
    assert [pending.depth(keys, held) for held in (240, 299, 300)] == [240, 299, 300]
    assert len(pending) == 200
    pending.remove(piece)
    assert (pending.depth(keys, 40), len(pending)) == (40, 0)


def test_a_prompt_follows_a_piece_as_far_as_both_are_the_same() -> None:
    rng = random.Random(2)
    keys = chain(rng, 100)
    other = keys[:60] + chain(rng, 40)
    pending = PendingBlocks()
    pending.add(keys)
    assert pending.depth(other, 0) == 60
    pending.add(other[60:80])
    assert pending.depth(other, 0) == 80, "the second piece goes on where the first is left"
    assert pending.depth(keys, 0) == 100


def test_what_two_have_added_stays_until_both_have_removed_it() -> None:
    keys = chain(random.Random(3), 50)
    pending = PendingBlocks()
    long, short = pending.add(keys), pending.add(keys[10:30])
    pending.remove(long)
    assert (pending.depth(keys, 0), pending.depth(keys, 15)) == (0, 30)
    pending.remove(short)
    assert (pending.depth(keys, 15), len(pending)) == (15, 0)


def test_blocks_of_several_answers_are_found_though_they_are_no_chain() -> None:
    rng = random.Random(4)
    keys = chain(rng, 20)
    first, second = chain(rng, 3), chain(rng, 3)
    pending = PendingBlocks()
    pending.add(first + second, are_chained=False)
    assert [pending.depth(keys + answer, 20) for answer in (first, second)] == [23, 23]


def test_it_says_what_a_count_of_each_key_would_say() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        prompts = [chain(rng, 60)]
        for _ in range(8):  # a tree of prompts
            front = rng.choice(prompts)
            prompts.append(front[: rng.randrange(len(front))] + chain(rng, rng.randrange(1, 60)))
        pending, counts = PendingBlocks(), Counter[int]()
        added: list[Piece] = []
        for _ in range(300):
            if added and rng.random() < 0.4:
                piece = added.pop(rng.randrange(len(added)))
                pending.remove(piece)
                counts -= Counter(piece.keys)
            else:
                keys = rng.choice(prompts)
                start = rng.randrange(len(keys) + 1)
                added.append(pending.add(keys[start : rng.randrange(start, len(keys) + 1)]))
                counts += Counter(added[-1].keys)
            keys = rng.choice(prompts)
            held = rng.randrange(len(keys) + 1)
            depth = held
            while depth < len(keys) and keys[depth] in counts:
                depth += 1
            assert pending.depth(keys, held) == depth
            assert len(pending) == counts.total()
        for piece in added:
            pending.remove(piece)
        assert not pending._pieces
