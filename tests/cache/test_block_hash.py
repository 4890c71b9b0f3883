"""Names of blocks: same prefix, same name; anything else, another."""

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block_hash import (
    ALGORITHMS,
    DEFAULT_SEED,
    HashScheme,
    MediaSpan,
    extra_keys,
    index_key,
    pack_keys,
    serialise_block,
)

ROOT = Path(__file__).parents[2]
SCHEME = HashScheme("sha256_cbor", 4)
TOKEN_IDS = st.one_of(
    st.integers(0, 30), st.integers(0, 300), st.integers(60_000, 70_000), st.integers(260_000, 2**31 - 1)
)


def test_equal_blocks_after_different_prefixes_differ() -> None:
    first = SCHEME.block_hashes([1, 2, 3, 4, 7, 7, 7, 7])
    second = SCHEME.block_hashes([4, 3, 2, 1, 7, 7, 7, 7])
    assert first[1] != second[1]


def test_a_partial_last_block_has_no_name() -> None:
    assert SCHEME.block_hashes([1, 2, 3]) == []
    assert SCHEME.block_hashes([1, 2, 3, 4, 5]) == SCHEME.block_hashes([1, 2, 3, 4])


@settings(deadline=None, max_examples=150)
@given(tokens=st.lists(TOKEN_IDS, max_size=60), block_size=st.integers(1, 20), data=st.data())
def test_the_bytes_written_by_hand_are_those_of_the_libraries(
    tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    algorithm = data.draw(st.sampled_from(ALGORITHMS))
    scheme = HashScheme(algorithm, block_size, "seed")
    parent = scheme.root
    for block, block_hash in enumerate(scheme.block_hashes(tokens)):
        ids = tuple(tokens[block * block_size : (block + 1) * block_size])
        parent = scheme._digest(serialise_block(algorithm.endswith("_cbor"), parent, ids, None))
        assert block_hash == parent


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_pickle_too_long_for_one_frame_is_still_right(algorithm: str) -> None:
    tokens = list(range(70_000, 90_000))
    scheme = HashScheme(algorithm, 20_000, "seed")
    data = serialise_block(algorithm.endswith("_cbor"), scheme.root, tuple(tokens), None)
    assert scheme.block_hashes(tokens) == [scheme._digest(data)]


def test_ids_may_come_as_list_array_or_packed_bytes() -> None:
    tokens = [0, 255, 256, 70_000, 2**31 - 1, 5, 6, 7]
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    expected = SCHEME.block_hashes(tokens)
    for form in (tuple(tokens), array("i", tokens), array("I", tokens), array("q", tokens), packed, memoryview(packed)):
        assert SCHEME.block_hashes(form) == expected
    assert SCHEME.block_hashes(np.array(tokens)) == expected
    assert SCHEME.block_hashes(range(8)) == SCHEME.block_hashes(list(range(8)))


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**31],
        [2**40],
        [-(2**40)],
        [1.0],
        [None],
        ["7"],
        array("i", [-1]),
        array("I", [2**31]),
        b"\xff\xff\xff\xff",
        b"123",
        np.array([-5]),
        np.array([2**31]),
        np.array([0.5]),
    ],
)
def test_an_id_that_is_none_is_refused_and_the_chain_unharmed(tokens: object) -> None:
    with pytest.raises(ValueError, match="token id"):
        SCHEME.block_hashes(tokens)  # type: ignore[arg-type]
    chain = SCHEME.chain([1, 2, 3])
    with pytest.raises(ValueError, match="token id"):
        chain.extend(tokens)  # type: ignore[arg-type]
    chain.extend([4])
    assert chain.hashes == SCHEME.block_hashes([1, 2, 3, 4])


