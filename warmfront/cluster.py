"""A cluster's parts as actors of a local Ray cluster that is theirs alone.

Ray starts, restarts and ends the actors; no request passes through it. Its session folder lies in the run directory and
goes with it. All calls to Ray are made from one thread that lives as long as the cluster does: Ray's processes are
killed by the kernel when the thread that started them ends, so nothing outlives a killed `up` for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from warmfront.desired import DESIRED_FILE, read_status
from warmfront.errors import DeadlinePassed, Failure, WrongUse
from warmfront.run_dir import RunDir, write_private

NAMESPACE = "warmfront"
_T = TypeVar("_T")
_LONGEST_SOCKET_PATH = 107  # sun_path of sockaddr_un, less its end
_SESSION_SOCKET = "session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
_OBJECT_STORE_BYTES = 100 << 20  # nothing of ours goes through it
_CONTROLLER_DEADLINE_S = 10.0
_HEAD_DEADLINE_S = 30.0


class RayActors:
    """Starts, watches and ends the parts on Ray."""

    def __init__(self, run_dir: RunDir, log_dir: Path, env: dict[str, str]) -> None:
        self._run_dir, self._log_dir, self._env = run_dir, log_dir, env
        self._home = run_dir.path / "ray"
        if len(f"{self._home}/{_SESSION_SOCKET}") > _LONGEST_SOCKET_PATH:
            raise WrongUse(f"{self._home} is too long a path for Ray's sockets: set TMPDIR to a shorter one")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._hurried = threading.Event()
        self._controller: Any = None
        self._gcs: subprocess.Popen[bytes] | None = None
        self._copied: dict[tuple[str, Path], int] = {}  # bytes of each of Ray's files that stand in an actor's log
        self._copier: asyncio.Task[None] | None = None

    async def begin(self, fleet: str, stop: asyncio.Event) -> None:
        """Starts Ray, and a controller that starts what the run directory's file says."""
        await self._call(lambda: self._start(fleet, stop))
        self._copier = asyncio.create_task(self._keep_copying(), name="copy the actors' logs")

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
        if self._copier is not None:
            self._copier.cancel()
        await self._call(self._shut_down)
        self._thread.shutdown()

    def fault(self) -> str:
        """Whether Ray's GCS has ended: Ray starts none anew, and without it no actor is found or started."""
        if self._gcs is None or self._gcs.poll() is None:
            return ""
        code = self._gcs.returncode
        return f"Ray's GCS has ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})"

    # In Ray's thread from here on

    def _start(self, fleet: str, stop: asyncio.Event) -> None:
        start_local_ray(self._home, self._run_dir.path / "ray-token", self._env, self._log_dir / "ray.log")
        self._gcs = gcs_process()
        if stop.is_set():
            return
        from warmfront.actors import start_controller

        self._controller = start_controller(self._run_dir.path / DESIRED_FILE, self._run_dir.path, fleet)

    def _drain(self, role: str, deadline_s: float) -> None:
        if self._controller is None:
            return  # nothing was started
        from warmfront.actors import actors_of

        self._get([self._controller.stop.remote()], _CONTROLLER_DEADLINE_S)
        self._get([actor.drain.remote() for actor in actors_of(role)], deadline_s)

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

        if not self.fault():  # else it would wait for the GCS
            with contextlib.suppress(Exception):  # it may have died by itself
                ray.shutdown()
        sys.stdout = sys.__stdout__
        self._copy_logs()

    def _copy_logs(self) -> None:
        """Appends what actors have logged to the file of their name.

        Ray has a file per process, under names that do not tell which actor it is, in a folder that goes with Ray.
        """
        status = read_status(self._run_dir.path)
        pids = {part["name"]: part["pid"] for part in status.get("parts", ())}
        for name, pid in {**pids, "controller": status.get("controller", 0)}.items():
            for log in self._home.glob(f"session_latest/logs/worker-*-{pid}.err") if pid else ():
                self._copied.setdefault((name, log), 0)
        for (name, log), num_bytes in self._copied.items():
            with contextlib.suppress(OSError), log.open("rb") as source:
                source.seek(num_bytes)
                with (self._log_dir / f"{name}.log").open("ab") as target:
                    shutil.copyfileobj(source, target)
                self._copied[name, log] = source.tell()

    async def _keep_copying(self) -> None:
        while True:
            await self._call(self._copy_logs)
            await asyncio.sleep(1.0)

    async def _call(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def start_local_ray(home: Path, token: Path, env: dict[str, str], output: Path) -> None:
    """Starts a Ray cluster of this machine in ``home``, for this process alone. Raises ``Failure``.

    ``output`` gets what Ray prints; standard output is it until Ray is shut down.
    """
    home.mkdir(mode=0o700)
    write_private(token, secrets.token_hex(32))
    os.environ.update(
        env,
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
        RAY_worker_niceness="0",  # actors would run at nice 15
        RAY_memory_monitor_refresh_ms="0",  # it kills replicas of a full machine without a word; the OS decides
        RAY_DISABLE_FAILURE_SIGNAL_HANDLER="1",  # it prints a stack and dies at SIGTERM, which is ours to handle
    )
    import ray  # not earlier: it reads those when it is imported

    logging.getLogger("ray").setLevel(logging.ERROR)
    sys.stdout = output.open("a", encoding="utf-8")  # Ray tells of each dead process there
    try:
        # Ray's processes would import from the folder where `up` was typed.
        with contextlib.chdir(home), _sessions_of_their_own():
            ray.init(
                address="local",  # never the cluster that some file in /tmp names
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                namespace=NAMESPACE,
                _temp_dir=str(home),
            )
    except Exception as error:  # Ray has no type of its own for a node that is not up after 30 s, on a busy machine
        raise Failure(f"Ray does not start: {(str(error) or type(error).__name__).splitlines()[0]}") from error


def gcs_process() -> subprocess.Popen[bytes] | None:
    """The process of the GCS of the Ray cluster that this process has started; None where Ray does not tell.

    Ray has no public name for it.
    """
    node: Any = getattr(importlib.import_module("ray._private.worker"), "_global_node", None)
    started: list[Any] = node.all_processes.get("gcs_server", []) if node is not None else []
    return started[0].process if started else None


@contextlib.contextmanager
def _sessions_of_their_own() -> Iterator[None]:
    """A signal to the whole process group of `up`, as GNU timeout sends it, ends no process of Ray before its time.

    Ray has no setting for it: what it starts its processes with is replaced while it starts them.
    """
    services: Any = importlib.import_module("ray._private.services")
    popen = services.ConsolePopen
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def join_ray(address: str, namespace: str) -> None:
    """Joins a running Ray cluster, of which nothing but actors of this namespace is touched.

    Raises ``WrongUse``, and ``DeadlinePassed`` when nobody listens there for a while.
    """
    if address != "auto":
        _wait_for_port(address)
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # it prints a stack and dies at SIGTERM
    import ray

    logging.getLogger("ray").setLevel(logging.WARNING)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except Exception as error:  # as above: what Ray raises here has no common type
        words = (str(error) or type(error).__name__).splitlines()[0]
        raise WrongUse(
            f"--ray-address {address}: no Ray cluster answers there ({words}); "
            "start one with `ray start --head`, or say local"
        ) from error


def _wait_for_port(address: str) -> None:
    """Until a head that starts beside us listens: Ray itself would try for longer, and say less."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise WrongUse(f"--ray-address {address}: write HOST:PORT, auto or local")
    end = time.monotonic() + _HEAD_DEADLINE_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        except OSError as error:
            if time.monotonic() > end:
                raise DeadlinePassed(f"--ray-address {address}: {error}; start Ray with `ray start --head`") from error
            time.sleep(0.5)
        else:
            return
