"""Decide and charge, in one go: what the router does with a request before it calls anyone.

Plain state and an argument for the clock, so that dispatch and the simulator (`warmfront replay`) place requests by
the very same code.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cache.events import Tier
from cache.prefix_index import Depths, PrefixIndex
from router.load import LoadBook, Ticket
from router.policy import POLICIES, USUAL_HOST_TOKEN_COST, Ask, Candidate, Decision, Policy, choose

_AFFINITY_BLOCKS = 16  # the front that consistent_hash keeps together

# Beyond this many replicas a decision looks at those that hold something of the prompt and at a sample of the others,
# so that its cost does not grow with the fleet: exact for affinity, sampled for load.
_MAX_EXACT = 32
_NUM_HOLDERS = 8
_NUM_SAMPLED = 12
# The policies that this suits; the others need to see everybody.
_SHORTLISTING = ("warmfront", "warmfront_sticky", "predicted_ttft", "longest_prefix", "least_load")
_MAX_RECENT = 4096
_NOTHING = Depths(0, 0)


class CacheView(Protocol):
    """What a replica's lease says of its cache (``common_pb2.CacheState``)."""

    prefix_caching: bool
    kv_blocks: int
    lru_age_s: float
    host_kv_blocks: int
    host_tokens_per_s: float


