"""The engine: one thread that owns scheduler, prefix cache and model, and turns requests into tokens.

Other threads hand it requests, cancels and commands (``submit``, ``cancel``, ``reset_cache``). After each step it hands
one ``StepReport`` to the event loop: every new piece of every answer, and the cache events of the step. It blocks while
there is nothing to do.

A slice that fails ends its request and no other. When not even a probe of the model succeeds, the engine is dead: it
says so once (``on_death``) and its process should end, since nothing here would work again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeVar

from cache.adapter import Adapter
from cache.block_hash import extra_keys
from cache.events import EventBatch
from cache.events import Snapshot as CacheSnapshot
from cache.history import Eviction
from cache.prefix_cache import BlockCopies, Explanation, PrefixCache
from cache.retention import Retention
from cache.stats import CacheStats
from worker.adapters import AdapterConflictError
from worker.batch import PROBE, SamplingParams, SequenceSlice, SliceResult, StepBatch, TokenLogprobs
from worker.detokenizer import Detokenizer, TokenTable
from worker.scheduler import Choice, ChoiceState, Limits, Scheduler
from worker.step_times import HUNG_AFTER_S, StepTimes

logger = logging.getLogger(__name__)
T = TypeVar("T")

SNAPSHOT_INTERVAL_S = 0.25  # how old the published view of a busy engine may be


class Runner(Protocol):
    """What computes a step. See ``worker.batch``."""

    def copy(self, copies: Sequence[BlockCopies]) -> None:
        """Copy KV between blocks, one after the other. A failure is the engine's: nobody knows what blocks hold."""

    def execute(self, batch: StepBatch) -> list[SliceResult]:
        """One result per slice, in order; afterwards the KV of all of them is in place."""

    def add_adapter(self, adapter: str, weights: Any) -> None:
        """Slices may name this LoRA adapter from now on."""

    def remove_adapter(self, adapter: str) -> None:
        """No slice names it any more."""


class CacheInUseError(Exception):
    """The cache cannot be reset while requests hold blocks. It can once they have ended."""


class EngineStoppedError(Exception):
    """The engine has ended and takes nothing more. Another replica may answer."""


class Failure(Enum):
    """Why a request ended without its whole answer."""

    DEADLINE = "deadline exceeded"
    POISONED = "the model failed on this request"
    STOPPED = "the engine has stopped"


OUTCOMES = ("stop", "length", "cancelled", *(failure.name.lower() for failure in Failure))
"""How a choice ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked request. ``sampling.seed`` is that of choice 0; the others derive theirs from it."""

    id: str  # the client's; need not be unique
    token_ids: array[int]  # typecode "i": the prompt and, at its end, num_prior_output_tokens of another replica
    sampling: SamplingParams
    max_tokens: int  # prior ones included
    min_tokens: int = 0
    num_choices: int = 1
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_prompt_logprobs: int | None = None
    adapter: Adapter | None = None  # a loaded one
    cache_salt: str | None = None
    tenant: str = ""
    retention: tuple[Retention, ...] = ()
    priority: int = 0
    deadline_s: float = math.inf  # time.monotonic()
    synthetic: bool = False
    num_prior_output_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Piece:
    """What one step added to one choice. ``finish_reason`` is empty while it runs."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str = ""
    stop_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a request ended: with all its choices, or with a ``failure``."""

    num_cached_tokens: int | None  # None: it never got blocks
    num_output_tokens: int  # of all choices, prior ones included
    last_event_seq: int
    output_keys: array[int]  # index keys of the blocks that output tokens completed
    failure: Failure | None = None
    detail: str = ""


