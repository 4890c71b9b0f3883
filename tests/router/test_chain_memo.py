"""Keys from the memo are those of the scheme, and only what is new is hashed."""

from __future__ import annotations

import random

import pytest

from cache.adapter import Adapter
from cache.block_hash import HashScheme, extra_keys
from router.chain_memo import ChainMemo
from router.segments import pack_ids

SCHEME = HashScheme(block_size=4)


def test_keys_are_those_of_the_scheme_for_any_prompt_salt_and_adapter() -> None:
    rng = random.Random(0)
    memo = ChainMemo(SCHEME, max_bytes=20_000)
    fronts = [[rng.randrange(1000) for _ in range(400)] for _ in range(4)]
    for _ in range(600):
        ids = rng.choice(fronts)[: rng.randrange(400)] + [rng.randrange(1000) for _ in range(rng.randrange(100))]
        salt, adapter = rng.choice(["", "", "a", "b"]), rng.choice([None, None, Adapter("a", "1"), Adapter("a", "2")])
        extra = extra_keys(len(ids), 4, lora=adapter, cache_salt=salt)
        assert memo.keys(pack_ids(ids), salt, adapter) == SCHEME.keys(ids, extra)
        assert memo.num_bytes <= 20_000


def test_each_block_is_hashed_once_and_a_known_front_not_at_all() -> None:
    memo = ChainMemo(SCHEME)
    ids = list(range(640))
    memo.keys(pack_ids(ids))
    assert memo.num_hashed_blocks == 160
    memo.keys(pack_ids(ids))
    assert memo.num_hashed_blocks == 160
    memo.keys(pack_ids([*ids, 1, 2, 3, 4, 5, 6]))
    assert memo.num_hashed_blocks == 161
    memo.keys(pack_ids([*ids, 1, 2, 3, 4, 5, 6]))
    assert memo.num_hashed_blocks == 161


def test_prompts_that_part_share_what_was_hashed_before_they_do() -> None:
    memo = ChainMemo(SCHEME)
    front = list(range(400))
    for number in range(10):
        memo.keys(pack_ids([*front, *[1000 + number] * 40]))
    assert memo.num_hashed_blocks == 110 + 9 * 10
    assert memo.keys(pack_ids(front[:203])) == SCHEME.keys(front[:203])
    assert memo.num_hashed_blocks == 200


def test_the_oldest_is_forgotten_and_a_front_after_all_that_stands_on_it() -> None:
    memo = ChainMemo(SCHEME, max_bytes=13_500)
    front, turn = list(range(400)), [7] * 40
    memo.keys(pack_ids(front))
    memo.keys(pack_ids(front + turn))
    memo.keys(pack_ids([9] * 400))
    num_hashed = memo.num_hashed_blocks
    memo.keys(pack_ids(front))
    assert memo.num_hashed_blocks == num_hashed
    memo.keys(pack_ids(front + turn))
    assert memo.num_hashed_blocks == num_hashed + 10


def test_a_long_prompt_is_hashed_in_parts_of_which_a_caller_may_let_time_pass() -> None:
    memo, ids = ChainMemo(SCHEME), list(range(20_000))
    counts = [(len(part), memo.num_hashed_blocks) for part in memo.parts(pack_ids(ids))]
    assert counts == [(2048, 2048), (2048, 4096), (904, 5000)]
    assert memo.keys(pack_ids(ids)) == SCHEME.keys(ids)
    assert memo.num_hashed_blocks == 5000


def test_salts_and_adapters_never_meet() -> None:
    memo = ChainMemo(SCHEME)
    packed = pack_ids(list(range(192)))
    adapters = [None, Adapter("a", "1"), Adapter("a", "2"), Adapter("b", "1")]
    keys = [key for adapter in adapters for salt in ("", "a") for key in memo.keys(packed, salt, adapter)]
    assert len(set(keys)) == len(keys)


def test_an_id_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="token id"):
        ChainMemo(SCHEME).keys(b"\xff" * 16)
