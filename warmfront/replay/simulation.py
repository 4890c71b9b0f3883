"""A fleet under a virtual clock: the router's own placement, index and load book, and each replica's own cache.

What is simulated is time. A replica prefills one prompt at a time, in order of arrival, at so many uncached tokens per
second, after what comes back from its host memory at so many others; the answer's further tokens take a fixed time each
and do not slow the next prompt down. A prompt waits while the blocks for it and its answer are short. The router hears
of a replica's cache events after a delay, and of its LRU age once per heartbeat, as in life.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from cache.block_hash import HashScheme
from cache.events import EventBatch
from cache.prefix_cache import PrefixCache
from cache.prefix_index import PrefixIndex
from router.load import LoadBook
from router.placement import Placed, Placement
from router.policy import POLICIES, Policy
from warmfront.errors import WrongUse
from warmfront.replay.trace import Job

Progress = Callable[[int], None]
"""Is told how many requests have ended."""

_PROGRESS_STEP = 64
IN_FLIGHT_PER_REPLICA = 4  # in a closed loop, where the caller does not say
_GENERATION = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A fleet and how it is loaded."""

    policy: str = "warmfront"
    num_replicas: int = 8
    kv_blocks: int  # of each replica, without the scratch block
    host_kv_blocks: int = 0  # of each replica, in host memory
    prefill_tokens_per_s: float = 40_000.0
    host_tokens_per_s: float = 400_000.0  # that come back from host memory
    decode_s: float = 0.0  # per output token after the first
    in_flight: int | None = None  # closed loop: so many requests at once; None: 4 per replica
    speed: float | None = None  # open loop: requests come as in the trace, so many times as fast
    num_routers: int = 1  # requests go to them in turn
    event_delay_s: float = 0.001  # from a replica's step to the routers' index
    heartbeat_s: float = 1.0
    seed: int = 0  # of ties and of random choices


@dataclass(slots=True)
class Outcome:
    """What came of a run. Lists have one entry per request, in the order of their first tokens."""

    settings: Settings
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    regret_tokens: int = 0
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


def check_room(jobs: Sequence[Job], scheme: HashScheme, kv_blocks: int) -> None:
    """Raises ``WrongUse`` where the longest request and its answer need more blocks than there are."""
    longest = max(job.turn.num_tokens + job.turn.num_output_tokens for job in jobs)
    num_blocks = -(-longest // scheme.block_size)
    if num_blocks > kv_blocks:
        raise WrongUse(f"--kv-blocks {kv_blocks}: the trace's longest request takes {num_blocks}")


class _Router:
    """One router's knowledge."""

    def __init__(self, settings: Settings, rules: Mapping[str, Policy], number: int) -> None:
        self.index = PrefixIndex()
        self.loads = LoadBook()
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


class _Replica:
    """A replica as it is; its cache belongs to it alone."""

    def __init__(self, name: str, number: int, scheme: HashScheme, settings: Settings) -> None:
        self.name = name
        self.number = number
        self.cache = PrefixCache(
            settings.kv_blocks + 1,
            scheme,
            replica=name,
            generation=_GENERATION,
            num_host_blocks=settings.host_kv_blocks,
        )
        self.view = _CacheView(settings.kv_blocks, settings.host_kv_blocks, settings.host_tokens_per_s)
        self.waiting: deque[_Flight] = deque()
        self.prefilling: _Flight | None = None


@dataclass(slots=True)
class _Flight:
    """A request under way."""

    number: int
    job: Job
    placed: Placed
    replica: _Replica
    sent_s: float


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
        self.routers = [_Router(settings, rules, number) for number in range(settings.num_routers)]
        self.replicas = {
            (name := f"r{number}"): _Replica(name, number, scheme, settings) for number in range(settings.num_replicas)
        }
        self._views = {name: replica.view for name, replica in self.replicas.items()}
        self._outcome = Outcome(settings)
        self._outcome.requests_of = [0] * settings.num_replicas
        self._outcome.prefill_of = [0] * settings.num_replicas
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
            act(now)
        assert self._num_ended == len(self._jobs), f"{len(self._jobs) - self._num_ended} requests never ended"
        if self._progress is not None:
            self._progress(self._num_ended)
        self._outcome.final_caches = [replica.cache for replica in self.replicas.values()]
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

    def _ended(self, flight: _Flight, now: float) -> None:
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
        self._outcome.regret_tokens += placed.decision.regret_tokens
        self._outcome.requests_of[replica.number] += 1
        replica.waiting.append(_Flight(number, job, placed, replica, now))
        self._prefill_next(replica, now)

    def _beat(self, now: float) -> None:
        """The leases that have come due."""
        if now < self._beat_at_s:
            return
        for replica in self.replicas.values():
            replica.view.lru_age_s = replica.cache.lru_age_s(now)
        self._beat_at_s = now + self._settings.heartbeat_s

    def _report(self, replica: _Replica, now: float) -> None:
        """The replica's new events are on their way to every router."""
        batch = replica.cache.take_events()
        if batch is not None:
            self._at(now + self._settings.event_delay_s, lambda at: self._apply(replica.name, batch, at))

    def _apply(self, replica: str, batch: EventBatch, now: float) -> None:
        for router in self.routers:
            router.apply(replica, batch, now)

    # The replicas

    def _prefill_next(self, replica: _Replica, now: float) -> None:
        if replica.prefilling is not None or not replica.waiting:
            return
        flight = replica.waiting[0]
        job, cache = flight.job, replica.cache
        admission = cache.admit(flight.number, job.chain(self._scheme), now)
        if admission is None:
            return  # tried again when a request ends
        if not cache.append(flight.number, _answer(job), now):
            cache.free(flight.number, now)
            return
        cache.take_copies()  # nothing lies in these blocks
        replica.waiting.popleft()
        replica.prefilling = flight
        num_missing = job.turn.num_tokens - admission.num_cached_tokens
        self._outcome.num_prompt_tokens += job.turn.num_tokens
        self._outcome.num_hit_tokens += admission.num_cached_tokens
        self._outcome.prompt_tokens.append(job.turn.num_tokens)
        self._outcome.hit_tokens.append(admission.num_cached_tokens)
        self._outcome.prefill_of[replica.number] += num_missing
        service_s = num_missing / self._settings.prefill_tokens_per_s
        service_s += admission.num_host_tokens / self._settings.host_tokens_per_s
        self._at(now + service_s, lambda at: self._first_token(flight, at))

    def _first_token(self, flight: _Flight, now: float) -> None:
        replica, turn = flight.replica, flight.job.turn
        replica.cache.commit(flight.number, turn.num_tokens)
        flight.placed.ticket.first_token(now)
        self._outcome.ttft_s.append(now - flight.sent_s)
        self._outcome.first_token_at_s.append(now)
        decode_s = (turn.num_output_tokens - 1) * self._settings.decode_s
        replica.prefilling = None
        if decode_s:
            self._report(replica, now)
            self._at(now + decode_s, lambda at: self._last_token(flight, at))
            self._prefill_next(replica, now)
        else:
            self._last_token(flight, now)

    def _last_token(self, flight: _Flight, now: float) -> None:
        replica, job = flight.replica, flight.job
        num_kept = _num_kept(job)
        replica.cache.commit(flight.number, num_kept)
        replica.cache.free(flight.number, now)
        output_keys = job.all_keys[len(job.keys) : num_kept // self._scheme.block_size]
        flight.placed.ticket.close(now, replica.cache.last_seq, output_keys)
        self._report(replica, now)
        self._prefill_next(replica, now)
        self._ended(flight, now)


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
