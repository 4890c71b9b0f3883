"""The engine's core: all that it knows and does, one turn at a time, without threads of its own.

Requests become choices for the scheduler; each ``step`` computes what the scheduler chose and tells every choice what
it got. What others must hear gathers in one ``StepReport``. One thread owns all of it: see ``worker.engine``.

A slice that fails ends its request and no other. When not even a probe of the model succeeds, ``step`` raises: nothing
here would work again.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from cache.block_hash import HashScheme, extra_keys
from cache.prefix_cache import BlockCopies, PrefixCache
from worker.adapters import AdapterConflictError
from worker.batch import PROBE, SequenceSlice, SliceResult, StepBatch, TokenLogprobs
from worker.detokenizer import Detokenizer, TokenTable
from worker.request import Admitted, Ending, EngineSnapshot, Failure, Piece, Request, Sink, StepReport
from worker.scheduler import Choice, ChoiceState, Limits, Scheduler
from worker.splitmix import MASK, STEP, mix
from worker.step_times import StepTimes

logger = logging.getLogger(__name__)

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


@dataclass(slots=True, eq=False)
class Running:
    """A request in the engine."""

    number: int
    request: Request
    sink: Sink
    arrival_s: float
    choices: list[Choice]
    num_open: int
    output_keys: array[int] = field(default_factory=lambda: array("Q"))


@dataclass(slots=True, eq=False)
class _Answer:
    """What the engine keeps of a choice, beside what the scheduler does."""

    running: Running
    index: int
    text: Detokenizer
    last_token_s: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class EngineCore:
    """See the module. ``now`` is ``time.monotonic()`` everywhere."""

    def __init__(
        self, *, runner: Runner, cache: PrefixCache, limits: Limits, table: TokenTable, hung_after_s: float
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._scheduler = Scheduler(cache, limits)
        self._table = table
        self._running: dict[int, Running] = {}
        self._answers: dict[Choice, _Answer] = {}
        self._adapters: dict[str, bool] = {}  # in memory: whether one only stays until its last request has ended
        self._report = StepReport()
        self._num_preemptions_reported = 0
        self._published_s = -math.inf
        self.steps = StepTimes(hung_after_s)
        self.snapshot = EngineSnapshot(num_blocks=cache.num_blocks - 1, num_host_blocks=cache.num_host_blocks)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something."""
        return self._scheduler.has_work

    def check_room(self, num_more: int) -> None:
        """Raises ``QueueFullError`` when ``num_more`` choices cannot wait here."""
        self._scheduler.check_room(num_more)

    # Between steps

    def enter(self, running: Running) -> None:
        """A request joins the queue."""
        self._running[running.number] = running
        for index, choice in enumerate(running.choices):
            text = Detokenizer(self._table, running.request.stop_strings)
            for token_id in choice.output_token_ids:
                text.push(token_id, may_stop=False)
            self._answers[choice] = _Answer(running, index, text)
            self._scheduler.add(choice, self.steps.prefill_tokens_per_s)

    def cancel(self, number: int, now: float) -> None:
        """End a request of which nobody wants to hear more. One that has ended already is left alone."""
        running = self._running.pop(number, None)
        if running is not None:
            self._drop(running, now, "cancelled")
            self._ended(running)

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed."""
        for choice in self._scheduler.expired(now):
            if choice.state is not ChoiceState.ENDED:  # with another choice of its request
                self._fail(self._answers[choice].running, Failure.DEADLINE, now)

    def stop(self, detail: str) -> StepReport:
        """Everyone who waits hears that nothing comes any more; the last report. Whatever state a death has left."""
        for running in self._running.values():
            self._report.deliveries.append((running.sink, self._ending(running, Failure.STOPPED, detail)))
            if not running.request.synthetic:
                self._report.outcomes += ["stopped"] * running.num_open
        self._running.clear()
        return self._report

    def reset(self) -> int:
        """Forget every cached block; how many there were. Raises ``CacheInUseError``."""
        num_cached = self._cache.num_cached_blocks
        if not self._cache.reset():
            raise CacheInUseError(f"{self._scheduler.num_running} requests hold blocks; try again when they have ended")
        return num_cached

    def add_adapter(self, adapter: str, weights: Any, max_adapters: int) -> None:
        """Requests may name it from now on; twice is once. Raises ``AdapterConflictError``."""
        if adapter not in self._adapters:
            if len(self._adapters) >= max_adapters:
                num_leaving = sum(self._adapters.values())
                raise AdapterConflictError(
                    f"lora: {len(self._adapters)} adapters are in memory, {num_leaving} of them until their last "
                    f"requests end, and --max-loras is {max_adapters}: unload one, or try again"
                )
            self._runner.add_adapter(adapter, weights)
        self._adapters[adapter] = False

    def drop_adapter(self, adapter: str) -> int:
        """Free it once the last request that names it has ended; how many run with it now."""
        self._adapters[adapter] = True
        return self._free_adapter(adapter)

    def _free_adapter(self, adapter: str) -> int:
        """Remove an adapter that is to go unless requests run with it; how many do."""
        num_running = sum(one.choices[0].lora == adapter for one in self._running.values())
        if not num_running:
            self._runner.remove_adapter(adapter)
            del self._adapters[adapter]
        return num_running

    # A step

    def step(self, now: float) -> None:
        """Compute the next step. There is work. Raises what no single request can be blamed for."""
        step = self._scheduler.schedule(now)
        assert step.slices, "there is work, but no slice of it fits a step"
        for choice in step.admitted:
            self._note_admission(choice, now)
        self.steps.began(step.num_prefill_tokens, now)
        computing_s = now
        copies = self._cache.take_copies()
        if copies:
            self._runner.copy(copies)
            computing_s = time.monotonic()
        results = self._execute(step.slices)
        after = time.monotonic()
        self.steps.ended(after - computing_s)
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

    # Endings

    def _finish_choice(self, running: Running, choice: Choice, now: float, outcome: str) -> None:
        self._close(running, choice, now, outcome)
        running.num_open -= 1
        if not running.num_open:
            del self._running[running.number]
            self._ended(running)
            self._report.deliveries.append((running.sink, self._ending(running)))

    def _fail(self, running: Running, failure: Failure, now: float, detail: str = "") -> None:
        """End a request and all its choices. Twice is once."""
        if self._running.pop(running.number, None) is not None:
            self._drop(running, now, failure.name.lower())
            self._ended(running)
            self._report.deliveries.append((running.sink, self._ending(running, failure, detail)))

    def _drop(self, running: Running, now: float, outcome: str) -> None:
        for choice in running.choices:
            if choice.state is not ChoiceState.ENDED:
                self._close(running, choice, now, outcome)

    def _close(self, running: Running, choice: Choice, now: float, outcome: str) -> None:
        if not running.request.synthetic:
            self._report.outcomes.append(outcome)
        if self._cache.enabled:
            block_size = self._cache.scheme.block_size
            first = len(running.request.token_ids) // block_size
            running.output_keys += choice.chain.keys[first : choice.num_computed // block_size]
        self._scheduler.finish(choice, now)
        del self._answers[choice]

    def _ended(self, running: Running) -> None:
        """It runs no more: what only it needed can go."""
        adapter = running.choices[0].lora
        if adapter is not None and self._adapters.get(adapter):
            self._free_adapter(adapter)

    def _ending(self, running: Running, failure: Failure | None = None, detail: str = "") -> Ending:
        return Ending(
            num_cached_tokens=running.choices[0].num_cached,
            num_output_tokens=sum(len(choice.output_token_ids) for choice in running.choices),
            last_event_seq=self._cache.last_seq,
            output_keys=running.output_keys,
            failure=failure,
            detail=detail,
        )

    # What others hear

    def take_report(self, now: float) -> StepReport | None:
        """What happened since the last one, if anything did; publishes the load if it is time."""
        report = self._report
        report.events = self._cache.take_events()
        preemptions = self._scheduler.num_preemptions
        report.num_preemptions = preemptions - self._num_preemptions_reported
        self._num_preemptions_reported = preemptions
        if now - self._published_s >= SNAPSHOT_INTERVAL_S or not self._scheduler.has_work:
            self._publish(now)
        elif report.events:  # the next step may hang: what tells of the events must not tell of less until then
            self.snapshot = replace(
                self.snapshot,
                num_cached_blocks=self._cache.num_cached_blocks,
                num_host_cached_blocks=self._cache.num_host_cached_blocks,
                last_event_seq=self._cache.last_seq,
            )
        if not (report.deliveries or report.events or report.admitted or report.outcomes or report.num_preemptions):
            return None
        self._report = StepReport()
        return report

    def _publish(self, now: float) -> None:
        self._published_s = now
        num_begun = sum(answer.last_token_s is not None for answer in self._answers.values())
        self.snapshot = EngineSnapshot(
            waiting=len(self._answers) - num_begun,
            running=num_begun,
            waiting_tokens=self._scheduler.waiting_tokens(),
            prefill_tokens_per_s=self.steps.prefill_tokens_per_s,
            num_blocks=self._cache.num_blocks - 1,
            num_used_blocks=self._cache.num_used_blocks,
            num_cached_blocks=self._cache.num_cached_blocks,
            num_host_blocks=self._cache.num_host_blocks,
            num_host_cached_blocks=self._cache.num_host_cached_blocks,
            lru_age_s=self._cache.lru_age_s(now),
            last_event_seq=self._cache.last_seq,
            stats=replace(self._cache.stats),
        )


def make_running(
    number: int, request: Request, sink: Sink, scheme: HashScheme, eos_token_ids: frozenset[int], now: float
) -> Running:
    """A request with its choices, ready to ``enter``. Hashes its prompt, once for all of them."""
    prompt_length = len(request.token_ids) - request.num_prior_output_tokens
    prompt, prior = request.token_ids[:prompt_length], request.token_ids[prompt_length:]
    end_token_ids = request.stop_token_ids if request.ignore_eos else request.stop_token_ids | eos_token_ids
    adapter = request.adapter
    extra = extra_keys(len(request.token_ids), scheme.block_size, lora=adapter, cache_salt=request.cache_salt)
    chain = scheme.chain(request.token_ids, extra)
    choices = [
        Choice(
            id=f"{request.id}#{number}.{index}",
            chain=chain.copy() if index else chain,
            prompt_token_ids=prompt,
            output_token_ids=list(prior),
            sampling=replace(request.sampling, seed=choice_seed(request.sampling.seed, index)),
            arrival_s=now,
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
        for index in range(request.num_choices)
    ]
    return Running(number, request, sink, now, choices, num_open=request.num_choices)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice ``index``: its own stream of draws, the request's seed itself for choice 0."""
    return mix((seed + index * STEP) & MASK) if index else seed
