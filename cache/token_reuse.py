"""Reuse inside a block: which cached block starts with the tokens a prompt goes on with after its last full hit.

Block hashes find whole blocks only. The blocks that follow one hash are kept here under their first token, full ones
and the partial last blocks of requests that have ended, so that the longest common front can be copied. A block is
compared only with what has the same extra keys: never across a salt, an adapter or an image.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.block_hash import BlockChain, BlockHash, ExtraKeys
from cache.block_pool import BlockIds

_MAX_COMPARED = 64


class _Child(NamedTuple):
    parent: BlockHash
    tokens: array[int]
    extra: ExtraKeys | None


class Front(NamedTuple):
    """A block that begins as a prompt goes on."""

    block: int
    num_common: int
    is_worth_a_copy: bool


class BlockFronts:
    """Cached blocks by the hash they follow; from ``min_tokens`` equal leading tokens on one is worth a copy.

    Of the blocks with one parent and first token the newest 64 are compared.
    """

    __slots__ = ("_by_block", "_by_front", "_min_tokens", "_partials")

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._by_block: dict[int, _Child] = {}
        self._by_front: dict[tuple[BlockHash, int], dict[int, None]] = {}
        self._partials: set[int] = set()

    def add(self, chain: BlockChain, depth: int, block: int) -> None:
        """``block`` holds the whole block ``depth`` of ``chain``."""
        self._add(block, _child(chain, depth, len(chain)))

    def add_partial(self, chain: BlockChain, depth: int, num_computed: int, table: Sequence[int]) -> bool:
        """Keep the last block of a request that ends, if its front is worth finding and nobody has it; whether it is.

        The request has ``depth`` whole blocks before it, and the KV of ``num_computed`` tokens in all.
        """
        child = _child(chain, depth, num_computed)
        if not self._min_tokens <= len(child.tokens) < chain.scheme.block_size:
            return False
        known = self._longest(child)
        if known is not None and known.num_common == len(child.tokens):
            return False
        self._add(table[depth], child)
        self._partials.add(table[depth])
        return True

    def discard(self, blocks: BlockIds) -> None:
        """These hold something else now. Unknown ones are left alone."""
        for block in blocks.tolist():
            self._partials.discard(block)
            child = self._by_block.pop(block, None)
            if child is not None:
                front = (child.parent, child.tokens[0])
                siblings = self._by_front[front]
                del siblings[block]
                if not siblings:
                    del self._by_front[front]

    def longest(self, chain: BlockChain, depth: int) -> Front | None:
        """The block that begins most like block ``depth`` of ``chain``, whose last token never counts."""
        return self._longest(_child(chain, depth, len(chain) - 1))

    def clear(self) -> None:
        """Forget all blocks."""
        self._by_block.clear()
        self._by_front.clear()
        self._partials.clear()

    def check_invariants(self, holds_hash: npt.NDArray[np.bool_]) -> None:
        """Raises ``AssertionError`` where what is kept here is neither whole nor partial. Linear; for tests."""
        hashed = set(np.flatnonzero(holds_hash).tolist())
        assert self._partials <= self._by_block.keys() <= hashed | self._partials
        assert not self._partials & hashed

    def _add(self, block: int, child: _Child) -> None:
        self._by_block[block] = child
        self._by_front.setdefault((child.parent, child.tokens[0]), {})[block] = None

    def _longest(self, wanted: _Child) -> Front | None:
        best: Front | None = None
        siblings = self._by_front.get((wanted.parent, wanted.tokens[0]), {}) if wanted.tokens else {}
        for block in islice(reversed(siblings), _MAX_COMPARED):
            child = self._by_block[block]
            if child.extra != wanted.extra:
                continue
            common = _num_common(child.tokens, wanted.tokens)
            if best is None or common > best.num_common:
                best = Front(block, common, common >= self._min_tokens)
        return best


def _child(chain: BlockChain, depth: int, end: int) -> _Child:
    """Block ``depth`` of ``chain``, as far as token ``end``."""
    size = chain.scheme.block_size
    parent = chain.hashes[depth - 1] if depth else chain.scheme.root
    return _Child(parent, chain.token_ids[depth * size : min(end, (depth + 1) * size)], chain.extra_of(depth))


def _num_common(first: array[int], second: array[int]) -> int:
    for count, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return count
    return min(len(first), len(second))
