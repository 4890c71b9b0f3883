"""What has been sent where and not yet seen end: charged at the decision, released exactly once.

A ``Ticket`` is one request's charge on one replica. Whatever way the request ends, ``Ticket.close`` takes back what is
still charged; a second close changes nothing. It also keeps the blocks that the request is about to leave there
(pending): they count as held from the decision on, until the replica's own events for them are applied.

The counts and pending blocks of a replica are those of all routers. What this router does is its own (``own``) and,
where there is a journal, told step by step; what the others do arrives by ``set_share`` and ``expect`` (see
``router.peer_loads``).

Time is an argument, in seconds on one monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.pending import PendingBlocks, Piece

_WEIGHT = 0.03  # of each first token in what is learned
_DEFAULT_SPEED = 2_000.0  # prompt tokens per second, until the replicas or experience say better
_MIN_SPREAD = 0.01  # variance of miss tokens / mean squared, below which no slope can be told from them
_MIN_TOKEN_SHARE = 0.1  # of the mean service is due to as many tokens as prompts differ by, whatever noise says
_CONFIRM_TIMEOUT_S = 30.0  # pending blocks of an ended request are given up after this
_MAX_STEPS = 16_384  # that wait to be told; what falls out is made good by the next totals


class Share(NamedTuple):
    """What one router has on one replica, or a change of that."""

    in_flight: int = 0  # sequences: a request of several choices counts as so many
    waiting_requests: int = 0  # without a first token; the choices of one share its prefill
    waiting_tokens: int = 0  # prompt tokens charged to the waiting ones

    def plus(self, other: Share) -> Share:
        """The sum, by count."""
        return Share(self[0] + other[0], self[1] + other[1], self[2] + other[2])


NO_SHARE = Share()


@dataclass(slots=True)
class Step:
    """A request was charged, got its first token, or ended: what other routers hear of it."""

    seq: int
    ticket: int  # seq of the request's first step
    replica: str
    change: Share
    keys: Sequence[int] = ()  # blocks it will leave; at its end those of the answer
    ended: bool = False
    event_seq: int = 0  # at its end: the replica's last event; 0: it failed


class Journal:
    """This router's steps that the others have not been told yet, numbered one by one from 1."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self.seq = 0  # of the last step
        self._steps: deque[Step] = deque(maxlen=_MAX_STEPS)
        self._on_step = on_step

    def add(
        self,
        ticket: int,
        replica: str,
        change: Share,
        keys: Sequence[int] = (),
        ended: bool = False,
        event_seq: int = 0,
    ) -> int:
        """Write a step down; its number. ``ticket`` 0: the first step of its request."""
        self.seq += 1
        self._steps.append(Step(self.seq, ticket or self.seq, replica, change, keys, ended, event_seq))
        self._on_step()
        return self.seq

    def take(self) -> list[Step]:
        """The steps since the last call."""
        taken = list(self._steps)
        self._steps.clear()
        return taken


class ServiceModel:
    """How long a replica takes to a first token: a fixed part, and a part per token to compute.

        service = overhead + miss tokens / speed

    Both are learned from the first tokens of all replicas, by least squares over exponentially forgotten samples. A
    plain quotient of tokens and seconds would charge the fixed part to the tokens: a replica that answers warm turns
    (few tokens each) would look slow, one that answers cold ones fast, and warm turns would move away from home.

    The seconds per token are forgotten only as fast as prompts come that tell of them: a thousand warm turns, which
    differ by some tokens and by more noise, leave what a cold prompt has taught.
    """

    __slots__ = ("_mean_s", "_mean_tokens", "_num_samples", "_slope_s", "_spread", "overhead_s", "token_s")

    def __init__(self) -> None:
        self.overhead_s = 0.0
        self.token_s = 1 / _DEFAULT_SPEED
        self._num_samples = 0
        self._mean_tokens = self._mean_s = 0.0
        self._slope_s = 0.0  # seconds per token, as told from prompts of different lengths
        self._spread = 0.0  # tokens squared by which those differed, summed over the samples that count

    def suggest(self, tokens_per_s: float) -> None:
        """What a replica says of itself counts until the first token has been seen."""
        if not self._num_samples and tokens_per_s > 0:
            self.token_s = 1 / tokens_per_s

    def expected_s(self, tokens: float) -> float:
        """Seconds to the first token of a request with so many tokens to compute."""
        return self.overhead_s + tokens * self.token_s

    def learn(self, tokens: float, service_s: float) -> None:
        """One first token, ``service_s`` after its replica had turned to it."""
        self._num_samples += 1
        weight = max(_WEIGHT, 1 / self._num_samples)
        tokens_off, off_s = tokens - self._mean_tokens, service_s - self._mean_s
        self._mean_tokens += weight * tokens_off
        self._mean_s += weight * off_s
        if spread := (1 - weight) * tokens_off * tokens_off:
            self._spread += spread - min(spread, _WEIGHT * self._spread)
            self._slope_s += spread / self._spread * (off_s / tokens_off - self._slope_s)
        plain_s = self._mean_s / self._mean_tokens
        variance = _WEIGHT * self._spread
        slope_s = plain_s
        if variance > _MIN_SPREAD * self._mean_tokens * self._mean_tokens:
            least_s = _MIN_TOKEN_SHARE * self._mean_s / max(self._mean_tokens, math.sqrt(variance))
            slope_s = max(self._slope_s, least_s)
        # The fixed part is never negative, and never all there is.
        self.token_s = min(slope_s, plain_s)
        self.overhead_s = self._mean_s - self.token_s * self._mean_tokens


