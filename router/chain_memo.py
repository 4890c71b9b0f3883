"""Block hashes of prompt fronts that were seen before, so that only what is new is hashed.

Prompts are looked at in chunks of whole blocks. A chunk's hashes are a function of its tokens and of the hash before
it, and of what else its blocks depend on, so these name them exactly: nothing here can be stale, only forgotten.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TypeAlias

from cache.adapter import Adapter
from cache.block_hash import BlockHash, HashScheme, extra_keys, pack_keys

_CHUNK_BLOCKS = 16
_MAX_CHUNKS = 32_768  # of 16 blocks of 16 tokens: 8 million tokens, about 50 MB

_Name: TypeAlias = tuple[BlockHash, str, Adapter | None, bytes]  # hash before, salt, adapter, token ids


class ChainMemo:
    """The index keys of prompts under one hash scheme. Forgets the chunks that were used least recently."""

    __slots__ = ("_chunk_bytes", "_chunks", "_max_chunks", "_scheme", "num_hashed_blocks")

    def __init__(self, scheme: HashScheme, max_chunks: int = _MAX_CHUNKS) -> None:
        self.num_hashed_blocks = 0
        self._scheme = scheme
        self._max_chunks = max_chunks
        self._chunk_bytes = _CHUNK_BLOCKS * scheme.block_size * 4
        self._chunks: OrderedDict[_Name, tuple[array[int], BlockHash]] = OrderedDict()

    def keys(self, token_ids: bytes, cache_salt: str = "", adapter: Adapter | None = None) -> array[int]:
        """Keys of the full blocks of packed little-endian uint32 ids. ``ValueError`` for an id above 2**31 - 1."""
        parent, salt = self._scheme.root, cache_salt  # a salt stands in block 0 alone
        keys = array("Q")
        end = len(token_ids) - len(token_ids) % (4 * self._scheme.block_size)
        for start in range(0, end, self._chunk_bytes):  # the last chunk may be shorter
            name = (parent, salt, adapter, token_ids[start : min(start + self._chunk_bytes, end)])
            known = self._chunks.get(name)
            if known is None:
                keys += self._learn(token_ids[start:end], salt, adapter, parent)
                break
            self._chunks.move_to_end(name)
            keys += known[0]
            parent, salt = known[1], ""
        return keys

    def __len__(self) -> int:
        return len(self._chunks)

    def _learn(self, token_ids: bytes, salt: str, adapter: Adapter | None, parent: BlockHash) -> array[int]:
        """Hash whole blocks in one go, and keep them by chunks."""
        scheme = self._scheme
        extra = extra_keys(len(token_ids) // 4, scheme.block_size, lora=adapter, cache_salt=salt)
        hashes = scheme.block_hashes(token_ids, extra, parent)
        self.num_hashed_blocks += len(hashes)
        keys = pack_keys(hashes)
        for number, start in enumerate(range(0, len(token_ids), self._chunk_bytes)):
            first, last = number * _CHUNK_BLOCKS, min((number + 1) * _CHUNK_BLOCKS, len(hashes))
            chunk = (keys[first:last], hashes[last - 1])
            self._chunks[parent, salt, adapter, token_ids[start : start + self._chunk_bytes]] = chunk
            parent, salt = chunk[1], ""
        while len(self._chunks) > self._max_chunks:
            self._chunks.popitem(last=False)
        return keys