@dataclass(slots=True)
class Decided:
    """What ``charge`` needs of a decision. It is as good as the moment it was taken in."""

    decision: Decision
    missing_keys: Sequence[int]  # blocks that the request will leave there
    work_tokens: int  # that are computed for it there

    @property
    def replica(self) -> str:
        """The chosen replica."""
        return self.decision.chosen.replica


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
        self._names: list[str] = []  # of the last fleet that was too large to look at whole
        self._names_of: Mapping[str, CacheView] | None = None
        self._recent: OrderedDict[int, deque[str]] = OrderedDict()  # prompt's first key -> where such prompts went

    def place(
        self,
        num_tokens: int,
        keys: array[int],
        block_size: int,
        caches: Mapping[str, CacheView],
        now: float,
        session: str = "",
    ) -> Placed:
        """``decide`` and ``charge``."""
        decided = self.decide(num_tokens, keys, block_size, caches, now, session)
        return Placed(decided.decision, self.charge(decided, now))

    def decide(
        self,
        num_tokens: int,
        keys: array[int],
        block_size: int,
        caches: Mapping[str, CacheView],
        now: float,
        session: str = "",
    ) -> Decided:
        """Choose one of the replicas named in ``caches`` (at least one).

        ``keys`` are those of the prompt's full blocks; empty where nothing is cached.
        """
        candidates, depths = self._candidates(num_tokens, keys, block_size, caches, now)
        decision = self._choose(num_tokens, keys, session, candidates, self._rng)
        chosen = decision.chosen
        missing_keys: Sequence[int] = ()
        if caches[chosen.replica].prefix_caching:
            missing_keys = keys[depths[chosen.replica] :]
        if keys and len(caches) > _MAX_EXACT:
            self._remember(keys[0], chosen.replica)
        return Decided(decision, missing_keys, chosen.work_tokens(num_tokens))

    def charge(self, decided: Decided, now: float, num_choices: int = 1) -> Ticket:
        """The request goes there, now."""
        self._turn += 1
        return self._loads.charge(decided.replica, decided.work_tokens, decided.missing_keys, now, num_choices)

    def preview(
        self,
        num_tokens: int,
        keys: array[int],
        block_size: int,
        caches: Mapping[str, CacheView],
        now: float,
        session: str = "",
    ) -> Decision:
        """What ``place`` would decide of all replicas. Nothing is charged and nothing changes."""
        candidates, _ = self._candidates(num_tokens, keys, block_size, caches, now, sees_all=True)
        rng = random.Random()
        rng.setstate(self._rng.getstate())
        return self._choose(num_tokens, keys, session, candidates, rng)

    def _choose(
        self, num_tokens: int, keys: array[int], session: str, candidates: list[Candidate], rng: random.Random
    ) -> Decision:
        affinity = session
        if not affinity and keys:
            affinity = str(keys[min(len(keys), _AFFINITY_BLOCKS) - 1])
        ask = Ask(num_tokens, affinity, bool(session), self._turn)
        return choose(self._policy, ask, candidates, rng, self._rules)

    def _candidates(
        self,
        num_tokens: int,
        keys: array[int],
        block_size: int,
        caches: Mapping[str, CacheView],
        now: float,
        sees_all: bool = False,
    ) -> tuple[list[Candidate], dict[str, int]]:
        """What a policy may know of each replica, and how many leading blocks each holds, pending ones included."""
        reported = self._index.match(keys)
        most = (num_tokens - 1) // block_size  # the last token is computed in any case
        candidates, depths = [], {}
        names: Iterable[str] = caches
        if not sees_all and len(caches) > _MAX_EXACT and self._policy in _SHORTLISTING:
            names = self._shortlist(keys, reported, caches)
        loads, num_blocks = self._loads, self._index.num_blocks
        for name in names:
            cache, load = caches[name], loads.of(name)
            speed, pending, waiting_requests = load.speed, load.pending, load.waiting_requests
            num_pending = pending.num_blocks
            matched = pending_tokens = host_tokens = depth = 0
            if num_pending or name in reported:
                on_device, held = reported.get(name, _NOTHING)
                depth = pending.depth(keys, held) if num_pending else held
                if cache.prefix_caching:
                    matched = depth if depth < most else most
                    pending_tokens = (matched - held) * block_size if matched > held else 0
                    host_tokens = (min(matched, held) - on_device) * block_size if matched > on_device < held else 0
            depths[name] = depth
            free_blocks = cache.kv_blocks - num_blocks(name) - num_pending
            host_token_cost = USUAL_HOST_TOKEN_COST
            if cache.host_kv_blocks:  # what leaves the device is lost only when host memory is full too
                free_blocks += cache.host_kv_blocks - num_blocks(name, Tier.HOST)
                host_token_cost = _host_token_cost(cache, speed)
            # By position, in the order of its fields: by name this one call would take a fifth of the whole decision.
            candidates.append(
                Candidate(
                    name,
                    matched * block_size,
                    pending_tokens,
                    host_tokens,
                    host_token_cost,
                    load.waiting_tokens + load.foreign_tokens + load.held_tokens,
                    waiting_requests + load.held_requests,
                    load.in_flight + load.foreign_requests,
                    load.since_progress_s(now) if waiting_requests else 0.0,
                    speed,
                    free_blocks * block_size if free_blocks > 0 else 0,
                    cache.lru_age_s,
                )
            )
        return candidates, depths

    def _shortlist(
        self, keys: array[int], reported: Mapping[str, Depths], caches: Mapping[str, CacheView]
    ) -> Iterable[str]:
        """The deepest holders, those that were sent such prompts just now, and a sample of all."""
        if self._names_of is not caches:
            self._names_of, self._names = caches, list(caches)
        draw, size = self._rng.random, len(self._names)
        short = dict.fromkeys([self._names[int(draw() * size)] for _ in range(_NUM_SAMPLED)])
        holders: Iterable[str] = reported
        if len(reported) > _NUM_HOLDERS:
            holders = heapq.nlargest(_NUM_HOLDERS, reported, key=lambda name: reported[name].total)
        for name in holders:
            if name in caches:
                short[name] = None
        for name in self._recent.get(keys[0], ()) if keys else ():
            if name in caches:
                short[name] = None
        return short

    def _remember(self, first_key: int, replica: str) -> None:
        homes = self._recent.pop(first_key, None) or deque(maxlen=_NUM_HOLDERS)
        self._recent[first_key] = homes
        if replica in homes:
            homes.remove(replica)
        homes.append(replica)
        if len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)


def _host_token_cost(cache: CacheView, speed: float) -> float:
    """What one token's KV costs that comes back from host memory, in tokens computed there."""
    return speed / cache.host_tokens_per_s if cache.host_tokens_per_s > 0 else USUAL_HOST_TOKEN_COST