class ReplicaLoad:
    """One replica generation's load, by all routers."""

    __slots__ = (
        "_actual_s",
        "_busy_since_s",
        "_confirmed_seq",
        "_done_requests",
        "_done_tokens",
        "_expected_s",
        "_model",
        "_turned_s",
        "_unconfirmed",
        "_waiting",
        "changed",
        "foreign_requests",
        "foreign_tokens",
        "held_requests",
        "held_tokens",
        "in_flight",
        "is_gone",
        "others",
        "peak",
        "pending",
        "replica",
        "waiting_requests",
        "waiting_tokens",
    )

    def __init__(self, replica: str, model: ServiceModel, changed: set[str]) -> None:
        self.replica = replica
        self.changed = changed  # the book's
        self.is_gone = False
        self.others: dict[str, Share] = {}  # by router; their sum is part of the counts below
        self.in_flight = 0  # sequences: a request of several choices counts as so many
        self.waiting_requests = 0  # without a first token; the choices of one share its prefill
        self.waiting_tokens = 0  # prompt tokens charged to the waiting ones
        # What stands beside the counts: requests of nobody we know, as far as the replica's lease tells more than was
        # ever in flight since the lease before it, and, while a queue is looked at, those in it that want this replica.
        self.foreign_requests = 0
        self.foreign_tokens = 0
        self.held_requests = 0
        self.held_tokens = 0
        self.peak = NO_SHARE  # since the last lease
        self.pending = PendingBlocks()
        self._unconfirmed: deque[tuple[int, float, tuple[Piece, ...]]] = deque()
        self._confirmed_seq = 0
        self._waiting: dict[Ticket, None] = {}  # of this router, the oldest first
        self._busy_since_s = 0.0
        # Since the replica turned to requests of which none has waited longer than those that are done.
        self._turned_s = 0.0
        self._done_requests = self._done_tokens = 0
        self._model = model
        self._actual_s = self._expected_s = 0.0

    @property
    def own(self) -> Share:
        """This router's part of the counts."""
        in_flight, waiting_requests, waiting_tokens = self.in_flight, self.waiting_requests, self.waiting_tokens
        for share in self.others.values():
            in_flight -= share.in_flight
            waiting_requests -= share.waiting_requests
            waiting_tokens -= share.waiting_tokens
        return Share(in_flight, waiting_requests, waiting_tokens)

    @property
    def speed(self) -> float:
        """Prompt tokens per second: the fleet's, times how this replica compares with what was expected of it."""
        relative = self._expected_s / self._actual_s if self._actual_s else 1.0
        return relative / self._model.token_s

    @property
    def is_empty(self) -> bool:
        """Whether nobody has, awaits or wants anything there."""
        return not (self.in_flight or self.others or self.pending or self._unconfirmed or self.held_requests)

    def since_progress_s(self, now: float) -> float:
        """Seconds since the last first token, or since it became busy; 0 when nothing waits."""
        return max(0.0, now - self._busy_since_s) if self.waiting_requests else 0.0

    def told(self, requests: int, waiting_tokens: int) -> None:
        """A new lease: what the replica itself says is in flight there, and waits to be computed.

        What routers sent may have ended before the lease is read, but is in the peak: what exceeds that is foreign.
        """
        self.changed.add(self.replica)
        self.foreign_requests = max(0, requests - max(self.peak[0], self.in_flight))
        self.foreign_tokens = max(0, waiting_tokens - max(self.peak[2], self.waiting_tokens))
        self.peak = NO_SHARE

    def untold(self) -> None:
        """No lease can be read: what the last one told of strangers may have ended long since."""
        if self.foreign_requests or self.foreign_tokens:
            self.changed.add(self.replica)
            self.foreign_requests = self.foreign_tokens = 0

    def falls(self) -> None:
        """The counts are about to fall."""
        self.changed.add(self.replica)
        peak = self.peak
        if self.in_flight > peak[0] or self.waiting_tokens > peak[2]:
            self.peak = Share(max(self.in_flight, peak[0]), 0, max(self.waiting_tokens, peak[2]))

    def confirm(self, applied_seq: int, now: float) -> None:
        """The index has applied the replica's events up to ``applied_seq``: what they told is no longer pending.

        The number falls where an older snapshot was loaded, and where the last events were found out to be nobody's.
        """
        self._confirmed_seq = applied_seq
        waiting = self._unconfirmed
        while waiting and (waiting[0][0] <= self._confirmed_seq or waiting[0][1] <= now):
            for piece in waiting.popleft()[2]:
                self.pending.remove(piece)

    def _turn(self, now: float) -> None:
        """The replica turns to what waits there from now on: it was idle, or others' requests hide how far it is."""
        self._busy_since_s = self._turned_s = now

    def _count_from(self, now: float) -> None:
        """What is learned next took from now on."""
        self._turned_s = now
        self._done_requests = self._done_tokens = 0

    def _learn(self, ticket: Ticket, charged_tokens: int, now: float) -> None:
        """A first token.

        A replica computes several prompts side by side, and short ones before the rest of long ones. So requests are
        counted together until none is left that has waited longer than them: the time until then was for them all.
        """
        self._busy_since_s = now
        self._done_requests += 1
        self._done_tokens += charged_tokens
        if any(share.waiting_requests for share in self.others.values()):
            # News of another router's first token may be on its way: who knows when the replica turned to us.
            self._count_from(now)
            return
        service_s = now - self._turned_s
        if not self._is_oldest(ticket) or service_s <= 0 or self._done_tokens <= 0:
            return
        tokens = self._done_tokens / self._done_requests
        service_s /= self._done_requests
        self._count_from(now)
        self._model.learn(tokens, service_s)
        expected_s = self._model.expected_s(tokens)
        if not self._actual_s:
            self._actual_s = self._expected_s = expected_s  # like the others, until experience says otherwise
        self._actual_s += _WEIGHT * (service_s - self._actual_s)
        self._expected_s += _WEIGHT * (expected_s - self._expected_s)

    def _give_up(self, ticket: Ticket, now: float) -> None:
        """No first token of it will come: nobody knows how much of the time since then it has taken."""
        if self._is_oldest(ticket):
            self._count_from(now)

    def _is_oldest(self, ticket: Ticket) -> bool:
        return next(iter(self._waiting)) is ticket

    def expect(self, keys: Sequence[int]) -> Piece:
        """A request is on its way that will leave these blocks, one after the other. ``settle`` follows, once."""
        return self.pending.add(keys)

    def settle(self, piece: Piece, event_seq: int | None, output_keys: Sequence[int], now: float) -> None:
        """That request has ended: its blocks, and those of its answer, stay pending until event ``event_seq``.

        None: it failed, they will not come.
        """
        if event_seq is None or event_seq <= self._confirmed_seq:
            self.pending.remove(piece)
            return
        answers = self.pending.add(output_keys, are_chained=False)  # of several choices
        self._unconfirmed.append((event_seq, now + _CONFIRM_TIMEOUT_S, (piece, answers)))


