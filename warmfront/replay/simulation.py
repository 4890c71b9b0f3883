"""A fleet under a virtual clock: the router's placement, index and load book, the worker's scheduler and cache.

What is simulated is time: see ``replica``. Routers hear of a replica's cache events after a delay and of its LRU age
once per heartbeat; what one router has sent, the others hear some milliseconds later, as in life.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
from warmfront_pb.v1 import router_pb2

from cache.block_hash import HashScheme
from cache.events import EventBatch
from cache.prefix_cache import PrefixCache
from cache.prefix_index import PrefixIndex
from router.flow import bound_of
from router.load import Journal, LoadBook, Ticket
from router.peer_loads import PeerLoads, batch_of
from router.placement import Placement
from router.policy import POLICIES, Policy
from warmfront.errors import WrongUse
from warmfront.replay.replica import Flight, Replica
from warmfront.replay.settings import IN_FLIGHT_PER_REPLICA, Settings
from warmfront.replay.trace import Job

Progress = Callable[[int], None]
"""Is told how many requests have ended."""

_PROGRESS_STEP = 64
_BOOT = "0"
# As in ``router.shared_load``: a router tells what it does at once, and after that not for a while; what it has told
# reaches the others, who listen at once, and after that not for a while.
STEPS_PERIOD_S = 0.004
STEPS_DELAY_S = 0.001
READ_PERIOD_S = 0.002


@dataclass(slots=True)
class Outcome:
    """What came of a run. Lists have one entry per request, in the order of their first tokens."""

    settings: Settings
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    regret_tokens: int = 0
    num_over_bound: int = 0  # requests that a router would have held back, since their replica was full
    makespan_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    first_token_at_s: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    hit_tokens: list[int] = field(default_factory=list)
    requests_of: list[int] = field(default_factory=list)  # per replica
    prefill_of: list[int] = field(default_factory=list)  # tokens computed, per replica
    final_caches: list[PrefixCache] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that were not computed, of all prompt tokens."""
        return self.num_hit_tokens / self.num_prompt_tokens

    @property
    def mean_ttft_s(self) -> float:
        """Mean time to first token."""
        return sum(self.ttft_s) / len(self.ttft_s)

    def ttft_quantile_s(self, share: float) -> float:
        """The time to first token that ``share`` of the requests stay within."""
        return float(np.quantile(self.ttft_s, share))

    @property
    def request_imbalance(self) -> float:
        """Most requests on one replica over the mean."""
        return _max_over_mean(self.requests_of)

    @property
    def prefill_imbalance(self) -> float:
        """Most prefill work on one replica over the mean."""
        return _max_over_mean(self.prefill_of)


def simulate(
    jobs: Sequence[Job],
    scheme: HashScheme,
    settings: Settings,
    progress: Progress | None = None,
    rules: Mapping[str, Policy] = POLICIES,
) -> Outcome:
    """Run a trace. ``rules`` are the policies known by name. Raises ``WrongUse`` where a request fits no replica."""
    check_room(jobs, scheme, settings.kv_blocks)
    return Simulation(jobs, scheme, settings, progress, rules).run()


def oracle_hit_rate(jobs: Sequence[Job], scheme: HashScheme, num_blocks: int) -> float:
    """The hit rate of one cache of ``num_blocks`` usable blocks that sees all requests, one after another."""
    check_room(jobs, scheme, num_blocks)
    cache = PrefixCache(num_blocks + 1, scheme)
    for number, job in enumerate(jobs):
        now = float(number)
        admission = cache.admit(number, job.chain(scheme), now)
        assert admission is not None
        is_answered = cache.append(number, _answer(job), now)
        assert is_answered
        cache.commit(number, _num_kept(job))
        cache.free(number, now)
        cache.take_events()
    return cache.stats.num_hit_tokens / cache.stats.num_query_tokens


def open_loop_speed(jobs: Sequence[Job], scheme: HashScheme, settings: Settings, load_share: float) -> float:
    """How many times as fast as the trace requests must come to take ``load_share`` of what the fleet can do.

    What it can do is measured: a closed loop under the default policy with 4 requests in flight per replica.
    """
    closed = Settings(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        num_replicas=settings.num_replicas,
        kv_blocks=settings.kv_blocks,
        host_kv_blocks=settings.host_kv_blocks,
        prefill_tokens_per_s=settings.prefill_tokens_per_s,
        host_tokens_per_s=settings.host_tokens_per_s,
        decode_s=settings.decode_s,
        event_delay_s=settings.event_delay_s,
        heartbeat_s=settings.heartbeat_s,
    )
    duration_s = jobs[-1].turn.at_s - jobs[0].turn.at_s
    if duration_s <= 0:
        raise WrongUse("--load-share: all requests of this trace come at one time")
    return load_share * duration_s / simulate(jobs, scheme, closed).makespan_s