@given(st.lists(TOKEN_IDS, max_size=40), st.lists(st.integers(0, 12), max_size=8), st.sampled_from(["plain", "all"]))
def test_a_chain_that_grew_equals_one_hashed_at_once(tokens: list[int], cuts: list[int], kind: str) -> None:
    extra = None if kind == "plain" else extra_keys(5, 4, lora=("a", "/a@1"), media=[("i", 1, 4)], cache_salt="s")
    grown = SCHEME.chain(tokens[:5], extra)
    at = 5
    for cut in cuts:
        grown.extend(tokens[at : at + cut])
        at += cut
    grown.extend(tokens[at:])
    whole = SCHEME.chain(tokens, extra)
    assert grown.hashes == whole.hashes
    assert grown.keys == whole.keys == pack_keys(whole.hashes)
    assert list(grown.token_ids) == tokens
    assert len(grown) == len(tokens)


def test_the_adapter_goes_on_through_the_answer_and_media_and_salt_do_not() -> None:
    lora = ("a", "/a@1")
    extra = extra_keys(4, 4, lora=lora, media=[("i", 0, 2)], cache_salt="s")
    assert extra == ((("lora", *lora), ("mm", "i", 0), ("cache_salt", "s")),)
    chain = SCHEME.chain([1, 2, 3, 4], extra)
    chain.extend([5, 6, 7, 8])
    both = [*extra, (("lora", *lora),)]
    assert chain.hashes == SCHEME.block_hashes([1, 2, 3, 4, 5, 6, 7, 8], both)


def test_a_copy_of_a_chain_begins_alike_and_grows_apart() -> None:
    scheme = HashScheme(block_size=4)
    extra = extra_keys(9, 4, lora=("a", "v"), cache_salt="s")
    chain = scheme.chain([*range(9)], extra)
    copied = chain.copy()
    copied.extend([1, 1, 1])
    chain.extend([2, 2, 2])
    for grown, end in ((copied, [1, 1, 1]), (chain, [2, 2, 2])):
        alone = scheme.chain([*range(9), *end], extra)
        assert (grown.token_ids, grown.hashes, grown.keys) == (alone.token_ids, alone.hashes, alone.keys)


def test_hashing_can_go_on_from_a_parent() -> None:
    tokens = list(range(400))
    hashes = SCHEME.block_hashes(tokens)
    assert SCHEME.block_hashes(tokens[8:], parent=hashes[1]) == hashes[2:]


def test_index_keys_are_the_last_eight_bytes_big_endian() -> None:
    hashes = SCHEME.block_hashes(range(12))
    assert index_key(bytes(range(32))) == 0x18191A1B1C1D1E1F
    assert list(SCHEME.keys(range(12))) == [index_key(block_hash) for block_hash in hashes]
    assert SCHEME.keys(range(12)).typecode == "Q"


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("seed", [None, ""])
def test_xxhash_without_a_secret_seed_is_refused_and_told_what_to_set(algorithm: str, seed: str | None) -> None:
    with pytest.raises(ValueError, match=r"WARMFRONT_HASH_SEED or --prefix-caching-hash-seed-file"):
        HashScheme(algorithm, 16, seed)


def test_what_a_scheme_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match="'md5' is none of sha256, sha256_cbor, xxhash, xxhash_cbor"):
        HashScheme("md5")
    with pytest.raises(ValueError, match="block size 0"):
        HashScheme(block_size=0)
    with pytest.raises(ValueError, match="extra keys for 1 of 2 full blocks"):
        SCHEME.block_hashes(range(8), [None])


def test_the_fingerprint_tells_schemes_apart_and_no_seed() -> None:
    schemes = [
        HashScheme(),
        HashScheme(block_size=32),
        HashScheme("sha256"),
        HashScheme(seed="other"),
        HashScheme("xxhash", seed="other"),
    ]
    assert len({scheme.fingerprint() for scheme in schemes}) == len(schemes)
    assert HashScheme().fingerprint() == HashScheme(seed=DEFAULT_SEED).fingerprint()
    assert "other" not in HashScheme(seed="other").fingerprint() + repr(HashScheme(seed="other"))


