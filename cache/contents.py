"""What each block hash stands for, where a hash alone does not prove it.

The xxhash forms are not collision-resistant, so under them a hit compares parent, token ids and extra keys as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple

from cache.block_hash import BlockChain, BlockHash, ExtraKeys


class _Content(NamedTuple):
    parent: BlockHash
    tokens: bytes
    extra: ExtraKeys | None


class Contents:
    """The content of every hash that stands in any tier."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[BlockHash, _Content] = {}

    def num_same(self, chain: BlockChain, limit: int) -> int:
        """Of the first ``limit`` blocks of ``chain``, the leading ones whose very tokens are cached."""
        for depth in range(limit):
            content = self._of.get(chain.hashes[depth])
            if content is None or content != _content(chain, depth):
                return depth
        return limit

    def claim(self, chain: BlockChain, start: int, end: int) -> int:
        """Hashes ``start`` to ``end`` of ``chain`` stand for its blocks, up to one that is another's: which that is."""
        for depth in range(start, end):
            content = _content(chain, depth)
            if self._of.setdefault(chain.hashes[depth], content) != content:
                return depth
        return end

    def forget(self, names: Iterable[BlockHash]) -> None:
        """These stand in no tier any more."""
        for name in names:
            del self._of[name]

    def clear(self) -> None:
        """Forget all."""
        self._of.clear()

    def names(self) -> Set[BlockHash]:
        """Every hash kept here."""
        return self._of.keys()


def _content(chain: BlockChain, depth: int) -> _Content:
    size = chain.scheme.block_size
    parent = chain.hashes[depth - 1] if depth else chain.scheme.root
    return _Content(parent, chain.token_ids[depth * size : (depth + 1) * size].tobytes(), chain.extra_of(depth))