def blocks_of_longest(jobs: Sequence[Job], scheme: HashScheme) -> int:
    """What the longest request takes with its answer."""
    longest = max(job.turn.num_tokens + job.turn.num_output_tokens for job in jobs)
    return -(-longest // scheme.block_size)


def check_room(jobs: Sequence[Job], scheme: HashScheme, kv_blocks: int) -> None:
    """Raises ``WrongUse`` where the longest request and its answer need more blocks than there are."""
    num_blocks = blocks_of_longest(jobs, scheme)
    if num_blocks > kv_blocks:
        raise WrongUse(f"--kv-blocks {kv_blocks}: the trace's longest request takes {num_blocks}")


class _Router:
    """One router's knowledge."""

    def __init__(self, settings: Settings, rules: Mapping[str, Policy], number: int) -> None:
        self.name = f"router-{number}"
        self.index = PrefixIndex()
        self.loads = LoadBook()
        self.peers = PeerLoads(self.loads, self.name, _BOOT)
        self.told_at_s = -math.inf  # the others, for the last time
        self.reads_at_s = 0.0  # what they tell, at the earliest
        self.unread: list[router_pb2.DispatchBatch] = []
        rng = random.Random(f"{settings.seed} {number}")
        self.placement = Placement(self.index, self.loads, settings.policy, rng, rules)

    def apply(self, replica: str, batch: EventBatch, now: float) -> None:
        self.index.apply(replica, batch)
        self.loads.confirm(replica, batch.last_seq, now)


@dataclass(slots=True)
class _CacheView:
    kv_blocks: int
    host_kv_blocks: int
    host_tokens_per_s: float
    prefix_caching: bool = True
    lru_age_s: float = 0.0


class Simulation:
    """One run. ``routers`` and ``replicas`` stay as it left them."""

    def __init__(
        self,
        jobs: Sequence[Job],
        scheme: HashScheme,
        settings: Settings,
        progress: Progress | None,
        rules: Mapping[str, Policy],
    ) -> None:
        self._jobs = jobs
        self._scheme = scheme
        self._settings = settings
        self._progress = progress
        self._bound = bound_of(settings, settings.prefill_tokens_per_s)
        self.routers = [_Router(settings, rules, number) for number in range(settings.num_routers)]
        self.replicas = {
            (name := f"r{number}"): Replica(name, number, scheme, settings) for number in range(settings.num_replicas)
        }
        self._views = {
            name: _CacheView(settings.kv_blocks, settings.host_kv_blocks, settings.host_tokens_per_s)
            for name in self.replicas
        }
        self._tickets: dict[int, Ticket] = {}  # of the requests under way
        self._now = 0.0
        if len(self.routers) > 1:
            for router in self.routers:
                router.loads.journal = Journal(partial(self._tell_later, router))
        self._expected: dict[str, float] = {}  # by replica: the end of its step that stands in the calendar
        self._telling: set[str] = set()  # routers whose newest steps are about to be told
        self._outcome = Outcome(settings)
        self._outcome.requests_of = [0] * settings.num_replicas
        self._calendar: list[tuple[float, int, Callable[[float], None]]] = []
        self._entries = count()
        self._num_sent = 0
        self._num_ended = 0
        self._beat_at_s = 0.0
        # Turns of a session not sent yet, and (closed loop) the next turn of each session that waits for a place.
        self._turns_left: dict[str, Iterator[int]] = {}
        self._sendable: list[int] = []

    def run(self) -> Outcome:
        """Send every request of the trace and see it end."""
        turns: dict[str, list[int]] = {}
        for number, job in enumerate(self._jobs):
            turns.setdefault(job.turn.session, []).append(number)
        self._turns_left = {session: iter(numbers) for session, numbers in turns.items()}
        start_s = 0.0
        if self._settings.speed is None:
            self._sendable = sorted(next(left) for left in self._turns_left.values())
            for _ in range(self._settings.in_flight or IN_FLIGHT_PER_REPLICA * self._settings.num_replicas):
                self._send_next(0.0)
        else:
            start_s = self._arrival_s(0)
            for left in self._turns_left.values():
                self._expect(next(left), start_s)
        now = start_s
        while self._calendar:
            now, _, act = heapq.heappop(self._calendar)
            self._now = now
            act(now)
        assert self._num_ended == len(self._jobs), f"{len(self._jobs) - self._num_ended} requests never ended"
        if self._progress is not None:
            self._progress(self._num_ended)
        self._outcome.final_caches = [replica.cache for replica in self.replicas.values()]
        self._outcome.prefill_of = [replica.num_computed_tokens for replica in self.replicas.values()]
        return self._outcome

    def _at(self, when_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._calendar, (when_s, next(self._entries), act))

    # The clients

    def _arrival_s(self, number: int) -> float:
        assert self._settings.speed is not None
        return self._jobs[number].turn.at_s / self._settings.speed

    def _expect(self, number: int, now: float) -> None:
        """Open loop: send a turn at its time, and not before the turn before it has ended."""
        self._at(max(now, self._arrival_s(number)), lambda at: self._send(number, at))

    def _send_next(self, now: float) -> None:
        """Closed loop: send the first request of the trace whose session waits for no answer."""
        if self._sendable:
            self._send(heapq.heappop(self._sendable), now)

    def _ended(self, flight: Flight, now: float) -> None:
        self._num_ended += 1
        self._outcome.makespan_s = now - (0.0 if self._settings.speed is None else self._arrival_s(0))
        if self._progress is not None and not self._num_ended % _PROGRESS_STEP:
            self._progress(self._num_ended)
        following = next(self._turns_left[flight.job.turn.session], None)
        if self._settings.speed is not None:
            if following is not None:
                self._expect(following, now)
            return
        if following is not None:
            heapq.heappush(self._sendable, following)
        self._send_next(now)

    # The routers

    def _send(self, number: int, now: float) -> None:
        self._beat(now)
        job = self._jobs[number]
        router = self.routers[self._num_sent % len(self.routers)]
        self._num_sent += 1
        placed = router.placement.place(
            job.turn.num_tokens, job.keys, self._scheme.block_size, self._views, now, job.turn.session
        )
        replica = self.replicas[placed.replica]
        chosen = placed.decision.chosen
        self._outcome.num_over_bound += self._bound.is_reached(chosen.in_flight, int(chosen.waiting_tokens))
        self._outcome.regret_tokens += placed.decision.regret_tokens
        self._outcome.requests_of[replica.number] += 1
        self._tickets[number] = placed.ticket
        replica.add(Flight(number, job, now), now)
        self._expect_end(replica)

    def _tell_later(self, router: _Router) -> None:
        """What a router has done reaches the others with what else it does until then."""
        if router.name not in self._telling:
            self._telling.add(router.name)
            self._at(max(self._now, router.told_at_s + STEPS_PERIOD_S), lambda at: self._tell(router, at))

    def _tell(self, router: _Router, now: float) -> None:
        self._telling.remove(router.name)
        router.told_at_s = now
        assert router.loads.journal is not None
        batch = batch_of(router.name, _BOOT, router.loads.journal.take())
        self._at(now + STEPS_DELAY_S, lambda at: self._hear(batch, at))

    def _hear(self, batch: router_pb2.DispatchBatch, now: float) -> None:
        for router in self.routers:
            if router.name != batch.router:
                router.unread.append(batch)
                if len(router.unread) == 1:
                    self._at(max(now, router.reads_at_s), partial(self._read, router))

    def _read(self, router: _Router, now: float) -> None:
        for batch in router.unread:
            router.peers.take(batch, now)
        router.unread.clear()
        router.reads_at_s = now + READ_PERIOD_S

    def _beat(self, now: float) -> None:
        """The leases that have come due."""
        if now < self._beat_at_s:
            return
        for name, replica in self.replicas.items():
            self._views[name].lru_age_s = replica.cache.lru_age_s(now)
            for router in self.routers:
                router.loads.model.suggest(replica.prefill_tokens_per_s)
        self._beat_at_s = now + self._settings.heartbeat_s

    def _apply(self, replica: str, batch: EventBatch, now: float) -> None:
        for router in self.routers:
            router.apply(replica, batch, now)

    # The replicas

    def _expect_end(self, replica: Replica) -> None:
        """Of the step that the replica is in; one that was expected before may have become another."""
        ends_at_s = replica.ends_at_s
        if ends_at_s is not None and self._expected.get(replica.name) != ends_at_s:
            self._expected[replica.name] = ends_at_s
            self._at(ends_at_s, lambda at: self._end_step(replica, at))

    def _end_step(self, replica: Replica, now: float) -> None:
        if replica.ends_at_s != now or self._expected.get(replica.name) != now:
            return  # it ended earlier
        del self._expected[replica.name]
        result = replica.end(now)
        for flight in result.begun:
            self._first_token(flight, now)
        for flight in result.ended:
            kept = flight.job.all_keys[len(flight.job.keys) : _num_kept(flight.job) // self._scheme.block_size]
            self._tickets.pop(flight.number).close(now, replica.cache.last_seq, kept)
        batch = result.events
        if batch is not None:
            self._at(now + self._settings.event_delay_s, lambda at: self._apply(replica.name, batch, at))
        replica.begin(now)
        self._expect_end(replica)
        for flight in result.ended:
            self._ended(flight, now)

    def _first_token(self, flight: Flight, now: float) -> None:
        self._tickets[flight.number].first_token(now)
        num_tokens = flight.job.turn.num_tokens
        outcome = self._outcome
        outcome.num_prompt_tokens += num_tokens
        outcome.num_hit_tokens += flight.num_cached
        outcome.prompt_tokens.append(num_tokens)
        outcome.hit_tokens.append(flight.num_cached)
        outcome.ttft_s.append(now - flight.sent_s)
        outcome.first_token_at_s.append(now)


def _answer(job: Job) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """So many tokens as the answer has; a named chain only counts them."""
    return np.zeros(job.turn.num_output_tokens, dtype=np.int32)


def _num_kept(job: Job) -> int:
    """Tokens of prompt and answer whose KV others can find. The last token's is never computed."""
    turn = job.turn
    return turn.num_tokens + (turn.num_output_tokens - 1 if turn.output_token_ids else 0)


def _max_over_mean(counts: Sequence[int]) -> float:
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0