class Ticket:
    """One request's charge on one replica."""

    __slots__ = (
        "_charged_tokens",
        "_journal",
        "_load",
        "_num_choices",
        "_number",
        "_open",
        "_piece",
        "_waiting",
    )

    def __init__(
        self,
        load: ReplicaLoad,
        miss_tokens: int,
        keys: Sequence[int],
        now: float,
        journal: Journal | None = None,
        num_choices: int = 1,
    ) -> None:
        if not load.waiting_requests:
            load._turn(now)
        load._waiting[self] = None
        self._load = load
        self._charged_tokens = miss_tokens
        self._num_choices = num_choices
        self._waiting = True
        self._open = True
        load.changed.add(load.replica)
        load.in_flight += num_choices
        load.waiting_requests += 1
        load.waiting_tokens += miss_tokens
        self._piece = load.expect(keys)
        self._journal = journal
        share = Share(num_choices, 1, miss_tokens)
        self._number = journal.add(0, load.replica, share, keys) if journal is not None else 0

    def first_token(self, now: float) -> None:
        """The prefill is over: nobody waits for it any more."""
        if self._waiting:
            self._load._learn(self, self._charged_tokens, now)
            self._tell(self._stop_waiting())

    def close(self, now: float, event_seq: int | None = None, output_keys: Sequence[int] = ()) -> None:
        """The request has left the replica.

        ``event_seq`` is the replica's last event when it ended: its blocks, and ``output_keys`` of the answer, stay
        pending until the index has applied it. None: it failed, they will not come.
        """
        if not self._open:
            return
        self._open = False
        load = self._load
        if self._waiting:
            load._give_up(self, now)
        load.falls()
        change = Share(-self._num_choices).plus(self._stop_waiting())
        load.in_flight -= self._num_choices
        load.settle(self._piece, event_seq, output_keys, now)
        self._tell(change, output_keys, ended=True, event_seq=event_seq or 0)

    def _stop_waiting(self) -> Share:
        if not self._waiting:
            return NO_SHARE
        self._waiting = False
        self._load.falls()
        del self._load._waiting[self]
        self._load.waiting_requests -= 1
        self._load.waiting_tokens -= self._charged_tokens
        return Share(0, -1, -self._charged_tokens)

    def _tell(self, change: Share, keys: Sequence[int] = (), ended: bool = False, event_seq: int = 0) -> None:
        if self._journal is not None and not self._load.is_gone:
            self._journal.add(self._number, self._load.replica, change, keys, ended, event_seq)


