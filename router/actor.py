"""A router inside a Ray actor. Ray places and restarts it; no request passes through a Ray call.

The servers run in an event loop of their own thread and are started by the constructor, the only thing that Ray runs
again after a crash. If they end without being asked to, the process ends too, so that Ray starts a new one.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import ray
import uvloop
from ray.actor import exit_actor

from common.logs import configure_logging
from router.config import RouterConfig
from router.main import Endpoints, Router, settle_collector

_START_TIMEOUT_S = 60.0
_STOP_MARGIN_S = 10.0


class RouterActor:
    """Make it an actor by ``ray.remote(RouterActor)``.

    ``make_config`` is called here, on the router's own node, so that no secret passes through Ray. Raises what it
    raises, and ``OSError`` when a port cannot be had.
    """

    def __init__(self, make_config: Callable[[], RouterConfig]) -> None:
        config = make_config()
        configure_logging(as_json=config.log_json, level=config.log_level)
        self._config = config
        self._router: Router | None = None
        self._endpoints: Endpoints | None = None
        self._error: BaseException | None = None
        self._has_started = threading.Event()
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._thread.start()
        if not self._has_started.wait(_START_TIMEOUT_S):
            raise TimeoutError(f"router {config.router_id} did not listen within {_START_TIMEOUT_S:g} s")
        if self._error is not None:
            raise self._error

    def ping(self) -> dict[str, Any]:
        """Proof of life: where it listens and, unless it is ready, why not."""
        assert self._endpoints is not None
        assert self._router is not None
        hangs = self._router.beat.why_dead()  # Ray asks in a thread of its own, which goes on when the servers do not
        return {
            "http": self._endpoints.http,
            "grpc": self._endpoints.grpc,
            "metrics": self._endpoints.metrics,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "not_ready": self._router.fleet.why_not_ready(),
            "state": "STARTING" if hangs or self._router.fleet.is_behind else "READY",
            "error": hangs,
        }

    def drain(self) -> None:
        """Stop taking requests, let the running ones end, and end the actor for good."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(self._config.drain_notice_s + self._config.drain_deadline_s + _STOP_MARGIN_S)
        exit_actor()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error
            if self._has_started.is_set():
                os._exit(1)
        finally:
            self._has_started.set()

    async def _serve(self) -> None:
        self._router = Router(self._config)
        self._endpoints = await self._router.start()
        settle_collector()
        self._has_started.set()
        await self._stop.wait()
        await self._router.drain()
