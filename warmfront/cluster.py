"""A cluster's parts as actors of a local Ray cluster that is theirs alone.

Ray starts, restarts and ends the actors; no request passes through it. Its session folder lies in the run directory and
goes with it. All calls to Ray are made from one thread that lives as long as the cluster does: Ray's processes are
killed by the kernel when the thread that started them ends, so nothing outlives a killed `up` for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from router.config import RouterConfig
from warmfront.errors import Failure, WrongUse
from warmfront.options import BY_PARAM, fill
from warmfront.processes import last_line, tail
from warmfront.run_dir import RunDir, start_ticks, write_private
from worker.config import WorkerConfig

if TYPE_CHECKING:
    from router.controller import WorkerSpec

NAMESPACE = "warmfront"
_T = TypeVar("_T")
_LONGEST_SOCKET_PATH = 107  # sun_path of sockaddr_un, less its end
_SESSION_SOCKET = "session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
_OBJECT_STORE_BYTES = 100 << 20  # nothing of ours goes through it
_PING_DEADLINE_S = 3.0


def launch_worker(spec: WorkerSpec) -> Any:
    """The controller's way to a worker: starts its actor, or finds the one that runs under this name."""
    import ray

    from worker.actor import WorkerActor

    options = {
        "name": spec.name,
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_task_retries": 0,
        "num_cpus": 0,
        "num_gpus": spec.settings["num_gpus"],
    }
    return ray.remote(WorkerActor).options(**options).remote(spec.settings["config"])


