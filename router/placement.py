"""Decide and charge, in one go: what the router does with a request before it calls anyone.

Plain state and an argument for the clock, so that dispatch and the simulator (`warmfront replay`) place requests by
the very same code.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cache.prefix_index import PrefixIndex
from router.load import LoadBook, Ticket
from router.policy import POLICIES, Ask, Candidate, Decision, Policy, choose

_AFFINITY_BLOCKS = 16  # the front that consistent_hash keeps together


class CacheView(Protocol):
    """What a replica's lease says of its cache (``common_pb2.CacheState``)."""

    prefix_caching: bool
    kv_blocks: int
    lru_age_s: float


@dataclass(slots=True)
class Placed:
    """Where a request goes. The ticket is open: whoever holds this closes it."""

    decision: Decision
    ticket: Ticket

    @property
    def replica(self) -> str:
        """The chosen replica."""
        return self.decision.chosen.replica


class Placement:
    """One router's placing of requests. One thread owns it, and the index and the loads it reads."""

    def __init__(
        self,
        index: PrefixIndex,
        loads: LoadBook,
        policy: str,
        rng: random.Random,
        rules: Mapping[str, Policy] = POLICIES,
    ) -> None:
        self._index = index
        self._loads = loads
        self._policy = policy
        self._rng = rng
        self._rules = rules
        self._turn = 0

    def place(
        self,
        num_tokens: int,
        keys: array[int],
        block_size: int,
        caches: Mapping[str, CacheView],
        now: float,
        session: str = "",
    ) -> Placed:
        """Choose one of the replicas named in ``caches`` (at least one) and charge it with the request.

        ``keys`` are those of the prompt's full blocks; empty where nothing is cached.
        """
        candidates, depths = self.candidates(num_tokens, keys, block_size, caches, now)
        affinity = session
        if not affinity and keys:
            affinity = str(keys[min(len(keys), _AFFINITY_BLOCKS) - 1])
        ask = Ask(num_tokens, affinity, bool(session), self._turn)
        self._turn += 1
        decision = choose(self._policy, ask, candidates, self._rng, self._rules)
        chosen = decision.chosen
        missing_keys: Sequence[int] = ()
        if caches[chosen.replica].prefix_caching:
            missing_keys = keys[depths[chosen.replica] :]
        return Placed(
            decision, self._loads.charge(chosen.replica, num_tokens - chosen.matched_tokens, missing_keys, now)
        )

    def candidates(
        self, num_tokens: int, keys: array[int], block_size: int, caches: Mapping[str, CacheView], now: float
    ) -> tuple[list[Candidate], dict[str, int]]:
        """What a policy may know of each replica, and how many leading blocks each holds, pending ones included."""
        reported = self._index.match(keys)
        most = (num_tokens - 1) // block_size  # the last token is computed in any case
        candidates, depths = [], {}
        for name, cache in caches.items():
            load = self._loads.of(name)
            held = reported[name].total if name in reported else 0
            depth = load.depth(keys, held) if load.pending else held
            depths[name] = depth
            matched = min(depth, most) if cache.prefix_caching else 0
            free_blocks = cache.kv_blocks - self._index.num_blocks(name) - len(load.pending)
            candidates.append(
                Candidate(
                    replica=name,
                    matched_tokens=matched * block_size,
                    pending_tokens=max(0, matched - held) * block_size,
                    waiting_tokens=load.waiting_tokens,
                    waiting_requests=load.waiting_requests,
                    in_flight=load.in_flight,
                    since_progress_s=load.since_progress_s(now),
                    speed=load.speed,
                    free_tokens=max(0, free_blocks) * block_size,
                    lru_age_s=cache.lru_age_s,
                )
            )
        return candidates, depths
