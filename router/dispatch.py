"""The one way from a request to its answer, for every front.

    tokens -> keys -> match -> decide -> charge -> call the worker -> pass its messages on -> release

Where the replica that it would go to is full it waits for a place first (``router.admission``). What happens on one
replica is an ``Attempt``. Before the first message a failing replica costs a retry on another one; after it the stream
is continued on another replica from the tokens that were delivered, once. A replica that hangs counts as failing as
soon as somebody else can take what waits there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from warmfront_pb.v1 import inference_pb2, worker_pb2

from cache.adapter import Adapter
from common.trace import NO_TRACE, Trace
from router.admission import Admission, Waiter, Wanted
from router.attempt import Attempt
from router.config import RouterConfig
from router.eligible import RETRY_AFTER_S, Eligible
from router.errors import DeadlineError, NoReplicaReadyError, OverloadedError, RouterError, WorkerFailedError
from router.explain import Absence, RecentDecisions, Record
from router.explain_cache import ask_cache
from router.fleet import Fleet
from router.lora import adapter_of, asked_name, not_found
from router.metrics import RouterMetrics
from router.placement import Placement
from router.policy import Decision
from router.request import Work, check, complete_sampling, prompt_ids
from router.worker_client import CLIENT_STATUSES, REFUSES_ROUTER, HungError, WorkerError

log = logging.getLogger(__name__)

_MAX_RETRIES = 2
_RETRY_JITTER_S = 0.02
_REASONS = {"RESOURCE_EXHAUSTED": "overloaded", "NOT_FOUND": "no_adapter"}  # of an absence, by what the worker answered


@dataclass(slots=True)
class Route:
    """Where a request went, filled in as it goes; complete when the last message has been read."""

    replica: str = ""
    matched_tokens: int = 0  # predicted
    cached_tokens: int | None = None  # what the replica found
    num_retries: int = 0
    was_continued: bool = False
    queue_s: float = 0.0  # held back before it was sent
    first_token_s: float | None = None  # since the request arrived
    record: Record | None = None  # of the last decision
    trace: Trace = NO_TRACE  # of its caller

    def headers(self, request_id: str, policy: str) -> list[tuple[str, str]]:
        """What the client is told of it: HTTP headers or trailing metadata."""
        headers = [("x-request-id", request_id)]
        if self.replica:
            headers += [
                ("x-warmfront-replica", self.replica),
                ("x-warmfront-matched-tokens", str(self.matched_tokens)),
                ("x-warmfront-policy", policy),
            ]
        return headers


class Dispatcher:
    """Places requests on the fleet's replicas and passes the answers on."""

    def __init__(self, config: RouterConfig, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self._rng = random.Random()
        self._eligible = Eligible(fleet)
        self._placement = Placement(fleet.index, fleet.loads, config.policy, self._rng)
        self._attempts: set[Attempt] = set()  # that run
        self.queue: Admission[Attempt] = Admission(config, fleet.loads, metrics, fleet.full, lambda: len(fleet.ready))
        self.recent = RecentDecisions()
        fleet.on_hung = self._leave_hung

    async def prepare(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        request_id: str,
        timeout_s: float | None = None,
        session: str = "",
        tenant: str = "",
    ) -> Work:
        """Check a request and turn its prompt into tokens. Raises ``RouterError``."""
        arrived_s = time.monotonic()
        model = self._fleet.profile
        check(request, model)
        adapter = await self._adapter(request)
        packed = await prompt_ids(request, model)
        num_tokens = len(packed) // 4
        call = worker_pb2.WorkerGenerateRequest(
            request_id=request_id,
            token_ids=packed,
            sampling=complete_sampling(request.sampling, model, num_tokens, self._rng),
            cache_salt=request.cache_salt,
            priority=request.priority,
            retention=request.retention,
            tenant=tenant,
            lora=adapter.name if adapter is not None else "",
            lora_version=adapter.version if adapter is not None else "",
        )
        limit_s = self._config.request_timeout_s
        return Work(
            request_id=request_id,
            call=call,
            token_ids=packed,
            num_tokens=num_tokens,
            timeout_s=limit_s if timeout_s is None else min(timeout_s, limit_s),
            arrived_s=arrived_s,
            session=session,
        )

    async def explain(self, request: inference_pb2.GenerateRequest, session: str = "") -> Record:
        """What would be decided for a request now, with nothing sent, charged or counted. Raises ``RouterError``."""
        model = self._fleet.profile
        check(request, model)
        adapter = await self._adapter(request)
        packed = await prompt_ids(request, model)
        call = worker_pb2.WorkerGenerateRequest(
            token_ids=packed,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            lora=adapter.name if adapter is not None else "",
            lora_version=adapter.version if adapter is not None else "",
        )
        num_tokens = len(packed) // 4
        keys = await self._keys(packed, call)
        now = time.monotonic()
        caches, passed_over = self._eligible.find(call, {}, now)
        decision = None
        if caches:
            decision = self._placement.preview(num_tokens, keys, self._block_size, caches, now, session)
        record = self._record("", num_tokens, keys, decision, passed_over)
        asked = worker_pb2.ExplainCacheRequest(
            token_ids=packed, cache_salt=call.cache_salt, lora=call.lora, lora_version=call.lora_version
        )
        record.would_wait = decision is not None and self._fleet.is_full(
            decision.chosen.replica, max(1, request.sampling.n)
        )
        record.cache = await ask_cache(self._fleet, record, asked)
        return record

    async def _adapter(self, request: inference_pb2.GenerateRequest) -> Adapter | None:
        """The adapter that a request means, None where it means the model itself. Raises ``RouterError``.

        A name that nobody is known to have may have been loaded a moment ago through another router: before it is
        refused the leases are looked at once more.
        """
        fleet = self._fleet
        name = asked_name(request, fleet.profile)
        if not name:
            return None
        if (adapter := fleet.adapters.named(name)) is None:
            await fleet.look_again()
            adapter = fleet.adapters.named(name)
        if adapter is None and fleet.ready:
            raise not_found(request, name, fleet.profile, fleet.adapters)
        if adapter is None:
            raise NoReplicaReadyError(f"{fleet.why_not_ready()}: retry soon", retry_after_s=RETRY_AFTER_S)
        return adapter

    def count(self, status: str) -> None:
        """Count one request of a client, which may have had several prompts. ``status`` is a gRPC status name."""
        self._metrics.count_request(status)

    def ended(self, request_id: str, status: str, work: Work | None, route: Route) -> None:
        """Write a request's line, whatever became of it. ``status`` is a gRPC status name."""
        if work is None:
            log.info("request request=%s status=%s%s", request_id, status, route.trace.suffix)
            return
        log.info(
            "request request=%s status=%s replica=%s prompt_tokens=%d matched_tokens=%d cached_tokens=%s "
            "retries=%d queue_s=%.3f ttft_s=%s total_s=%.3f%s",
            *(request_id, status, route.replica or "-", work.num_tokens, route.matched_tokens, route.cached_tokens),
            *(route.num_retries, route.queue_s, "-" if route.first_token_s is None else f"{route.first_token_s:.3f}"),
            *(time.monotonic() - work.arrived_s, route.trace.suffix),
        )

    async def generate(
        self, work: Work, route: Route, forget: Callable[[], None] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The answer's serialised GenerateResponse messages, as the replica sent them.

        Close the iterator to give up: the replica is told at once. ``forget``, where its messages are kept back until
        the last: drops them, so that an answer that breaks off and cannot go on begins anew, once. Raises
        ``RouterError``.
        """
        deadline_s = work.arrived_s + work.timeout_s
        keys = all_keys = await self._keys(work.token_ids, work.call)
        whole_work = work
        self._metrics.prompt_tokens.inc(work.num_tokens)
        may_move = self._config.continue_streams and _can_move(work.call.sampling)
        delivered: list[bytes] = []
        excluded: dict[str, Absence] = {}
        while True:
            attempt = await self._admit(work, keys, excluded, route, deadline_s)
            attempt.may_leave = route.num_retries < _MAX_RETRIES
            self._attempts.add(attempt)
            try:
                stream = attempt.send(deadline_s, route.trace.metadata)
                while (message := await stream.read()) is not None:
                    if not attempt.has_begun:
                        now = time.monotonic()
                        attempt.begin(now)
                        attempt.may_leave = (may_move and not route.was_continued) or forget is not None
                        self._first_token(work, route, now)
                    if may_move:
                        delivered.append(message)
                    else:
                        delivered = [message]
                    yield message
                self._finished(work, route, keys, await attempt.finish())
                return
            except WorkerError as error:
                failure = error
                self._failed(attempt, failure, len(delivered), route.trace)
            finally:
                self._attempts.discard(attempt)
                attempt.close()
            replica = attempt.member.replica.id
            reason = _REASONS.get(failure.status, "excluded")
            excluded[replica] = Absence("READY", reason, f"{failure.status}: {failure.message}")
            if not attempt.has_begun:
                await self._before_retry(work, failure, route, excluded, deadline_s)
                continue
            if _is_whole(delivered[-1]):
                return  # it died between the last message and the status
            if failure.status in CLIENT_STATUSES:
                raise _broken_off(failure, replica)
            if may_move and not route.was_continued:
                work = _continued(work, delivered)
                keys = await self._keys(work.token_ids, work.call)
                route.was_continued = True
            elif forget is not None:
                forget()
                work, keys, delivered, forget = whole_work, all_keys, [], None
            else:
                raise _broken_off(failure, replica)
            self._metrics.failovers.inc()

    def _failed(self, attempt: Attempt, failure: WorkerError, num_messages: int, trace: Trace) -> None:
        member = attempt.member
        if failure.is_refusal:
            self._fleet.note(member, REFUSES_ROUTER)
        attempt.fail(failure, time.monotonic())
        self._eligible.has_failed(member)
        log.warning(
            "replica failed a request request=%s replica=%s status=%s messages=%d error=%r%s",
            *(attempt.work.request_id, member.replica.id, failure.status, num_messages, failure.message, trace.suffix),
        )

    def _leave_hung(self) -> None:
        """A replica hangs: what it has goes elsewhere, as far as somebody else can take it. Asked again and again."""
        now, fleet = time.monotonic(), self._fleet
        for attempt in list(self._attempts):
            replica = attempt.member.replica.id
            hung = fleet.hung.get(replica) if fleet.members.get(replica) is attempt.member else None
            if hung is None or not attempt.may_leave:
                continue
            if self._eligible.has_other(attempt.work.call, attempt.excluded, now):
                attempt.leave(hung.detail)

    def _first_token(self, work: Work, route: Route, now: float) -> None:
        if route.first_token_s is None:
            route.first_token_s = now - work.arrived_s
            if route.record is not None:
                route.record.ttft_s = route.first_token_s
            self._metrics.ttft_seconds.observe(route.first_token_s)

    async def _keys(self, token_ids: bytes, call: worker_pb2.WorkerGenerateRequest) -> array[int]:
        """Index keys of the prompt's full blocks; hashed here and nowhere else in the router."""
        chains = self._fleet.chains
        if chains is None or not any(cache.prefix_caching for cache in self._fleet.ready_caches.values()):
            return array("Q")
        if call.sampling.HasField("prompt_logprobs"):
            return array("Q")  # each of its prompt tokens is computed, whatever is cached
        keys, num_hashed = array("Q"), chains.num_hashed_blocks
        for part in chains.parts(token_ids, call.cache_salt, adapter_of(call)):
            keys += part
            if len(part) == chains.blocks_at_once and chains.num_hashed_blocks > num_hashed:
                await asyncio.sleep(0)  # a long prompt at first sight: others have their turn in between
                num_hashed = chains.num_hashed_blocks
        return keys

    async def _admit(
        self, work: Work, keys: array[int], excluded: Mapping[str, Absence], route: Route, deadline_s: float
    ) -> Attempt:
        """Place a request, at once or when its turn comes. One that has been sent before does not wait again."""
        if excluded:
            placed = self._place(work, keys, excluded, route, may_wait=False)
            assert isinstance(placed, Attempt)
            return placed
        queue = self.queue
        if not queue and queue.has_room:
            placed = self._place(work, keys, excluded, route)
            if isinstance(placed, Attempt):
                return placed
        now = time.monotonic()
        waiter = Waiter(
            tenant=work.call.tenant,
            priority=work.call.priority,
            num_tokens=work.num_tokens,
            num_choices=work.call.sampling.n,
            arrived_s=now,
            expires_s=min(deadline_s, now + self._config.queue_timeout_s),
            deadline_s=deadline_s,
            place=partial(self._place, work, keys, excluded, route),
        )
        try:
            return await queue.wait(waiter)
        finally:
            route.queue_s = time.monotonic() - now
            if route.record is not None:
                route.record.queue_s = route.queue_s

    def _place(
        self,
        work: Work,
        keys: array[int],
        excluded: Mapping[str, Absence],
        route: Route,
        may_wait: bool = True,
    ) -> Attempt | Wanted:
        """Decide and charge, in one go: nobody else decides between the two. Where the chosen is full, only decide."""
        started = time.perf_counter()
        now = time.monotonic()
        caches, passed_over = self._eligible.find(work.call, excluded, now)
        if not caches:
            raise self._eligible.nobody(work.call)
        decided = self._placement.decide(work.num_tokens, keys, self._block_size, caches, now, work.session)
        decision = decided.decision
        chosen = decision.chosen
        if may_wait and self._fleet.is_full(chosen.replica, work.call.sampling.n):
            return Wanted(chosen.replica, decided.work_tokens)
        ticket = self._placement.charge(decided, now, work.call.sampling.n)
        member, load = self._fleet.ready[chosen.replica], self._fleet.loads.of(chosen.replica)
        attempt = Attempt(work, excluded, member, load, ticket, decided.work_tokens, self.queue)
        route.replica = chosen.replica
        route.matched_tokens = chosen.matched_tokens
        route.record = self._record(work.request_id, work.num_tokens, keys, decision, passed_over, route.num_retries)
        self.recent.add(route.record)
        self._metrics.decision_seconds.observe(time.perf_counter() - started)
        self._metrics.matched_tokens.inc(chosen.matched_tokens)
        self._metrics.regret_tokens.inc(decision.regret_tokens)
        return attempt

    def _record(
        self,
        request_id: str,
        num_tokens: int,
        keys: array[int],
        decision: Decision | None,
        passed_over: Mapping[str, Absence],
        num_retries: int = 0,
    ) -> Record:
        absent = self._fleet.absent
        held = self._fleet.index.match(keys) if absent or passed_over else {}
        return Record(
            request_id=request_id,
            decided_at_s=time.time(),
            policy=self._config.policy,
            num_tokens=num_tokens,
            num_blocks=len(keys),
            block_size=self._block_size,
            num_retries=num_retries,
            decision=decision,
            overhead_s=self._fleet.loads.model.overhead_s,
            generation=self._fleet.ready[decision.chosen.replica].replica.generation if decision is not None else "",
            absent=absent,
            passed_over=passed_over,
            held={name: depths for name, depths in held.items() if name in absent or name in passed_over},
            eligible=self._fleet.ready_caches,
        )

    @property
    def _block_size(self) -> int:
        scheme = self._fleet.scheme
        return scheme.block_size if scheme is not None else 1

    def _finished(self, work: Work, route: Route, keys: array[int], cached_tokens: int | None) -> None:
        """The answer is whole: what the replica found is compared with what was predicted."""
        route.cached_tokens = cached_tokens
        if cached_tokens is not None:
            if route.record is not None:
                route.record.cached_tokens = cached_tokens
                num_cached = cached_tokens // self._block_size
                if num_cached < min(len(keys), (work.num_tokens - 1) // self._block_size):
                    route.record.missing_key = keys[num_cached]
            self._metrics.prediction_error_tokens.observe(route.matched_tokens - cached_tokens)
        if (scheme := self._fleet.scheme) is not None:
            self._fleet.hot.served(work, keys, scheme.block_size, cached_tokens)

    async def _before_retry(
        self, work: Work, failure: WorkerError, route: Route, excluded: Mapping[str, Absence], deadline_s: float
    ) -> None:
        """Wait a moment, or raise where another replica would not help."""
        who = "the only ready replica" if len(excluded) == 1 else f"each of the {len(excluded)} replicas tried"
        has_lost_adapter = failure.status == "NOT_FOUND" and bool(work.call.lora)  # another one may have it still
        if failure.status in CLIENT_STATUSES and not has_lost_adapter:
            if failure.status == "DEADLINE_EXCEEDED":
                raise DeadlineError("the request's deadline passed before its first token")
            raise failure.as_router_error(who)
        if route.num_retries >= _MAX_RETRIES or not self._eligible.holders(work.call).keys() - excluded:
            if failure.status == "RESOURCE_EXHAUSTED":
                raise OverloadedError(f"all queues are full: {failure.message}", retry_after_s=RETRY_AFTER_S)
            raise failure.as_router_error(who)
        route.num_retries += 1
        reason = "hung" if isinstance(failure, HungError) else failure.status.lower()
        self._metrics.retries.labels(reason).inc()
        await asyncio.sleep(self._rng.uniform(0, _RETRY_JITTER_S))
        if time.monotonic() >= deadline_s:
            raise DeadlineError("the request's deadline passed before its first token")


def _continued(work: Work, delivered: list[bytes]) -> Work:
    """The rest of an answer as a request of its own: what was delivered is context now, and counts as output."""
    output = b"".join(inference_pb2.GenerateResponse.FromString(message).token_ids for message in delivered)
    call = worker_pb2.WorkerGenerateRequest()
    call.CopyFrom(work.call)
    token_ids = call.token_ids = work.token_ids + output
    call.num_prior_output_tokens = len(output) // 4
    return replace(work, call=call, token_ids=token_ids, num_tokens=len(token_ids) // 4)


def _is_whole(last_message: bytes) -> bool:
    """Whether the answer ended with this message: the very last one has the usage."""
    return inference_pb2.GenerateResponse.FromString(last_message).HasField("usage")


def _broken_off(failure: WorkerError, replica: str) -> RouterError:
    if failure.status == "DEADLINE_EXCEEDED":
        return DeadlineError("the request's deadline passed in the middle of the answer")
    return WorkerFailedError(
        f"replica {replica} failed in the middle of the answer ({failure.status}) "
        "and it cannot go on elsewhere: send the request again"
    )


def _can_move(sampling: inference_pb2.SamplingParams) -> bool:
    """Whether an answer can go on elsewhere: one choice, and no prompt logprobs, which only a first message has."""
    return sampling.n == 1 and not sampling.HasField("prompt_logprobs")