class RayActors:
    """Starts, watches and ends the parts on Ray."""

    def __init__(self, run_dir: RunDir, log_dir: Path, env: dict[str, str]) -> None:
        self._run_dir, self._log_dir, self._env = run_dir, log_dir, env
        self._home = run_dir.path / "ray"
        if len(f"{self._home}/{_SESSION_SOCKET}") > _LONGEST_SOCKET_PATH:
            raise WrongUse(f"{self._home} is too long a path for Ray's sockets: set TMPDIR to a shorter one")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._hurried = threading.Event()
        self._names: dict[str, list[str]] = {"router": [], "worker": []}
        self._pids: dict[str, int] = {}
        self._first_pids: dict[str, int] = {}
        self._copied: dict[tuple[str, Path], int] = {}  # bytes of each of Ray's files that stand in an actor's log
        self._is_watching = False
        self._refresher: asyncio.Task[None] | None = None

    async def start(self, routers: dict[str, dict[str, Any]], workers: dict[str, dict[str, Any]]) -> None:
        """Starts Ray and every part; the flags of each by its name."""
        router_configs = {name: fill(RouterConfig, _values(flags)) for name, flags in routers.items()}
        worker_configs = {name: fill(WorkerConfig, _values(flags)) for name, flags in workers.items()}
        await self._call(lambda: self._start(router_configs, worker_configs))
        self._refresher = asyncio.create_task(self._keep_looking(), name="look at the actors")

    def pids(self) -> dict[str, list[int]]:
        """The living processes by role, as of a moment ago."""
        return {role: [self._pids[name] for name in names if name in self._pids] for role, names in self._names.items()}

    def check_started(self) -> None:
        """Raises ``Failure`` when a worker was replaced: before all are ready none may end."""
        if self._refresher is not None and self._refresher.done():
            self._refresher.result()

    async def watch(self) -> None:
        """From now on what dies is none of ours: Ray starts it again, the controller ends what hangs."""
        while not self._is_watching:  # once all are known
            await self._call(self._look)
            self._is_watching = len(self._pids) == sum(map(len, self._names.values()))

    async def stop(self, role: str, deadline_s: float, hurry: asyncio.Event) -> None:
        """Lets the actors of one role drain until the deadline, or until ``hurry`` is set."""
        hurried = asyncio.create_task(hurry.wait())
        drained = asyncio.ensure_future(self._call(lambda: self._drain(role, deadline_s)))
        await asyncio.wait([hurried, drained], return_when=asyncio.FIRST_COMPLETED)
        if hurry.is_set():
            self._hurried.set()
        hurried.cancel()
        await drained

    async def close(self) -> None:
        """Ends Ray; the last lines of the logs are copied out of its session folder."""
        if self._refresher is not None:
            self._refresher.cancel()
        await self._call(self._shut_down)
        self._thread.shutdown()

    # In Ray's thread from here on

    def _start(self, routers: dict[str, RouterConfig], workers: dict[str, WorkerConfig]) -> None:
        self._home.mkdir(mode=0o700)
        token = self._run_dir.path / "ray-token"
        write_private(token, secrets.token_hex(32))
        os.environ.update(
            self._env,
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(token),
            RAY_USAGE_STATS_ENABLED="0",
            RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
            RAY_worker_niceness="0",  # actors would run at nice 15
            RAY_memory_monitor_refresh_ms="0",  # it kills replicas of a full machine without a word; the OS decides
            RAY_DISABLE_FAILURE_SIGNAL_HANDLER="1",  # it prints a stack and dies at SIGTERM, which is ours to handle
        )
        import ray  # not earlier: it reads those when it is imported

        from router.actor import start_router_actor
        from router.controller import WorkerSpec, start_controller

        logging.getLogger("ray").setLevel(logging.ERROR)
        sys.stdout = (self._log_dir / "ray.log").open("a", encoding="utf-8")  # Ray tells of each dead process there
        try:
            with contextlib.chdir(self._home):  # Ray's processes would import from the folder where `up` was typed
                ray.init(
                    address="local",  # never the cluster that some file in /tmp names
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    configure_logging=False,
                    namespace=NAMESPACE,
                    _temp_dir=str(self._home),
                )
        except (RuntimeError, OSError, ValueError) as error:
            raise Failure(f"Ray does not start: {str(error).splitlines()[0]}") from error
        on_gpus = next(iter(workers.values())).engine == "model" and ray.cluster_resources().get("GPU", 0)
        num_gpus = 1 if on_gpus and not any(config.device == "cpu" for config in workers.values()) else 0
        actors = {name: start_router_actor(config, name=name) for name, config in routers.items()}
        specs = [
            WorkerSpec(name=name, settings={"config": config, "num_gpus": num_gpus}) for name, config in workers.items()
        ]
        self._controller = start_controller(launch_worker, specs, name="controller")
        self._names = {"router": list(routers), "worker": list(workers)}
        for name, actor in actors.items():
            try:
                ray.get(actor.ping.remote())
            except ray.exceptions.RayError as error:
                raise Failure(f"{name} does not start: {_cause(error)}") from error

    def _look(self) -> None:
        import ray

        actors: dict[str, Any] = {}
        for name in self._names["router"] + self._names["worker"]:
            with contextlib.suppress(ValueError):
                actors[name] = ray.get_actor(name, namespace=NAMESPACE)
        pings = {name: actor.ping.remote() for name, actor in actors.items()}
        if pings:
            ray.wait(list(pings.values()), num_returns=len(pings), timeout=_PING_DEADLINE_S)
        before, self._pids = self._pids, {}
        for name, ping in pings.items():
            try:
                self._pids[name] = ray.get(ping, timeout=0)["pid"]
            except ray.exceptions.ActorDiedError as error:
                if not self._is_watching:
                    self._check_logs()  # the reason it gave itself is the better one
                    raise WrongUse(f"{name} does not start: {_cause(error)}") from error
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                if start_ticks(before.get(name, 0)) is not None:  # slow to answer, but there
                    self._pids[name] = before[name]
        self._copy_logs()
        if not self._is_watching:
            self._check_logs()

    def _check_logs(self) -> None:
        """Raises when a part has ended: Ray starts it again, but what ends at its first start ends for a reason."""
        for log in self._home.glob("session_latest/logs/worker-*.err"):
            if ended := re.search(r"replica=(\S+) exit_code=(\d+): (.+)", tail(log)):
                error = WrongUse if ended[2] == "2" else Failure
                raise error(f"{ended[1]} ended with code {ended[2]} while starting: {ended[3]}")
        for name, pid in self._pids.items():
            if self._first_pids.setdefault(name, pid) != pid:
                raise Failure(f"{name} ended while starting: {last_line(self._log_dir / f'{name}.log')}")

    def _drain(self, role: str, deadline_s: float) -> None:
        if not self._names[role]:
            return  # nothing was started
        import ray

        if role == "worker":
            self._get([self._controller.stop.remote()], _PING_DEADLINE_S)
        drains: list[Any] = []
        for name in self._names[role]:
            with contextlib.suppress(ValueError):
                drains.append(ray.get_actor(name, namespace=NAMESPACE).drain.remote())
        self._get(drains, deadline_s)

    def _get(self, results: list[Any], deadline_s: float) -> None:
        """Waits for calls to end, well or not, until a deadline or the user's hurry."""
        import ray

        end = time.monotonic() + deadline_s
        while results and time.monotonic() < end and not self._hurried.is_set():
            _, results = ray.wait(results, num_returns=len(results), timeout=0.2)

    def _shut_down(self) -> None:
        if not self._home.exists():
            return  # nothing was started
        import ray

        with contextlib.suppress(Exception):  # it may have died by itself
            ray.shutdown()
        sys.stdout = sys.__stdout__
        self._copy_logs()

    def _copy_logs(self) -> None:
        """Appends what actors have logged to the file of their name.

        Ray has a file per process, under names that do not tell which actor it is, in a folder that goes with Ray.
        """
        for name, pid in self._pids.items():
            for log in self._home.glob(f"session_latest/logs/worker-*-{pid}.err"):
                self._copied.setdefault((name, log), 0)
        for (name, log), num_bytes in self._copied.items():
            with contextlib.suppress(OSError), log.open("rb") as source:
                source.seek(num_bytes)
                with (self._log_dir / f"{name}.log").open("ab") as target:
                    shutil.copyfileobj(source, target)
                self._copied[name, log] = source.tell()

    async def _keep_looking(self) -> None:
        while True:
            await self._call(self._look)
            await asyncio.sleep(1.0)

    async def _call(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _values(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags as they stand in a file, as click would have read them."""
    read: dict[str, Any] = {}
    for name, value in flags.items():
        kind = click.types.convert_type(BY_PARAM[name].type)
        if value is None:
            read[name] = None
        else:
            read[name] = tuple(map(kind, value)) if BY_PARAM[name].multiple else kind(value)
    return read


def _cause(error: Exception) -> str:
    """What really went wrong inside an actor: the last line of Ray's long story."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