class LoadBook:
    """The load of every replica this router knows."""

    def __init__(self) -> None:
        self.model = ServiceModel()
        self.journal: Journal | None = None  # where there are other routers to tell
        self.changed: set[str] = set()  # whose counts are others than when this was emptied
        self._replicas: dict[str, ReplicaLoad] = {}
        self._held: set[ReplicaLoad] = set()

    def __len__(self) -> int:
        return len(self._replicas)

    def of(self, replica: str) -> ReplicaLoad:
        """The replica's load, empty at first."""
        load = self._replicas.get(replica)
        if load is None:
            load = self._replicas[replica] = ReplicaLoad(replica, self.model, self.changed)
        return load

    def charge(self, replica: str, miss_tokens: int, keys: Sequence[int], now: float, num_choices: int = 1) -> Ticket:
        """Charge a request that was just placed; ``keys`` are the blocks it will add there."""
        return Ticket(self.of(replica), miss_tokens, keys, now, self.journal, num_choices)

    def hold(self, replica: str, tokens: int) -> None:
        """A queued request wants this replica: those after it in the queue reckon with that."""
        load = self.of(replica)
        self.changed.add(replica)
        load.held_requests += 1
        load.held_tokens += tokens
        self._held.add(load)

    def release_holds(self) -> None:
        """The look at the queue is over, or begins again."""
        for load in self._held:
            self.changed.add(load.replica)
            load.held_requests = load.held_tokens = 0
        self._held.clear()

    def set_share(self, router: str, replica: str, share: Share, now: float, has_progressed: bool = False) -> None:
        """Another router has this much on a replica now; ``has_progressed``: it has just had a first token there."""
        load = self.of(replica)
        was_waiting = load.waiting_requests
        before = load.others.pop(router, NO_SHARE)
        if share != NO_SHARE:
            load.others[router] = share
        load.falls()
        load.in_flight += share.in_flight - before.in_flight
        load.waiting_requests += share.waiting_requests - before.waiting_requests
        load.waiting_tokens += share.waiting_tokens - before.waiting_tokens
        if has_progressed or (load.waiting_requests and not was_waiting):
            load._turn(now)

    def own_shares(self) -> dict[str, Share]:
        """What this router has in flight, by replica; those with nothing are absent."""
        shares = {name: load.own for name, load in self._replicas.items()}
        return {name: share for name, share in shares.items() if share != NO_SHARE}

    def confirm(self, replica: str, applied_seq: int, now: float) -> None:
        """See ``ReplicaLoad.confirm``."""
        load = self._replicas.get(replica)
        if load is not None:
            load.confirm(applied_seq, now)

    def prune(self, members: Collection[str], now: float) -> None:
        """Let go of the empty records of replicas that are no members: late steps of other routers make such anew."""
        for name in self._replicas.keys() - members:
            load = self._replicas[name]
            load.confirm(0, now)  # nothing of it will be applied: what is pending ends by its time
            if load.is_empty:
                self.forget(name)

    def forget(self, replica: str) -> None:
        """That generation has gone. Tickets that are still open close on the record that nobody reads any more."""
        load = self._replicas.pop(replica, None)
        if load is not None:
            load.is_gone = True
            self.changed.add(replica)
