"""Which request is sent next when replicas are full: bounds, fair order, who gives way. Plain data, time an argument.

A replica is full when it has as many sequences (one per choice), or as many prompt tokens to compute, as it can use:
more would only wait there, in an order that nobody can change any more. Requests that want a full replica wait here,
in classes by their ``priority`` (lower first), inside a class by deficit round robin over tenants: in turn each may
have a quantum of tokens times its weight computed. What a request costs is known once it is placed, so a turn may end
in debt, which the tenant's next turns pay first. A lower class is never starved: one service in 16 is its own.

When the queue is full, whoever has most in it gives way: a flood costs the one who sends it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

QUANTUM_TOKENS = 512
MIN_COST_TOKENS = 64  # of a request that has nothing to compute: it takes a place all the same
PASSES = 16  # services of higher classes after which a lower one has its turn
_MAX_DEBTORS = 4096  # tenants that left in debt and are remembered
_STEPS_AHEAD = 4  # engine steps whose tokens a replica may have waiting
_SECONDS_AHEAD = 1.0  # or what it computes in this time, where that is more
_RATE_WINDOW = 256  # services
_RATE_WINDOW_S = 30.0
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_UNBOUNDED = 1 << 60


class Bound(NamedTuple):
    """What a replica is given at most."""

    requests: int = _UNBOUNDED  # in flight, each choice counted; one with more goes to a replica that has none
    tokens: int = _UNBOUNDED  # waiting to be computed; a longer prompt goes to a replica that has none

    def is_reached(self, requests: int, tokens: int, num_choices: int = 1) -> bool:
        """Whether a replica with so much gets no request of so many choices more."""
        return (requests > 0 and requests + num_choices > self.requests) or tokens >= self.tokens


class ReplicaLimits(Protocol):
    """What a replica's lease says it computes at once (``common_pb2.Limits``)."""

    @property
    def max_num_seqs(self) -> int:
        """Answers that grow at once."""
        ...

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of one step."""
        ...


def bound_of(
    limits: ReplicaLimits, tokens_per_s: float, max_requests: int | None = None, max_tokens: int | None = None
) -> Bound:
    """A replica's bound: what it computes at once and a quarter more, four steps' tokens or those of a second.

    That keeps it busy until the router hears that there is room. ``max_requests`` and ``max_tokens`` override it. A
    replica that states no limits has none.
    """
    requests, tokens = max_requests, max_tokens
    if requests is None:
        seqs = limits.max_num_seqs
        requests = seqs + max(1, seqs // 4) if seqs else _UNBOUNDED
    if tokens is None:
        step = limits.max_num_batched_tokens
        tokens = max(_STEPS_AHEAD * step, int(_SECONDS_AHEAD * tokens_per_s)) if step else _UNBOUNDED
    return Bound(requests, tokens)


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting:
    """A request in the queue."""

    tenant: str
    priority: int  # lower first
    num_tokens: int  # of its prompt
    num_choices: int = 1  # answers to it
    arrived_s: float
    expires_s: float


W = TypeVar("W", bound=Waiting)


class QueueFullError(Exception):
    """The queue has no room for this request, and its tenant no right to more of it."""


class FlowQueue(Generic[W]):
    """Requests that wait, in the order in which they may go.

    ``candidates`` looks, ``serve`` takes one out and charges its tenant; whoever cannot go yet is passed over, and its
    tenant keeps its turn.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        weights: Mapping[str, float] | None = None,
        quantum_tokens: int = QUANTUM_TOKENS,
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._weights = weights or {}
        self._quantum_tokens = quantum_tokens
        self._classes: dict[int, _Class[W]] = {}
        self._size = 0
        self.num_tokens = 0  # of all prompts

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[W]:
        for one in self._classes.values():
            for tenant in one.ring.values():
                yield from tenant.requests

    @property
    def num_tenants(self) -> int:
        """Tenants that have a request here."""
        return len({name for one in self._classes.values() for name in one.ring})

    def add(self, waiting: W) -> list[W]:
        """Queue a request; the ones that gave way to it, which are out of the queue. Raises ``QueueFullError``."""
        gave_way: list[W] = []
        while self._lacks_room(waiting):
            victim = self._victim(waiting)
            if victim is None:
                for one in reversed(gave_way):
                    self._insert(one)
                raise QueueFullError(f"{self._size} requests with {self.num_tokens} prompt tokens wait")
            self.remove(victim)
            gave_way.append(victim)
        self._insert(waiting)
        return gave_way

    def remove(self, waiting: W) -> bool:
        """Take a request out that does not want to wait any longer; false when it is not here."""
        one = self._classes.get(waiting.priority)
        tenant = one.ring.get(waiting.tenant) if one is not None else None
        if one is None or tenant is None or waiting not in tenant.requests:
            return False
        self._take(one, tenant, waiting)
        return True

    def candidates(self) -> Iterator[W]:
        """All requests, the next one first. The queue must not change while this is read.

        After the first come those that may go if it cannot: of each tenant in turn its oldest, then the second oldest.
        """
        for one in self._ordered_classes():
            one.settle()
            queues = [iter(tenant.requests) for tenant in one.ring.values()]
            while queues:
                left = []
                for requests in queues:
                    if (waiting := next(requests, None)) is not None:
                        yield waiting
                        left.append(requests)
                queues = left

    def serve(self, waiting: W, cost_tokens: int) -> None:
        """It is on its way: take it out and charge its tenant with the tokens that are computed for it.

        Its prompt is computed once; each further choice takes a place, and costs what a place costs.
        """
        one = self._classes[waiting.priority]
        tenant = one.ring[waiting.tenant]
        cost = max(MIN_COST_TOKENS, cost_tokens) + MIN_COST_TOKENS * (waiting.num_choices - 1)
        # Out of turn, where nobody else could use the room, a debt is the largest of its costs, not their sum.
        tenant.deficit = min(tenant.deficit, max(tenant.deficit, 0.0) - cost)
        one.passed = 0
        for priority, other in self._classes.items():
            if priority > waiting.priority:
                other.passed += 1
        self._take(one, tenant, waiting)

    def expired(self, now: float) -> list[W]:
        """Those whose time is over, taken out."""
        over = [waiting for waiting in self if waiting.expires_s <= now]
        for waiting in over:
            self.remove(waiting)
        return over

    def _ordered_classes(self) -> list[_Class[W]]:
        """By priority; before them the lower class that has been passed over too often."""
        ordered = [self._classes[priority] for priority in sorted(self._classes)]
        if len(ordered) > 1:
            starved = max(ordered, key=lambda one: one.passed)
            if starved.passed >= PASSES:
                ordered.remove(starved)
                ordered.insert(0, starved)
        return ordered

    def _lacks_room(self, waiting: W) -> bool:
        return self._size >= self._max_requests or self.num_tokens + waiting.num_tokens > self._max_tokens

    def _victim(self, waiting: W) -> W | None:
        """The newest request of the tenant that has most of the lowest class; None where that would be unfair."""
        if not self._size or waiting.num_tokens > self._max_tokens:
            return None
        lowest = max(self._classes)
        if lowest < waiting.priority:
            return None
        of_requests = self._size >= self._max_requests
        ring = self._classes[lowest].ring
        biggest = max(ring.values(), key=lambda tenant: tenant.share(of_requests))
        if lowest == waiting.priority:
            own = ring.get(waiting.tenant)
            after = (own.share(of_requests) if own is not None else 0.0) + (
                1 if of_requests else waiting.num_tokens
            ) / self._weight(waiting.tenant)
            if biggest is own or biggest.share(of_requests) <= after:
                return None
        return biggest.requests[-1]

    def _insert(self, waiting: W) -> None:
        one = self._classes.get(waiting.priority)
        if one is None:
            one = self._classes[waiting.priority] = _Class()
        tenant = one.ring.get(waiting.tenant)
        if tenant is None:
            tenant = one.join(waiting.tenant, self._weight(waiting.tenant) * self._quantum_tokens)
            tenant.weight = self._weight(waiting.tenant)
        tenant.requests.append(waiting)
        tenant.num_tokens += waiting.num_tokens
        self._size += 1
        self.num_tokens += waiting.num_tokens

    def _take(self, one: _Class[W], tenant: _Tenant[W], waiting: W) -> None:
        if tenant.requests[0] is waiting:
            tenant.requests.popleft()
        else:
            tenant.requests.remove(waiting)
        tenant.num_tokens -= waiting.num_tokens
        self._size -= 1
        self.num_tokens -= waiting.num_tokens
        if not tenant.requests:
            one.leave(waiting.tenant)
            if not one.ring:
                del self._classes[waiting.priority]

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


