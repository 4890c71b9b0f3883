"""What was evicted lately, when, why and for whom: a bounded ring, for explanations and for the verdict on hits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache.events import RemovalReason


@dataclass(frozen=True, slots=True)
class Eviction:
    """One block that stood here and went."""

    key: int
    time_s: float
    idle_s: float
    """How long nobody had used it."""
    reason: RemovalReason
    culprit: Hashable
    """The request that needed its place."""


class EvictionHistory:
    """The last ``size`` evictions by index key. Looking one up is a scan: about 20 us at 65,536."""

    __slots__ = ("_culprits", "_idle_s", "_keys", "_num_added", "_reasons", "_times_s", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._keys = np.zeros(size, dtype=np.uint64)
        self._times_s = np.zeros(size)
        self._idle_s = np.zeros(size)
        self._reasons = np.zeros(size, dtype=np.uint8)
        self._culprits = np.empty(size, dtype=object)
        self._num_added = 0

    def __len__(self) -> int:
        return min(self._num_added, self.size)

    def add(
        self, keys: npt.NDArray[np.uint64], time_s: float, idle_s: float, reason: RemovalReason, culprit: Hashable
    ) -> None:
        """Remember evicted keys, the oldest memories giving way."""
        keys = keys[-self.size :]
        done = 0
        while done < keys.size:
            start = self._num_added % self.size
            part = slice(start, min(self.size, start + keys.size - done))
            count = part.stop - part.start
            self._keys[part] = keys[done : done + count]
            self._times_s[part] = time_s
            self._idle_s[part] = idle_s
            self._reasons[part] = reason
            self._culprits[part].fill(culprit)
            self._num_added += count
            done += count

    def find(self, key: int) -> Eviction | None:
        """The latest eviction of ``key``, None when none is remembered."""
        found = np.flatnonzero(self._keys[: len(self)] == np.uint64(key))
        if not found.size:
            return None
        newest = self._num_added % self.size
        at = int(found[((found - newest) % self.size).argmax()])
        return Eviction(
            key,
            float(self._times_s[at]),
            float(self._idle_s[at]),
            RemovalReason(int(self._reasons[at])),
            self._culprits[at],
        )
