"""A worker inside a Ray actor. Ray places and restarts it; no request passes through a Ray call.

The worker runs in an event loop of its own thread and is started by the constructor, the only thing that Ray runs again
after a crash. If it ends without being asked to, the process ends too, so that Ray starts a new one.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import exit_actor

from common.logs import configure_logging
from worker.config import WorkerConfig
from worker.main import EXIT_FAILED, EXIT_OK, Worker

_START_TIMEOUT_S = 60.0
_METRICS_PORTS = 64  # more than a node has workers
_STOP_MARGIN_S = 10.0
_LAST_WORDS_S = 4.0  # a worker that could not become READY tells the controller why before it ends
_FENCED_S = 30.0  # for the controller to hear of it


class WorkerActor:
    """Make it an actor by ``ray.remote(WorkerActor)``. The model loads after the constructor: ``state`` tells.

    ``make_config`` is called here, on the worker's own node, so that no secret passes through Ray. Raises what it
    raises, and ``RuntimeError`` when the worker cannot listen or Redis does not answer.
    """

    def __init__(self, make_config: Callable[[], WorkerConfig]) -> None:
        config = make_config()
        configure_logging(as_json=config.log_json, level=config.log_level)
        self._config = config
        self._worker: Worker | None = None
        self._error = ""
        self._exit_code = EXIT_OK
        self._was_ready = False
        self._has_started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()
        if not self._has_started.wait(_START_TIMEOUT_S):
            raise RuntimeError(f"worker {config.replica_id} did not listen within {_START_TIMEOUT_S:g} s")
        if self._error:
            raise RuntimeError(self._error)

    async def ping(self) -> dict[str, Any]:
        """Proof of life: where it listens, its state and its fault, if any. One that was fenced ends for good."""
        if self._running.is_fenced and self._exit_code:
            exit_actor()
        replica = self._running.replica
        return {
            "address": replica.address,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "state": replica.state_name,
            "generation": replica.generation,
            "fault": replica.fault,
            "exit_code": self._exit_code,
            "has_tls": self._config.tls_files is not None,
            "error": self._running.beat.why_dead(),
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
                self._exit_code = code
                if self._running.is_fenced:
                    time.sleep(_FENCED_S)
                elif not self._was_ready:
                    time.sleep(_LAST_WORDS_S)
                os._exit(code)

    def _note_ready(self) -> None:
        self._was_ready = True

    async def _serve(self) -> int:
        self._worker = Worker(self._config, num_metrics_ports=_METRICS_PORTS)
        running = asyncio.create_task(self._worker.run(lambda address: self._note_ready()))
        listening = asyncio.create_task(self._worker.listens.wait())
        await asyncio.wait([running, listening], return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if running.done():
            self._error = self._worker.replica.fault
            return running.result()
        self._has_started.set()
        return await running
