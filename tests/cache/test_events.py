"""Batches and snapshots as bytes."""

import contextlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.events import (
    Cleared,
    EventBatch,
    EventDecodeError,
    Malformed,
    RemovalReason,
    Removed,
    Snapshot,
    Stored,
    Tier,
    decode_batch,
    decode_snapshot,
    encode_batch,
    encode_snapshot,
)

KEY = st.integers(0, 2**64 - 1)
KEYS = st.lists(KEY, max_size=5).map(lambda keys: array("Q", keys))
STORED = st.builds(Stored, KEY, KEYS, st.sampled_from(Tier))
REMOVED = st.builds(Removed, KEYS, st.sampled_from(RemovalReason), st.sampled_from(Tier))
EVENTS = st.lists(st.one_of(STORED, REMOVED, st.just(Cleared())), max_size=6).map(tuple)
NAMES = st.text(max_size=9)


@given(st.builds(EventBatch, NAMES, NAMES, st.integers(1, 2**63), EVENTS))
def test_a_batch_comes_back_as_it_was(batch: EventBatch) -> None:
    assert decode_batch(encode_batch(batch)) == batch
    assert batch.last_seq == batch.first_seq + len(batch.events) - 1


@given(st.builds(Snapshot, NAMES, NAMES, st.integers(0, 2**63), st.lists(STORED, max_size=4).map(tuple)))
def test_a_snapshot_comes_back_as_it_was(snapshot: Snapshot) -> None:
    assert decode_snapshot(encode_snapshot(snapshot)) == snapshot


def test_the_bytes_of_a_batch_are_these() -> None:
    """A golden value: other processes read these bytes."""
    events = (Stored(0x10, array("Q", [1, 2])), Removed(array("Q", [2]), RemovalReason.DEMOTED), Cleared())
    batch = EventBatch("w0", "0193-a", 7, events)
    assert encode_batch(batch).hex(" ", 1) == (
        "01 42 02 00 77 30 06 00 30 31 39 33 2d 61 07 00 00 00 00 00 00 00 03 00 00 00 "
        "1c 00 00 00 01 00 00 00 10 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 "
        "0c 00 00 00 02 00 02 00 02 00 00 00 00 00 00 00 "
        "04 00 00 00 03 00 00 00"
    )


def test_a_block_costs_eight_bytes() -> None:
    small, large = (
        len(encode_snapshot(Snapshot("w0", "g", 1, (Stored(0, array("Q", range(n))),)))) for n in (100, 1100)
    )
    assert large - small == 8000


@pytest.mark.parametrize(
    ("at", "value", "why"), [(0, 9, "kind 9"), (1, 7, "not a valid Tier|7"), (2, 9, "RemovalReason")]
)
def test_one_bad_event_keeps_its_number_and_its_neighbours_stay(at: int, value: int, why: str) -> None:
    good = Stored(0, array("Q", [1]))
    batch = EventBatch("w0", "g", 1, (good, Removed(array("Q", [5])), good))
    data = bytearray(encode_batch(batch))
    start = data.index(bytes.fromhex("0c000000020001")) + 4
    data[start + at] = value
    first, bad, last = decode_batch(bytes(data)).events
    assert (first, last) == (good, good)
    assert isinstance(bad, Malformed)
    with pytest.raises(ValueError, match="malformed"):
        encode_batch(EventBatch("w0", "g", 1, (bad,)))


@pytest.mark.parametrize("cut", [0, 1, 5, 12, 20, 30, -1])
def test_cut_off_bytes_are_refused(cut: int) -> None:
    events = (Stored(0, array("Q", [1])),)
    with pytest.raises(EventDecodeError):
        decode_batch(encode_batch(EventBatch("w0", "g", 1, events))[:cut])
    with pytest.raises(EventDecodeError):
        decode_snapshot(encode_snapshot(Snapshot("w0", "g", 1, events))[:cut])


def test_foreign_bytes_are_refused() -> None:
    batch = encode_batch(EventBatch("w0", "g", 1, ()))
    for data in (b"\x02" + batch[1:], batch + b"\0", b"{}"):
        with pytest.raises(EventDecodeError):
            decode_batch(data)
    with pytest.raises(EventDecodeError, match="expected 1 'S'"):
        decode_snapshot(batch)
    with_removal = encode_batch(EventBatch("w0", "g", 1, (Removed(array("Q", [1])),)))
    with pytest.raises(EventDecodeError, match="stored runs"):
        decode_snapshot(with_removal.replace(b"\x01B", b"\x01S", 1))


@given(st.binary(max_size=60))
def test_random_bytes_never_do_worse_than_an_error(data: bytes) -> None:
    for decode in (decode_batch, decode_snapshot):
        with contextlib.suppress(EventDecodeError):
            decode(data)