def test_a_reloaded_adapter_of_the_same_name_shares_nothing() -> None:
    tokens = list(range(8))
    first, second = (SCHEME.block_hashes(tokens, extra_keys(8, 4, lora=("a", f"/a@{v}"))) for v in (1, 2))
    base = SCHEME.block_hashes(tokens)
    assert not set(first) & set(second)
    assert not set(first) & set(base)


def test_a_salt_and_an_adapter_of_one_name_share_nothing() -> None:
    tokens = list(range(4))
    salted = SCHEME.block_hashes(tokens, extra_keys(4, 4, cache_salt="x"))
    adapted = SCHEME.block_hashes(tokens, extra_keys(4, 4, lora=("x", "x")))
    pictured = SCHEME.block_hashes(tokens, extra_keys(4, 4, media=[("x", 0, 1)]))
    assert len({*salted, *adapted, *pictured, *SCHEME.block_hashes(tokens)}) == 4


def test_an_image_of_41_placeholders_over_blocks_of_16_is_in_the_four_blocks_it_touches() -> None:
    scheme = HashScheme(block_size=16)
    tokens = [7] * 5 + [9] * 11 + [9] * 30 + [7] * 34  # placeholders stand at 5 to 45
    extra = extra_keys(80, 16, media=[MediaSpan("img", 5, 41)])
    assert extra == ((("mm", "img", 5),), (("mm", "img", -11),), (("mm", "img", -27),), None, None)
    other = extra_keys(80, 16, media=[MediaSpan("jpg", 5, 41)])
    assert not set(scheme.block_hashes(tokens, extra)) & set(scheme.block_hashes(tokens, other))
    late = extra_keys(80, 16, media=[MediaSpan("img", 20, 41)])
    text_before = scheme.block_hashes(tokens, late)[0]
    assert text_before == scheme.block_hashes(tokens)[0], "text before an image is shared"
    with pytest.raises(ValueError, match="media 'img' spans tokens 60 to 101 of 80"):
        extra_keys(80, 16, media=[MediaSpan("img", 60, 41)])


def test_nothing_extra_is_none_and_a_short_prompt_still_carries_its_salt() -> None:
    assert extra_keys(10, 4) is None
    assert extra_keys(10, 4, cache_salt="") is None
    assert extra_keys(2, 4, cache_salt="s") == ((("cache_salt", "s"),),)
    assert extra_keys(9, 4, cache_salt="s") == ((("cache_salt", "s"),), None, None)


PRINT_ALL = """
import json
from cache.block_hash import ALGORITHMS, HashScheme, extra_keys
extra = extra_keys(8, 4, lora=("lora", "lo" + "ra"), media=[("lora", 2, 4)], cache_salt="lora")
print(json.dumps([[h.hex() for h in HashScheme(a, 4, "s").block_hashes(range(8), e)]
                  for a in ALGORITHMS for e in (None, extra)]))
"""


def run(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_two_processes_with_different_hash_seeds_agree_on_all_four() -> None:
    outputs = [run(PRINT_ALL, PYTHONHASHSEED=seed).stdout for seed in ("1", "2")]
    assert outputs[0] == outputs[1]
    assert len({block_hash for chain in json.loads(outputs[0]) for block_hash in chain}) == 16


def test_neither_cbor2_nor_xxhash_is_needed_where_they_are_not_used() -> None:
    done = run(
        "import sys; sys.modules['cbor2'] = sys.modules['xxhash'] = None\n"
        "import cache.prefix_cache, cache.prefix_index, cache.events\n"
        "from cache.block_hash import HashScheme\n"
        "assert len(HashScheme('sha256_cbor', 4).block_hashes(range(8))) == 2\n"
        "HashScheme('xxhash', 4, 'secret')"
    )
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr and "xxhash" in done.stderr
    assert "line 5" in done.stderr, "only the last line fails"
