"""A worker inside a Ray actor. Ray places and restarts it; no request passes through a Ray call.

The worker runs in an event loop of its own thread and is started by the constructor, the only thing that Ray runs again
after a crash. If it ends without being asked to, the process ends too, so that Ray starts a new one.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from ray.actor import exit_actor

from common.logs import configure_logging
from worker.config import WorkerConfig
from worker.main import EXIT_FAILED, EXIT_OK, Worker

_START_TIMEOUT_S = 60.0
_STOP_MARGIN_S = 10.0


class WorkerActor:
    """Make it an actor by ``ray.remote(WorkerActor)``. The model loads after the constructor: ``state`` tells.

    Raises ``RuntimeError`` when it cannot listen or Redis does not answer.
    """

    def __init__(self, config: WorkerConfig) -> None:
        configure_logging(as_json=config.log_json, level=config.log_level)
        self._config = config
        self._worker: Worker | None = None
        self._error = ""
        self._has_started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()
        if not self._has_started.wait(_START_TIMEOUT_S):
            raise RuntimeError(f"worker {config.replica_id} did not listen within {_START_TIMEOUT_S:g} s")
        if self._error:
            raise RuntimeError(self._error)

    async def address(self) -> str:
        """host:port of the Worker service."""
        return self._running.replica.address

    async def state(self) -> str:
        """STARTING, WARMING, READY, DRAINING or GONE."""
        return self._running.replica.state_name

    async def ping(self) -> dict[str, Any]:
        """Proof of life: where it listens, its state and its fault, if any."""
        replica = self._running.replica
        return {
            "address": replica.address,
            "pid": os.getpid(),
            "state": replica.state_name,
            "generation": replica.generation,
            "fault": replica.fault,
        }

    async def drain(self, deadline_s: float | None = None) -> None:
        """Take no more requests, let the running ones end, and end the actor for good."""
        self._loop.call_soon_threadsafe(self._running.drain, deadline_s)
        wait_s = (self._config.drain_deadline_s if deadline_s is None else deadline_s) + _STOP_MARGIN_S
        await asyncio.to_thread(self._thread.join, wait_s)
        exit_actor()

    @property
    def _running(self) -> Worker:
        assert self._worker is not None
        return self._worker

    def _run(self) -> None:
        code = EXIT_FAILED
        try:
            code = self._loop.run_until_complete(self._serve())
        finally:
            if not self._has_started.is_set():
                self._error = self._error or "the worker failed while it was made; its log says why"
                self._has_started.set()
            elif code != EXIT_OK:
                os._exit(code)

    async def _serve(self) -> int:
        self._worker = Worker(self._config)
        running = asyncio.create_task(self._worker.run())
        listening = asyncio.create_task(self._worker.listens.wait())
        await asyncio.wait([running, listening], return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if running.done():
            self._error = self._worker.replica.fault
            return running.result()
        self._has_started.set()
        return await running
