"""Block hashes of prompt fronts that were seen before, so that only what is new is hashed.

What is hashed in one go is kept as one run of blocks, found by the hash before it and by its first block. A prompt is
led from run to run, along each for as many blocks as are equal; where it leaves the last one, a run of its own begins.
A block's hash is a function of its tokens, of the hash before it and of what else its KV depends on, so nothing here
can be stale, only forgotten.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from cache.adapter import Adapter
from cache.block_hash import BlockHash, HashScheme, extra_keys, keys_of

_MAX_BYTES = 64 << 20  # about 9 million tokens in long runs of 16-token blocks
_RUN_BYTES = 800  # of Python's own per run
_TOKENS_AT_ONCE = 8192  # half a millisecond

_Name: TypeAlias = tuple[BlockHash, str, Adapter | None, bytes]  # hash before, salt, adapter, tokens of the first block


class _Run(NamedTuple):
    token_ids: bytes
    hashes: bytes  # of its blocks, joined
    keys: array[int]

    @property
    def num_bytes(self) -> int:
        return _RUN_BYTES + len(self.token_ids) + len(self.hashes) + 8 * len(self.keys)


class ChainMemo:
    """The index keys of prompts under one hash scheme. Forgets the runs that were used least recently."""

    __slots__ = ("_block_bytes", "_max_bytes", "_runs", "_scheme", "blocks_at_once", "num_bytes", "num_hashed_blocks")

    def __init__(self, scheme: HashScheme, max_bytes: int = _MAX_BYTES) -> None:
        self.num_hashed_blocks = 0
        self.num_bytes = 0
        self._scheme = scheme
        self._max_bytes = max_bytes
        self._block_bytes = 4 * scheme.block_size
        self.blocks_at_once = max(1, _TOKENS_AT_ONCE // scheme.block_size)
        self._runs: OrderedDict[_Name, _Run] = OrderedDict()

    def keys(self, token_ids: bytes, cache_salt: str = "", adapter: Adapter | None = None) -> array[int]:
        """Keys of the full blocks of packed little-endian uint32 ids. ``ValueError`` for an id above 2**31 - 1."""
        keys = array("Q")
        for part in self.parts(token_ids, cache_salt, adapter):
            keys += part
        return keys

    def parts(self, token_ids: bytes, cache_salt: str = "", adapter: Adapter | None = None) -> Iterator[array[int]]:
        """The same in parts: a caller can do something else before the next ``blocks_at_once`` are hashed."""
        size, hash_bytes = self._block_bytes, len(self._scheme.root)
        end = len(token_ids) - len(token_ids) % size
        parent, salt, start = self._scheme.root, cache_salt, 0  # a salt stands in block 0 alone
        followed: list[_Name] = []
        while start < end:
            name = (parent, salt, adapter, token_ids[start : start + size])
            run = self._runs.get(name)
            if run is None:
                run = self._learn(name, token_ids[start : min(end, start + self.blocks_at_once * size)])
            num_same = _num_same(run.token_ids, token_ids, start) // size
            yield run.keys[:num_same]
            parent, salt = run.hashes[(num_same - 1) * hash_bytes : num_same * hash_bytes], ""
            start += num_same * size
            followed.append(name)
        for name in reversed(followed):  # nobody comes to a run whose front is forgotten, so that goes last
            if name in self._runs:
                self._runs.move_to_end(name)

    def _learn(self, name: _Name, token_ids: bytes) -> _Run:
        """Hash whole blocks in one go, and keep them as a run."""
        parent, salt, adapter, _ = name
        extra = extra_keys(len(token_ids) // 4, self._scheme.block_size, lora=adapter, cache_salt=salt)
        hashes = self._scheme.block_hashes(token_ids, extra, parent)
        self.num_hashed_blocks += len(hashes)
        joined = b"".join(hashes)
        run = self._runs[name] = _Run(token_ids, joined, keys_of(joined, len(parent)))
        self.num_bytes += run.num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._runs.popitem(last=False)[1].num_bytes
        return run


def _num_same(ours: bytes, theirs: bytes, start: int) -> int:
    """How many leading bytes of ``ours``, whole token ids, stand in ``theirs`` from ``start`` on."""
    if theirs.startswith(ours, start):
        return len(ours)
    length = min(len(ours), len(theirs) - start) // 4
    differs = np.frombuffer(ours, "<u4", length) != np.frombuffer(theirs, "<u4", length, start)
    return 4 * int(differs.argmax()) if differs.any() else 4 * length