Sink = Callable[[Piece | Ending], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request got its blocks for the first time."""

    queue_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    synthetic: bool
    num_host_tokens: int = 0  # of the cached ones, what came back from host memory


@dataclass(slots=True)
class StepReport:
    """All that happened since the last report, for the event loop."""

    deliveries: list[tuple[Sink, Piece | Ending]] = field(default_factory=list)
    events: EventBatch | None = None
    admitted: list[Admitted] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)  # user traffic, queueing included
    token_gaps_s: list[float] = field(default_factory=list)  # between two tokens of one choice, user traffic
    num_preemptions: int = 0
    num_output_tokens: int = 0  # user traffic
    outcomes: list[str] = field(default_factory=list)  # of choices that ended, user traffic: see OUTCOMES
    prefill_steps_s: list[float] = field(default_factory=list)  # steps that read prompts, and may decode beside
    decode_steps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """The engine's view of its load and cache, a fraction of a second old at most."""

    waiting: int = 0  # choices without a first token
    running: int = 0  # choices with one
    waiting_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0  # different block hashes on the device
    num_host_blocks: int = 0
    num_host_cached_blocks: int = 0  # different block hashes in host memory
    lru_age_s: float = 0.0  # idle time of the block that would be lost next; 0 while empty ones remain
    last_event_seq: int = 0
    stats: CacheStats = field(default_factory=CacheStats)


@dataclass(slots=True, eq=False)
class _Running:
    """A request in the engine."""

    number: int
    request: Request
    sink: Sink
    arrival_s: float
    choices: list[Choice] = field(default_factory=list)
    num_open: int = 0
    output_keys: array[int] = field(default_factory=lambda: array("Q"))


@dataclass(slots=True, eq=False)
class _Answer:
    """What the engine keeps of a choice, beside what the scheduler does."""

    running: _Running
    index: int
    text: Detokenizer
    last_token_s: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Engine:
    """See the module. Made on the event loop that gets its reports."""

    def __init__(
        self,
        *,
        runner: Runner,
        cache: PrefixCache,
        limits: Limits,
        table: TokenTable,
        eos_token_ids: frozenset[int],
        on_step: Callable[[StepReport], None],
        on_death: Callable[[BaseException], None],
        hung_after_s: float = HUNG_AFTER_S,
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._scheduler = Scheduler(cache, limits)
        self._table = table
        self._eos_token_ids = eos_token_ids
        self._on_step = on_step
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._num_arriving = 0  # choices in the inbox, which the scheduler does not count yet; under the lock
        self._stopping = False
        self._running: dict[int, _Running] = {}
        self._answers: dict[Choice, _Answer] = {}
        self._adapters: dict[str, bool] = {}  # in memory: whether one only stays until its last request has ended
        self._report = StepReport()
        self._num_preemptions_reported = 0
        self._steps = StepTimes(hung_after_s)
        self._published_s = -math.inf
        self._snapshot = EngineSnapshot(num_blocks=cache.num_blocks - 1, num_host_blocks=cache.num_host_blocks)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # From the event loop

    def start(self) -> None:
        """Begin to take requests."""
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> int:
        """Queue a request; its number, for ``cancel``. ``sink`` gets its pieces and one ``Ending`` on the event loop.

        Raises ``QueueFullError`` when too many wait and ``EngineStoppedError`` after the end.
        """
        self._scheduler.check_room(request.num_choices + self._num_arriving)
        running = _Running(next(self._numbers), request, sink, time.monotonic())
        prompt_length = len(request.token_ids) - request.num_prior_output_tokens
        prompt, prior = request.token_ids[:prompt_length], request.token_ids[prompt_length:]
        end_token_ids = request.stop_token_ids if request.ignore_eos else request.stop_token_ids | self._eos_token_ids
        scheme = self._cache.scheme
        adapter = request.adapter
        extra = extra_keys(len(request.token_ids), scheme.block_size, lora=adapter, cache_salt=request.cache_salt)
        chain = scheme.chain(request.token_ids, extra)
        for index in range(request.num_choices):
            running.choices.append(
                Choice(
                    id=f"{request.id}#{running.number}.{index}",
                    chain=chain.copy() if index else chain,
                    prompt_token_ids=prompt,
                    output_token_ids=list(prior),
                    sampling=replace(request.sampling, seed=choice_seed(request.sampling.seed, index)),
                    arrival_s=running.arrival_s,
                    priority=request.priority,
                    deadline_s=request.deadline_s,
                    min_tokens=request.min_tokens,
                    end_token_ids=tuple(end_token_ids),
                    num_prompt_logprobs=request.num_prompt_logprobs if index == 0 else None,
                    lora=None if adapter is None else str(adapter),
                    synthetic=request.synthetic,
                    tenant=request.tenant,
                    retention=request.retention,
                )
            )
        running.num_open = request.num_choices
        with self._wake:
            self._num_arriving += request.num_choices
        self._post(partial(self._enter, running))
        return running.number

    def cancel(self, number: int) -> None:
        """End a request within a step; its sink hears nothing more. One that has ended already is left alone."""
        with contextlib.suppress(EngineStoppedError):
            self._post(partial(self._cancel, number))

    def reset_cache(self) -> Future[int]:
        """Forget every cached block; how many there were. The future fails with ``CacheInUseError``."""
        return self._call(self._reset)

    def add_adapter(self, adapter: str, weights: Any, max_adapters: int) -> Future[None]:
        """Serve a LoRA adapter from the next step on; twice is once.

        The future fails with ``AdapterConflictError`` where ``max_adapters`` are in memory, and as the runner says.
        """
        return self._call(partial(self._add_adapter, adapter, weights, max_adapters))

    def drop_adapter(self, adapter: str) -> Future[int]:
        """Free it once the last request that was submitted with it has ended; how many run with it now."""
        return self._call(partial(self._drop_adapter, adapter))

    def explain_cache(
        self, token_ids: array[int], adapter: Adapter | None, cache_salt: str | None
    ) -> Future[Explanation]:
        """Why the cache has what it has of a prompt."""
        scheme = self._cache.scheme
        extra = extra_keys(len(token_ids), scheme.block_size, lora=adapter, cache_salt=cache_salt)
        return self._call(partial(self._cache.explain, scheme.chain(token_ids, extra)))

    def eviction_of(self, key: int) -> Future[Eviction | None]:
        """The latest eviction of a block by its index key."""
        return self._call(partial(self._cache.eviction_of, key))

    def cache_snapshot(self) -> Future[CacheSnapshot]:
        """What the cache holds now. The events after its number come in later reports."""
        return self._call(self._cache.snapshot)

    def snapshot(self) -> EngineSnapshot:
        """The latest view of load and cache."""
        return self._snapshot

    def step_age_s(self) -> float:
        """For how long the step that runs has been running; 0 between steps."""
        return self._steps.age_s(time.monotonic())

    def hung_s(self) -> float:
        """The same where that is far too long for what the step computes, else 0."""
        return self._steps.hung_s(time.monotonic())

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after the step that runs, and wait for it. What is unfinished ends as ``STOPPED``.

        Whether it has ended: a step that hangs does not within ``timeout_s``, and nothing can be done about it.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _post(self, job: Callable[[], None]) -> None:
        with self._wake:
            if self._stopping:
                raise EngineStoppedError("the engine has stopped")
            self._inbox.append(job)
            self._wake.notify()

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has gone
            try:
                future.set_result(function())
            except Exception as error:  # the caller's to handle, not the engine's
                future.set_exception(error)

        self._post(job)
        return future

    def _deliver(self, report: StepReport) -> None:
        for sink, item in report.deliveries:
            sink(item)
        self._on_step(report)

    # On the engine's thread

    def _run(self) -> None:
        death: BaseException | None = None
        try:
            while self._do_jobs():
                now = time.monotonic()
                for choice in self._scheduler.expired(now):
                    if choice.state is not ChoiceState.ENDED:  # with another choice of its request
                        self._fail(self._answers[choice].running, Failure.DEADLINE, now)
                if self._scheduler.has_work:
                    self._step(now)
                self._flush(now)
        except BaseException as error:  # whatever it is, this thread cannot go on, and others must hear of it
            death = error
        self._end(death)

    def _do_jobs(self) -> bool:
        """Wait for something to do and do what other threads asked for; false when it is time to stop."""
        with self._wake:
            while not (self._inbox or self._stopping or self._scheduler.has_work):
                self._wake.wait()
            if self._stopping:
                return False
        while self._inbox:
            self._inbox.popleft()()
        return True

    def _end(self, death: BaseException | None) -> None:
        """Nothing is computed any more: everyone who waits hears of it.

        Whatever died may have left anything half done, so what fails here keeps nobody else from hearing.
        """
        with self._wake:
            self._stopping = True
        while self._inbox:
            try:
                self._inbox.popleft()()
            except Exception:
                logger.exception("an engine that has ended could not do what was asked of it")
        detail = f"{type(death).__name__}: {death}" if death else ""
        for running in self._running.values():
            self._report.deliveries.append((running.sink, self._ending(running, Failure.STOPPED, detail)))
            if not running.request.synthetic:
                self._report.outcomes += ["stopped"] * running.num_open
        self._running.clear()
        self._loop.call_soon_threadsafe(self._deliver, self._report)
        if death is not None:
            self._loop.call_soon_threadsafe(self._on_death, death)

    def _enter(self, running: _Running) -> None:
        self._running[running.number] = running
        request = running.request
        with self._wake:
            self._num_arriving -= request.num_choices
        for index, choice in enumerate(running.choices):
            text = Detokenizer(self._table, request.stop_strings)
            for token_id in choice.output_token_ids:
                text.push(token_id, may_stop=False)
            self._answers[choice] = _Answer(running, index, text)
            self._scheduler.add(choice)

    def _cancel(self, number: int) -> None:
        running = self._running.pop(number, None)
        if running is not None:
            self._drop(running, time.monotonic(), "cancelled")
            self._ended(running)

    def _add_adapter(self, adapter: str, weights: Any, max_adapters: int) -> None:
        if adapter not in self._adapters:
            if len(self._adapters) >= max_adapters:
                num_leaving = sum(self._adapters.values())
                raise AdapterConflictError(
                    f"lora: {len(self._adapters)} adapters are in memory, {num_leaving} of them until their last "
                    f"requests end, and --max-loras is {max_adapters}: unload one, or try again"
                )
            self._runner.add_adapter(adapter, weights)
        self._adapters[adapter] = False

    def _drop_adapter(self, adapter: str) -> int:
        self._adapters[adapter] = True
        return self._free_adapter(adapter)

    def _free_adapter(self, adapter: str) -> int:
        """Remove an adapter that is to go unless requests run with it; how many do."""
        num_running = sum(one.choices[0].lora == adapter for one in self._running.values())
        if not num_running:
            self._runner.remove_adapter(adapter)
            del self._adapters[adapter]
        return num_running

    def _ended(self, running: _Running) -> None:
        """It runs no more: what only it needed can go."""
        adapter = running.choices[0].lora
        if adapter is not None and self._adapters.get(adapter):
            self._free_adapter(adapter)

    def _reset(self) -> int:
        num_cached = self._cache.num_cached_blocks
        if not self._cache.reset():
            raise CacheInUseError(f"{self._scheduler.num_running} requests hold blocks; try again when they have ended")
        return num_cached

    def _step(self, now: float) -> None:
        step = self._scheduler.schedule(now)
        assert step.slices, "there is work, but no slice of it fits a step"
        for choice in step.admitted:
            self._note_admission(choice, now)
        self._steps.began(step.num_prefill_tokens, now)
        computing_s = now
        copies = self._cache.take_copies()
        if copies:
            self._runner.copy(copies)
            computing_s = time.monotonic()
        results = self._execute(step.slices)
        after = time.monotonic()
        self._steps.ended(after - computing_s)
        steps_s = self._report.prefill_steps_s if step.num_prefill_tokens else self._report.decode_steps_s
        steps_s.append(after - now)
        for choice, piece, result in zip(step.choices, step.slices, results, strict=True):
            if choice.state is not ChoiceState.RUNNING:  # its request failed through another choice a moment ago
                continue
            if result.error is not None:
                self._fail(self._answers[choice].running, Failure.POISONED, after, result.error)
                continue
            self._scheduler.computed(choice, piece)
            if result.prompt_logprobs:
                self._keep_prompt_logprobs(choice, piece, result)
            if result.token_id is not None:
                self._accept(choice, result.token_id, result.logprobs, after)

    def _execute(self, slices: list[SequenceSlice]) -> list[SliceResult]:
        """Run a step. A failure that no single slice can be blamed for is the engine's: it is raised."""
        try:
            results = self._runner.execute(StepBatch(slices=slices))
        except Exception as error:
            if len(slices) > 1:
                logger.warning("step of %d slices failed, running each alone: %s", len(slices), error)
                # Writing the same KV again changes nothing, so the sound ones may run twice.
                return [result for one in slices for result in self._execute([one])]
            results = [SliceResult(error=f"{type(error).__name__}: {error}")]
        if all(result.error is not None for result in results):
            (answer,) = self._runner.execute(StepBatch(slices=[PROBE]))
            if answer.error is not None:
                raise RuntimeError(f"the model fails on everything: {answer.error}")
        return results

    def _accept(self, choice: Choice, token_id: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """A choice has its next token: tell its client, and end it if the token does."""
        answer = self._answers[choice]
        request = answer.running.request
        num_output = len(choice.output_token_ids) + 1
        piece = Piece(index=answer.index, token_ids=[token_id])
        if logprobs is not None:
            piece.logprobs = [logprobs]
        if token_id in choice.end_token_ids and num_output > choice.min_tokens:
            piece.text = answer.text.finish()
            piece.finish_reason = "stop"
            piece.stop_reason = str(token_id) if token_id in request.stop_token_ids else ""
        else:
            piece.text = answer.text.push(token_id, may_stop=num_output >= choice.min_tokens)
            if answer.text.stop_string is not None:
                piece.finish_reason = "stop"
                piece.stop_reason = answer.text.stop_string
            elif num_output >= request.max_tokens:
                piece.text += answer.text.finish()
                piece.finish_reason = "length"
        if answer.last_token_s is None:
            piece.prompt_logprobs = answer.prompt_logprobs
            choice.num_prompt_logprobs = None
            if answer.index == 0 and not request.synthetic:
                self._report.ttfts_s.append(now - answer.running.arrival_s)
        elif not request.synthetic:
            self._report.token_gaps_s.append(now - answer.last_token_s)
        self._report.num_output_tokens += not request.synthetic
        answer.last_token_s = now
        self._scheduler.draw(choice, token_id)
        self._report.deliveries.append((answer.running.sink, piece))
        if piece.finish_reason:
            self._finish_choice(answer.running, choice, now, piece.finish_reason)

    def _finish_choice(self, running: _Running, choice: Choice, now: float, outcome: str) -> None:
        self._close(running, choice, now, outcome)
        running.num_open -= 1
        if not running.num_open:
            del self._running[running.number]
            self._ended(running)
            self._report.deliveries.append((running.sink, self._ending(running)))

    def _fail(self, running: _Running, failure: Failure, now: float, detail: str = "") -> None:
        """End a request and all its choices. Twice is once."""
        if self._running.pop(running.number, None) is not None:
            self._drop(running, now, failure.name.lower())
            self._ended(running)
            self._report.deliveries.append((running.sink, self._ending(running, failure, detail)))

    def _drop(self, running: _Running, now: float, outcome: str) -> None:
        for choice in running.choices:
            if choice.state is not ChoiceState.ENDED:
                self._close(running, choice, now, outcome)

    def _close(self, running: _Running, choice: Choice, now: float, outcome: str) -> None:
        if not running.request.synthetic:
            self._report.outcomes.append(outcome)
        if self._cache.enabled:
            block_size = self._cache.scheme.block_size
            first = len(running.request.token_ids) // block_size
            running.output_keys += choice.chain.keys[first : choice.num_computed // block_size]
        self._scheduler.finish(choice, now)
        del self._answers[choice]

    def _ending(self, running: _Running, failure: Failure | None = None, detail: str = "") -> Ending:
        return Ending(
            num_cached_tokens=running.choices[0].num_cached,
            num_output_tokens=sum(len(choice.output_token_ids) for choice in running.choices),
            last_event_seq=self._cache.last_seq,
            output_keys=running.output_keys,
            failure=failure,
            detail=detail,
        )

    def _keep_prompt_logprobs(self, choice: Choice, piece: SequenceSlice, result: SliceResult) -> None:
        kept = self._answers[choice].prompt_logprobs
        if piece.start == 0:  # a preempted prompt starts anew
            kept.clear()
        kept += result.prompt_logprobs

    def _note_admission(self, choice: Choice, now: float) -> None:
        answer = self._answers[choice]
        if answer.index == 0:  # the others share its prompt, which is counted once
            request = answer.running.request
            self._report.admitted.append(
                Admitted(
                    queue_s=now - answer.running.arrival_s,
                    num_prompt_tokens=len(request.token_ids),
                    num_cached_tokens=choice.num_cached or 0,
                    synthetic=request.synthetic,
                    num_host_tokens=choice.num_from_host,
                )
            )

    def _flush(self, now: float) -> None:
        """Hand over what this turn brought, and publish the load if it is time."""
        report = self._report
        report.events = self._cache.take_events()
        preemptions = self._scheduler.num_preemptions
        report.num_preemptions = preemptions - self._num_preemptions_reported
        self._num_preemptions_reported = preemptions
        if now - self._published_s >= SNAPSHOT_INTERVAL_S or not self._scheduler.has_work:
            self._publish(now)
        if report.deliveries or report.events or report.admitted or report.outcomes or report.num_preemptions:
            self._report = StepReport()
            self._loop.call_soon_threadsafe(self._deliver, report)

    def _publish(self, now: float) -> None:
        self._published_s = now
        num_begun = sum(answer.last_token_s is not None for answer in self._answers.values())
        self._snapshot = EngineSnapshot(
            waiting=len(self._answers) - num_begun,
            running=num_begun,
            waiting_tokens=self._scheduler.waiting_tokens(),
            prefill_tokens_per_s=self._steps.prefill_tokens_per_s,
            num_blocks=self._cache.num_blocks - 1,
            num_used_blocks=self._cache.num_used_blocks,
            num_cached_blocks=self._cache.num_cached_blocks,
            num_host_blocks=self._cache.num_host_blocks,
            num_host_cached_blocks=self._cache.num_host_cached_blocks,
            lru_age_s=self._cache.lru_age_s(now),
            last_event_seq=self._cache.last_seq,
            stats=replace(self._cache.stats),
        )


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice ``index``: its own stream of draws, the request's seed itself for choice 0.

    The mixing is that of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    if index == 0:
        return seed
    mask = (1 << 64) - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
