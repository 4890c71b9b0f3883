"""Keeps the wanted workers running: launches them, watches them, replaces those that hang.

Ray restarts an actor whose process dies, but never notices one that hangs. So each worker is asked twice, every few
seconds and with a deadline: the actor by ``ping``, its server by the standard gRPC health call. Three strikes in a row
and its process is killed; Ray starts it again, under a new generation. The controller is not on the request path, and
one that is restarted adopts what runs.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from router.worker_client import is_serving

log = logging.getLogger(__name__)

MAX_STRIKES = 3
_CONNECT_TIMEOUT_S = 1.0
_DEAD = "DEAD"
_RESTARTING = "RESTARTING"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker that should run. ``launch_worker`` knows what the settings mean."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict, repr=False)


# Starts a worker actor, or finds the one that runs under this name. Its ``ping`` answers {"address": host:port, ...}.
LaunchWorker = Callable[[WorkerSpec], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTiming:
    """How closely workers are watched."""

    period_s: float = 2.0
    deadline_s: float = 3.0  # for an answer
    start_timeout_s: float = 600.0  # until the first good answer of a boot


@dataclass(slots=True)
class WorkerHealth:
    """One worker's record. Plain data: the clock is passed in."""

    started_s: float
    boot: int = 0  # its process; 0: not known yet
    has_served: bool = False
    strikes: int = 0
    restarts: int = 0
    last_error: str = ""

    def begin_boot(self, now: float, boot: int = 0) -> None:
        """It starts anew, in process ``boot`` once that is known: until it serves it may take its time again."""
        self.started_s, self.boot = now, boot
        self.has_served = False
        self.strikes = 0

    def observe(self, error: str, now: float, start_timeout_s: float) -> bool:
        """Take one look's outcome ("" is well); whether the worker must be killed."""
        self.last_error = error
        if not error:
            self.has_served = True
            self.strikes = 0
            return False
        if not self.has_served and now - self.started_s < start_timeout_s:
            return False  # it loads its model
        self.strikes += 1
        if self.strikes < MAX_STRIKES:
            return False
        self.restarts += 1
        self.begin_boot(now)
        return True


@dataclass(slots=True)
class _Worker:
    spec: WorkerSpec
    handle: Any
    health: WorkerHealth
    address: str = ""  # of its server, when it last answered


class Controller:
    """Make it an actor by ``start_controller``."""

    def __init__(
        self,
        launch_worker: LaunchWorker,
        specs: Iterable[WorkerSpec],
        timing: WatchTiming | None = None,
    ) -> None:
        self._launch_worker = launch_worker
        self._timing = timing or WatchTiming()
        self._workers: dict[str, _Worker] = {}
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        self.set_workers(specs)
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def set_workers(self, specs: Iterable[WorkerSpec]) -> None:
        """Make these the workers that run: launch what is missing, drain and end what is too much."""
        wanted = {spec.name: spec for spec in specs}
        with self._lock:
            missing = [spec for name, spec in wanted.items() if name not in self._workers]
            surplus = [self._workers.pop(name) for name in list(self._workers) if name not in wanted]
            for spec in missing:
                health = WorkerHealth(time.monotonic())
                self._workers[spec.name] = _Worker(spec, self._launch_worker(spec), health)
        for worker in surplus:
            _end(worker)

    def report(self) -> list[dict[str, Any]]:
        """What is known of each worker."""
        with self._lock:
            return [
                {
                    "name": worker.spec.name,
                    "is_serving": worker.health.has_served and not worker.health.last_error,
                    "strikes": worker.health.strikes,
                    "restarts": worker.health.restarts,
                    "last_error": worker.health.last_error,
                }
                for worker in self._workers.values()
            ]

    def ping(self) -> bool:
        """Proof of life: whether the watch goes on."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop watching; the workers go on."""
        self._is_stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_stopped.wait(self._timing.period_s):
            try:
                self._look()
            except Exception:
                log.exception("looking at the workers failed")

    def _look(self) -> None:
        with self._lock:
            workers = list(self._workers.values())
        pings = {worker.spec.name: worker.handle.ping.remote() for worker in workers}
        if pings:
            ray.wait(list(pings.values()), num_returns=len(pings), timeout=self._timing.deadline_s)
        for worker in workers:
            answer, error = self._answer_of(worker, pings[worker.spec.name])
            if answer.get("state") == "GONE" and not answer.get("fault"):  # with one it failed, and ends in a moment
                self._let_go(worker)
                continue
            health, now, boot = worker.health, time.monotonic(), answer.get("pid", 0)
            if boot not in (0, health.boot) or (health.has_served and answer.get("state") == _RESTARTING):
                health.begin_boot(now, boot)
            if health.observe(error, now, self._timing.start_timeout_s):
                log.error("worker is replaced worker=%s error=%r", worker.spec.name, error)
                if answer.get("state") == _DEAD:  # Ray makes no new one when the first could not even be made
                    worker.handle = self._launch_worker(worker.spec)
                else:
                    ray.kill(worker.handle, no_restart=False)

    def _let_go(self, worker: _Worker) -> None:
        """A worker that was drained wants to stay away: it is not started again."""
        log.info("worker was drained worker=%s", worker.spec.name)
        with self._lock:
            self._workers.pop(worker.spec.name, None)
        ray.kill(worker.handle, no_restart=True)

    def _answer_of(self, worker: _Worker, ping: Any) -> tuple[dict[str, Any], str]:
        """A worker's answer to a ping, and what is wrong by that and its server's health; empty when nothing is."""
        try:
            answer: dict[str, Any] = ray.get(ping, timeout=0)
        except ray.exceptions.GetTimeoutError:
            if _refuses(worker.address):  # Ray keeps calls back while it starts an actor again
                return {"state": _RESTARTING}, "its process is gone, Ray starts it again"
            return {}, f"no answer to ping within {self._timing.deadline_s:g} s"
        except ray.exceptions.ActorDiedError as error:
            ended_itself = "INTENDED_USER_EXIT" in str(error)  # Ray's word for exit_actor
            return {"state": "GONE" if ended_itself else _DEAD}, f"its actor died: {error}"
        except ray.exceptions.ActorUnavailableError:
            return {"state": _RESTARTING}, "its process is gone, Ray starts it again"
        except ray.exceptions.RayError as error:
            return {}, f"ping failed: {type(error).__name__}"
        worker.address = address = answer.get("address", "")
        if not address:
            return answer, "its server does not listen yet"
        is_well = is_serving(address, self._timing.deadline_s)
        return answer, "" if is_well else f"its server at {address} is not healthy"


def _refuses(address: str) -> bool:
    """Whether nobody listens there any more; a process that hangs or is stopped still does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    return False


def _end(worker: _Worker) -> None:
    """Drain a worker that is no longer wanted; its actor ends when the drain has."""
    try:
        ray.get(worker.handle.drain.remote())
    except ray.exceptions.RayError as error:
        log.warning("drain failed worker=%s error=%s", worker.spec.name, type(error).__name__)
    ray.kill(worker.handle, no_restart=True)


def start_controller(
    launch_worker: LaunchWorker,
    specs: Iterable[WorkerSpec],
    *,
    name: str,
    timing: WatchTiming | None = None,
    **options: Any,
) -> Any:
    """The handle of the controller actor of that name; one that runs already is adopted."""
    kept = {
        "name": name,
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 4,
        "num_cpus": 0,
    }
    return ray.remote(Controller).options(**{**kept, **options}).remote(launch_worker, list(specs), timing)
