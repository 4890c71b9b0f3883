"""Blocks that requests on their way will leave on a replica, kept as the pieces of chains that they are.

A key names its block and all before it, so a piece that holds a key holds, back to its own first one, all that a prompt
with that key has there. Thus not every key needs an entry: a piece is entered under its first key and under those whose
low bits are 0, one of 32, and a look-up walks back from the key in question to the next of these. What a request adds
costs a few entries, however long its prompt is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

_MARK_MASK = 31
_MARK_BITS = np.uint64(_MARK_MASK)


class Piece:
    """Keys of one request that follow one another in a chain, and under which of them they are entered."""

    __slots__ = ("keys", "marks")

    def __init__(self, keys: array[int], marks: Sequence[int]) -> None:
        self.keys = keys
        self.marks = marks  # positions in it


class PendingBlocks:
    """Of one replica. What was added stays until that very piece is removed, whoever else added the same."""

    __slots__ = ("_pieces", "num_blocks")

    def __init__(self) -> None:
        self._pieces: dict[int, dict[Piece, int]] = {}  # marked key -> the pieces that have it, and where
        self.num_blocks = 0  # one that several requests will leave counts for each

    def __len__(self) -> int:
        return self.num_blocks

    def add(self, keys: Sequence[int], are_chained: bool = True) -> Piece:
        """These will be there; ``remove`` takes what this returns. ``are_chained``: each follows the one before it."""
        packed = keys if isinstance(keys, array) else array("Q", keys)
        if not packed:
            return Piece(packed, ())
        if are_chained:
            marks = (np.frombuffer(packed, np.uint64) & _MARK_BITS == 0).nonzero()[0].tolist()
            if not marks or marks[0]:
                marks.insert(0, 0)
        else:
            marks = list(range(len(packed)))
        piece = Piece(packed, marks)
        pieces = self._pieces
        for position in marks:
            found = pieces.get(key := packed[position])
            if found is None:
                pieces[key] = {piece: position}
            else:
                found[piece] = position
        self.num_blocks += len(packed)
        return piece

    def remove(self, piece: Piece) -> None:
        """That request will not leave them any more, or has left them. Once per piece."""
        pieces = self._pieces
        for position in piece.marks:
            found = pieces.get(key := piece.keys[position])
            if found is not None and found.pop(piece, None) is not None and not found:
                del pieces[key]
        self.num_blocks -= len(piece.keys)

    def depth(self, keys: array[int], depth: int) -> int:
        """How many leading blocks of ``keys`` there are with those from block ``depth`` on that are pending."""
        pieces = self._pieces
        end = len(keys)
        while depth < end:
            at = depth
            while True:
                key = keys[at]
                found = pieces.get(key)
                if found is not None:
                    reach = at + max(_num_same(piece.keys, position, keys, at) for piece, position in found.items())
                    if reach > depth:
                        depth = reach
                        break
                if not at or not key & _MARK_MASK:
                    return depth  # a piece with the key at ``depth`` would have been met
                at -= 1
        return depth


def _num_same(ours: array[int], position: int, theirs: array[int], at: int) -> int:
    """How many keys are the same from there on. The first ones are."""
    length = min(len(ours) - position, len(theirs) - at)
    one = np.frombuffer(ours, np.uint64, length, 8 * position)
    differs = one != np.frombuffer(theirs, np.uint64, length, 8 * at)
    first = int(differs.argmax())
    return first if differs[first] else length
