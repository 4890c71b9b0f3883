"""Holds requests back while every replica that they want is full: the queue of ``router.flow``, with its waiting.

A request is placed when it leaves, by the same policy as always, with the load and the caches of that moment: the
queued ones before it that want the same replica count as waiting there, so that a request waits for its warm replica
for as long as that is cheaper than a cold one, and goes elsewhere when it is not. With nothing queued none of this
runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from router.config import RouterConfig
from router.errors import DeadlineError, NoReplicaReadyError, OverloadedError, RouterError
from router.flow import DrainRate, FlowQueue, QueueFullError, Waiting
from router.load import LoadBook
from router.metrics import RouterMetrics

log = logging.getLogger(__name__)

_TICK_S = 0.02  # how late what nobody tells of is noticed: other routers' releases, new replicas, time-outs
_SURE_S = 0.25  # how long a request that waits for one replica is not asked again while that one stays full
_MAX_DECISIONS = 16  # per look at the queue
_MAX_PASSED = 256  # requests per look that wait for a replica that is full


class Placed(Protocol):
    """A request that has been sent, or is about to be: it counts as in flight (``entered``) until it is closed."""

    work_tokens: int  # that are computed for it

    def close(self) -> None:
        """Nobody takes it: what it was charged with is released."""


T = TypeVar("T", bound=Placed)


@dataclass(slots=True)
class Wanted:
    """The replica that a request would go to, which is full."""

    replica: str
    work_tokens: int


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter(Waiting, Generic[T]):
    """A queued request. ``place`` places it (charged, at that moment) or names the full replica that it wants.

    ``place`` may raise ``RouterError``: then that is the request's answer.
    """

    deadline_s: float  # the request's own
    place: Callable[[], T | Wanted]
    wants: Wanted | None = None
    sure_until_s: float = 0.0
    placed: asyncio.Future[T] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission(Generic[T]):
    """The queue of one router. ``full`` says which ready replicas are full, ``num_ready`` how many there are."""

    def __init__(
        self,
        config: RouterConfig,
        loads: LoadBook,
        metrics: RouterMetrics,
        full: Callable[[], set[str]],
        num_ready: Callable[[], int],
    ) -> None:
        self._config = config
        self._loads = loads
        self._metrics = metrics
        self._full = full
        self._num_ready = num_ready
        self._queue: FlowQueue[Waiter[T]] = FlowQueue(
            config.queue_requests, config.queue_tokens, config.tenant_weights_by_name
        )
        self._rate = DrainRate()
        self._ticker: asyncio.Task[None] | None = None
        self._is_looking_soon = False
        self._drained_by_s: float | None = None  # set: this router takes no new requests
        self.num_in_flight = 0
        self.tokens_in_flight = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def num_tokens(self) -> int:
        """Of the prompts that wait."""
        return self._queue.num_tokens

    @property
    def num_tenants(self) -> int:
        """That have a request waiting."""
        return self._queue.num_tenants

    @property
    def oldest_s(self) -> float:
        """For how long the oldest request has waited."""
        return max((time.monotonic() - one.arrived_s for one in self._queue), default=0.0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of work that left the queue per second, lately."""
        return self._rate.tokens_per_s(time.monotonic())

    @property
    def is_draining(self) -> bool:
        """Whether nobody is queued any more."""
        return self._drained_by_s is not None

    @property
    def has_room(self) -> bool:
        """Whether this router may have one more request in flight."""
        return (
            self.num_in_flight < self._config.max_inflight_requests
            and self.tokens_in_flight < self._config.max_inflight_tokens
        )

    def entered(self, num_tokens: int) -> None:
        """A request with so many prompt tokens is placed, and in flight from now on; ``left`` follows, once."""
        self.num_in_flight += 1
        self.tokens_in_flight += num_tokens

    def left(self, num_tokens: int) -> None:
        """It has ended."""
        self.num_in_flight -= 1
        self.tokens_in_flight -= num_tokens
        self.look()

    def look(self) -> None:
        """Something was released: see, in a moment, who can go."""
        if self._queue and not self._is_looking_soon:
            self._is_looking_soon = True
            asyncio.get_running_loop().call_soon(self._look)

    async def wait(self, waiter: Waiter[T]) -> T:
        """Queue a request and return what its ``place`` gave. Raises ``RouterError``. Cancelled, it leaves at once."""
        self._add(waiter)
        try:
            result = await waiter.placed
        except asyncio.CancelledError:
            if waiter.placed.done() and not waiter.placed.cancelled() and waiter.placed.exception() is None:
                waiter.placed.result().close()
            raise
        finally:
            self._queue.remove(waiter)
            self._report()
            self._metrics.queue_seconds.observe(time.monotonic() - waiter.arrived_s)
        return result

    def begin_drain(self, timeout_s: float) -> None:
        """Those who wait may go until ``timeout_s`` has passed; who is left then is told to try elsewhere."""
        if self.is_draining:
            return
        self._drained_by_s = time.monotonic() + timeout_s
        for waiter in self._queue:
            waiter.expires_s = min(waiter.expires_s, self._drained_by_s)

    def _add(self, waiter: Waiter[T]) -> None:
        now = time.monotonic()
        if self.is_draining:
            self._metrics.rejected.labels("draining").inc()
            raise _draining()
        if not self._queue:
            self._rate.begin()
        try:
            gave_way = self._queue.add(waiter)
        except QueueFullError as error:
            self._metrics.rejected.labels("queue_full").inc()
            raise self._overloaded(f"every replica is busy and the queue is full: {error}", now) from None
        for one in gave_way:
            text = "every replica is busy, the queue is full and others had less of it"
            self._reject(one, "gave_way", self._overloaded(text, now))
        self._report()
        self.look()
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        """While anybody waits."""
        try:
            while self._queue:
                await asyncio.sleep(_TICK_S)
                self._look()
        finally:
            self._ticker = None

    def _look(self) -> None:
        """Send whoever can go."""
        self._is_looking_soon = False
        now = time.monotonic()
        for waiter in self._queue.expired(now):
            self._expire(waiter, now)
        try:
            decisions = _MAX_DECISIONS
            while decisions > 0 and self.has_room:
                self._loads.release_holds()
                full = self._full()
                if full and len(full) >= self._num_ready():
                    break
                sent, num_tried = self._send_next(full, decisions, now)
                if not sent:
                    break
                decisions -= num_tried
            else:
                if decisions <= 0:
                    self.look()
        except Exception:  # those who wait have nobody else: the next look must come
            log.exception("looking at the queue failed")
        finally:
            self._loads.release_holds()
            self._report()

    def _send_next(self, full: set[str], max_decisions: int, now: float) -> tuple[bool, int]:
        """Send one request; whether there was one that can go, and how many were placed to find it."""
        num_tried = 0
        for num_passed, waiter in enumerate(self._queue.candidates()):
            wants = waiter.wants
            if wants is None or wants.replica not in full or now >= waiter.sure_until_s:
                if num_tried >= max_decisions:
                    break
                num_tried += 1
                try:
                    outcome = waiter.place()
                except RouterError as error:
                    self._queue.remove(waiter)
                    self._fail(waiter, error)
                    return True, num_tried
                if not isinstance(outcome, Wanted):
                    self._queue.serve(waiter, outcome.work_tokens)
                    self._rate.served(now, outcome.work_tokens)
                    if waiter.placed.done():  # its client left in this very moment
                        outcome.close()
                    else:
                        waiter.placed.set_result(outcome)
                    return True, num_tried
                wants = waiter.wants = outcome
                waiter.sure_until_s = now + _SURE_S
            self._loads.hold(wants.replica, wants.work_tokens)
            full.add(wants.replica)  # for those after it, also where it has room, but not for all choices of this one
            if num_passed >= _MAX_PASSED:
                break
        return False, num_tried

    def _expire(self, waiter: Waiter[T], now: float) -> None:
        waited_s = now - waiter.arrived_s
        if now >= waiter.deadline_s:
            error: RouterError = DeadlineError(f"the request's deadline passed in the queue, after {waited_s:.1f} s")
            self._reject(waiter, "deadline", error)
        elif self._drained_by_s is not None and now >= self._drained_by_s:
            self._reject(waiter, "draining", _draining())
        else:
            error = self._overloaded(
                f"no replica had room within --queue-timeout, after {waited_s:.1f} s in the queue", now
            )
            self._reject(waiter, "queue_timeout", error)

    def _overloaded(self, text: str, now: float) -> OverloadedError:
        return OverloadedError(f"{text}: retry later", retry_after_s=self._rate.retry_after_s(len(self._queue), now))

    def _reject(self, waiter: Waiter[T], reason: str, error: RouterError) -> None:
        self._queue.remove(waiter)
        self._metrics.rejected.labels(reason).inc()
        self._fail(waiter, error)

    def _fail(self, waiter: Waiter[T], error: RouterError) -> None:
        if not waiter.placed.done():
            waiter.placed.set_exception(error)

    def _report(self) -> None:
        self._metrics.queue_requests.set(len(self._queue))
        self._metrics.queue_tokens.set(self._queue.num_tokens)


def _draining() -> NoReplicaReadyError:
    return NoReplicaReadyError("this router is ending and no replica had room in time: retry", retry_after_s=1)
