"""Which tokens a choice has read and written, and how often: what penalties look at, kept while the answer grows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class SeenTokens:
    """Different token ids, and how often each was written: 0 times where it was only read."""

    __slots__ = ("_counts", "_ids", "_place_of")

    def __init__(self, read: Sequence[int], written: Sequence[int]) -> None:
        self._ids = np.unique(np.asarray(read, dtype=np.int64))  # with room for more at its end, once some are written
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._place_of = {token_id: place for place, token_id in enumerate(self._ids.tolist())}
        for token_id in written:
            self.add(token_id)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Token ids, each once. A view: valid until the next ``add``."""
        return self._ids[: len(self._place_of)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of ``ids`` was written. A view: valid until the next ``add``."""
        return self._counts[: len(self._place_of)]

    def add(self, token_id: int) -> None:
        """One more token was written."""
        size = len(self._place_of)
        place = self._place_of.setdefault(token_id, size)
        if place == len(self._ids):
            more = max(16, size)
            self._ids = np.concatenate((self._ids, np.zeros(more, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(more, dtype=np.float32)))
        self._ids[place] = token_id
        self._counts[place] += 1