class _Tenant(Generic[W]):
    """One tenant's place in the round of its class."""

    __slots__ = ("deficit", "num_tokens", "quantum", "requests", "round", "weight")

    def __init__(self, quantum: float, deficit: float, round_: int) -> None:
        self.requests: deque[W] = deque()
        self.num_tokens = 0
        self.quantum = quantum  # tokens per turn
        self.deficit = deficit  # tokens left of this turn; not above 0: the turn is over
        self.round = round_  # turns are counted
        self.weight = 1.0

    def share(self, of_requests: bool) -> float:
        return (len(self.requests) if of_requests else self.num_tokens) / self.weight


class _Class(Generic[W]):
    """Tenants of one priority in the order of their turns: whose turn it is comes first."""

    __slots__ = ("debts", "passed", "ring")

    def __init__(self) -> None:
        self.ring: OrderedDict[str, _Tenant[W]] = OrderedDict()
        self.debts: OrderedDict[str, tuple[float, int]] = OrderedDict()  # who left: deficit, and in which round
        self.passed = 0  # services of higher classes since its own last one

    def join(self, name: str, quantum: float) -> _Tenant[W]:
        """A tenant comes, or comes again: to the end of the round, with what it still owes."""
        round_ = next(reversed(self.ring.values())).round if self.ring else 0
        debt, left_in = self.debts.pop(name, (0.0, round_))
        deficit = min(quantum, debt + quantum * (1 + round_ - left_in))
        tenant: _Tenant[W] = _Tenant(quantum, deficit, round_)
        self.ring[name] = tenant
        return tenant

    def leave(self, name: str) -> None:
        """It has nothing left here. Unused tokens are forgotten, a debt is not."""
        tenant = self.ring.pop(name)
        if tenant.deficit < 0:
            self.debts[name] = (tenant.deficit, tenant.round)
            if len(self.debts) > _MAX_DEBTORS:
                self.debts.popitem(last=False)

    def settle(self) -> None:
        """End the turns that are over, until the first tenant has tokens left."""
        # Rounds in which everybody would only pay debts are done at once.
        rounds = min(int(-tenant.deficit // tenant.quantum) for tenant in self.ring.values())
        if rounds > 0:
            for tenant in self.ring.values():
                tenant.deficit += rounds * tenant.quantum
                tenant.round += rounds
        while True:
            name, tenant = next(iter(self.ring.items()))
            if tenant.deficit > 0:
                return
            tenant.deficit += tenant.quantum
            tenant.round += 1
            self.ring.move_to_end(name)


class DrainRate:
    """How fast the queue empties, from its last services."""

    def __init__(self) -> None:
        self._served: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)

    def begin(self) -> None:
        """The queue was empty, and is no more."""
        self._served.clear()

    def served(self, now: float, cost_tokens: int) -> None:
        """A request left the queue for a replica."""
        self._served.append((now, cost_tokens))

    def tokens_per_s(self, now: float) -> float:
        """Tokens of work; 0: nothing was served lately."""
        return self._per_s(now, (tokens for _, tokens in self._recent(now)))

    def retry_after_s(self, num_waiting: int, now: float) -> float:
        """When one more request would find room: the time that those who wait take, 1 to 60 s."""
        rate = self._per_s(now, (1 for _ in self._recent(now)))
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, num_waiting / rate)) if rate else _MIN_RETRY_S

    def _recent(self, now: float) -> list[tuple[float, int]]:
        while self._served and self._served[0][0] < now - _RATE_WINDOW_S:
            self._served.popleft()
        return list(self._served)

    def _per_s(self, now: float, amounts: Iterable[int]) -> float:
        total = sum(amounts)
        return total / max(now - self._served[0][0], 1e-3) if self._served else 0.0
