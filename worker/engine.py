"""The engine: one thread that owns scheduler, prefix cache and model, and turns requests into tokens.

Other threads hand it requests, cancels and commands (``submit``, ``cancel``, ``reset_cache``). After each step it hands
one ``StepReport`` to the event loop: every new piece of every answer, and the cache events of the step. It blocks while
there is nothing to do. What it does in a turn is in ``worker.engine_core``.

When that raises, the engine is dead: it says so once (``on_death``) and its process should end, since nothing here
would work again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from cache.adapter import Adapter
from cache.block_hash import extra_keys
from cache.events import Snapshot as CacheSnapshot
from cache.history import Eviction
from cache.prefix_cache import Explanation, PrefixCache
from worker.detokenizer import TokenTable
from worker.engine_core import EngineCore, Runner, Running, make_running
from worker.request import EngineSnapshot, Request, Sink, StepReport
from worker.scheduler import Limits
from worker.step_times import HUNG_AFTER_S

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineStoppedError(Exception):
    """The engine has ended and takes nothing more. Another replica may answer."""


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
        self._core = EngineCore(runner=runner, cache=cache, limits=limits, table=table, hung_after_s=hung_after_s)
        self._cache = cache
        self._eos_token_ids = eos_token_ids
        self._on_step = on_step
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._num_arriving = 0  # choices in the inbox, which the core does not count yet; under the lock
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # From the event loop

    def start(self) -> None:
        """Begin to take requests."""
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> int:
        """Queue a request; its number, for ``cancel``. ``sink`` gets its pieces and one ``Ending`` on the event loop.

        Raises ``QueueFullError`` when too many wait and ``EngineStoppedError`` after the end.
        """
        self._core.check_room(request.num_choices + self._num_arriving)
        number = next(self._numbers)
        running = make_running(number, request, sink, self._cache.scheme, self._eos_token_ids, time.monotonic())
        with self._wake:
            self._num_arriving += request.num_choices
        self._post(partial(self._enter, running))
        return number

    def cancel(self, number: int) -> None:
        """End a request within a step; its sink hears nothing more. One that has ended already is left alone."""
        with contextlib.suppress(EngineStoppedError):
            self._post(lambda: self._core.cancel(number, time.monotonic()))

    def reset_cache(self) -> Future[int]:
        """Forget every cached block; how many there were. The future fails with ``CacheInUseError``."""
        return self._call(self._core.reset)

    def add_adapter(self, adapter: str, weights: Any, max_adapters: int) -> Future[None]:
        """Serve a LoRA adapter from the next step on; twice is once.

        The future fails with ``AdapterConflictError`` where ``max_adapters`` are in memory, and as the runner says.
        """
        return self._call(partial(self._core.add_adapter, adapter, weights, max_adapters))

    def drop_adapter(self, adapter: str) -> Future[int]:
        """Free it once the last request that was submitted with it has ended; how many run with it now."""
        return self._call(partial(self._core.drop_adapter, adapter))

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
        return self._core.snapshot

    def step_age_s(self) -> float:
        """For how long the step that runs has been running; 0 between steps."""
        return self._core.steps.age_s(time.monotonic())

    def hung_s(self) -> float:
        """The same where that is far too long for what the step computes, else 0."""
        return self._core.steps.hung_s(time.monotonic())

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
                self._core.expire(now)
                if self._core.has_work:
                    self._core.step(now)
                report = self._core.take_report(now)
                if report is not None:
                    self._loop.call_soon_threadsafe(self._deliver, report)
        except BaseException as error:  # whatever it is, this thread cannot go on, and others must hear of it
            death = error
        self._end(death)

    def _do_jobs(self) -> bool:
        """Wait for something to do and do what other threads asked for; false when it is time to stop."""
        with self._wake:
            while not (self._inbox or self._stopping or self._core.has_work):
                self._wake.wait()
            if self._stopping:
                return False
        while self._inbox:
            self._inbox.popleft()()
        return True

    def _enter(self, running: Running) -> None:
        with self._wake:
            self._num_arriving -= len(running.choices)
        self._core.enter(running)

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
        report = self._core.stop(f"{type(death).__name__}: {death}" if death else "")
        self._loop.call_soon_threadsafe(self._deliver, report)
        if death is not None:
            self._loop.call_soon_threadsafe(self._on_death, death)
