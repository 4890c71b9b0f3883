"""A cluster's parts as child processes, each ``warmfront router|worker --config FILE``, restarted when they die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from warmfront_pb.v1 import common_pb2

from common.beat import why_dead
from router.controller import Controller
from router.launcher import Seen, refuses
from router.reconcile import DRAINING, GONE, STARTING, Group
from router.worker_client import is_serving
from warmfront.desired import DESIRED_FILE, own_ports, read_desired
from warmfront.flags import ENV_PREFIX, SEED_ENV
from warmfront.run_dir import RunDir, write_private
from warmfront.store import die_with_parent

HEALTHY_AFTER_S = 60.0
LONGEST_BACKOFF_S = 30.0
_HEALTH_DEADLINE_S = 3.0
_TAIL_BYTES = 8192


def backoff_s(failures: int) -> float:
    """How long to wait before the next start after so many failures in a row."""
    return float(min(LONGEST_BACKOFF_S, 0.5 * 2 ** (failures - 1)))


@dataclass(slots=True, kw_only=True)
class _Child:
    role: str  # router or worker
    name: str
    revision: str
    config: Path
    log: Path
    alive: Path  # of a router: its state, told while its event loop turns
    gpu: int | None = None  # the device that it has, where each takes one
    process: asyncio.subprocess.Process | None = None
    started_s: float = 0.0  # by the monotonic clock
    started_ms: int = 0  # since 1970: an older lease is another boot's
    failures: int = 0
    fault: str = ""  # why its last process ended
    exit_code: int = 0
    address: str = ""  # by its last lease
    is_unwanted: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class ChildProcesses:
    """Parts as children of this process, for a controller in a thread of it.

    Everything is done in the event loop of the main thread: a child is killed by the kernel when its parent thread
    ends, so nothing outlives a killed `up`. ``num_gpus``: how many there are to share out, one to each worker.
    """

    def __init__(self, run_dir: RunDir, log_dir: Path, env: dict[str, str], num_gpus: int = 0) -> None:
        self._run_dir, self._log_dir, self._num_gpus = run_dir, log_dir, num_gpus
        self._env = {**child_environment(), **env}
        self._children: dict[str, _Child] = {}
        self._health_calls = ThreadPoolExecutor(8, thread_name_prefix="health")
        self._controller: Controller | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # As `up` uses it, in the event loop

    async def begin(self, fleet: str, stop: asyncio.Event) -> None:
        """Starts a controller, which starts what the run directory's file says."""
        self._loop = asyncio.get_running_loop()
        handler = logging.FileHandler(self._log_dir / "controller.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger = logging.getLogger(Controller.__module__)  # its lines are none of what `up` says
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
        read = partial(read_desired, self._run_dir.path / DESIRED_FILE)
        self._controller = Controller(read, lambda desired: self, self._run_dir.path)

    async def stop(self, role: str, deadline_s: float, hurry: asyncio.Event) -> None:
        """Lets the parts of one role drain; kills what is left at the deadline or when ``hurry`` is set."""
        if self._controller is not None:
            await asyncio.to_thread(self._controller.stop)
        children = [child for child in self._children.values() if child.role == role]
        for child in children:
            child.is_unwanted = True
            if child.task is not None:
                child.task.cancel()
            _send(child, signal.SIGTERM)
        waits = [asyncio.create_task(child.process.wait()) for child in children if child.process is not None]
        if waits:
            hurried = asyncio.create_task(hurry.wait())
            everything = asyncio.create_task(asyncio.wait(waits))
            await asyncio.wait([everything, hurried], timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            for child in children:
                _send(child, signal.SIGKILL)
            await everything

    def fault(self) -> str:
        """None: each part runs on its own."""
        return ""

    async def close(self) -> None:
        """Nothing is left once both roles have stopped."""

    # As the controller uses it, in its thread

    def look(self, leases: Mapping[str, common_pb2.ReplicaLease]) -> list[Seen]:
        """Every child; workers by their leases and the health of their servers."""
        children = list(self._children.values())  # asked together: many that hang take no longer than one
        return list(self._health_calls.map(lambda child: self._seen(child, leases.get(child.name)), children))

    def num_nodes(self, group: Group) -> int:
        """This machine."""
        return 1

    def start(self, group: Group, name: str, revision: str) -> None:
        """A process of the command line's ``router`` or ``worker``, with a file of flags."""
        flags = {**group.settings, **own_ports(name, group.settings)}
        child = _Child(
            role=group.role,
            name=name,
            revision=revision,
            config=self._run_dir.path / f"{name}.yaml",
            log=self._log_dir / f"{name}.log",
            alive=self._run_dir.path / f"{name}.alive",
        )
        if group.role == "router":
            flags |= {"router_id": name, "alive_file": str(child.alive)}
        else:
            flags["replica_id"] = name
            if self._num_gpus:
                held = {one.gpu for one in self._children.values()}
                child.gpu = next(gpu for gpu in count() if gpu not in held)
                flags["device"] = f"cuda:{child.gpu}"
        write_private(child.config, yaml.safe_dump(flags))
        self._children[name] = child
        self._do(self._begin(child))

    def drain(self, name: str, deadline_s: float) -> None:
        """By SIGTERM; the deadline is among its flags."""
        child = self._children[name]
        child.is_unwanted = True
        self._do(_sent(child, signal.SIGTERM))
        process = child.process
        if process is None or process.returncode is not None:
            self.remove(name)  # it had ended, and waited to be started again

    def replace(self, name: str) -> None:
        """Its process is killed, and started again as any that dies."""
        self._do(_sent(self._children[name], signal.SIGKILL))

    def remove(self, name: str) -> None:
        """Kills what is left of it."""
        child = self._children.pop(name, None)
        if child is not None:
            child.is_unwanted = True
            self._do(_sent(child, signal.SIGKILL))

    def _do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _seen(self, child: _Child, lease: common_pb2.ReplicaLease | None) -> Seen:
        seen = partial(Seen, role=child.role, name=child.name, revision=child.revision)
        process = child.process
        if process is None:
            return seen(is_restarting=True, fault=child.fault, exit_code=child.exit_code, error=child.fault)
        pid, code = process.pid, process.returncode
        if code is not None:
            if child.is_unwanted or code == 0:
                return seen(state=GONE)
            fault = end_of(code, child.log)
            return seen(is_restarting=True, fault=fault, exit_code=code, error=f"it ended: {fault}")
        if child.role == "router":
            state, not_ready, error = _told_by_router(child.alive)
            seen = partial(seen, fault=child.fault, exit_code=child.exit_code)
            return seen(pid=pid, state=state, not_ready=not_ready, error=error, answers=True)
        if lease is not None and _boot_ms(lease) < child.started_ms:
            lease = None  # of the process before
        if lease is not None:
            child.address = lease.address
        state = common_pb2.ReplicaState.Name(lease.state) if lease is not None else STARTING
        error, is_ending = "", False
        if state != DRAINING and not child.address:
            error = "its server does not listen yet"
        elif state != DRAINING and not is_serving(child.address, _HEALTH_DEADLINE_S):
            # One that hangs is still connected to; only one that ends has closed its server, and that takes its time.
            is_ending = refuses(child.address)
            error = "" if is_ending else f"its server at {child.address} is not healthy"
        return seen(
            pid=pid,
            address=child.address,
            state=DRAINING if is_ending else state,
            generation=lease.generation if lease is not None else "",
            fault=child.fault,
            exit_code=child.exit_code,
            error=error,
            answers=lease is not None or is_ending,
        )

    # In the event loop

    async def _begin(self, child: _Child) -> None:
        await self._launch(child)
        child.task = asyncio.create_task(self._keep_alive(child), name=f"keep {child.name} alive")

    async def _launch(self, child: _Child) -> None:
        child.started_s, child.started_ms, child.address = time.monotonic(), time.time_ns() // 1_000_000, ""
        try:
            child.process = await self._spawn(child)
        except OSError as error:  # no memory, no log folder, too many open files: it may go later
            child.process, child.fault, child.exit_code = None, f"it cannot be started: {error}", 1

    async def _spawn(self, child: _Child) -> asyncio.subprocess.Process:
        child.alive.unlink(missing_ok=True)
        with child.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # a redis.py in the folder where `up` was typed is none of ours
                "-m",
                "warmfront",
                child.role,
                "--config",
                str(child.config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,  # Ctrl-C in the terminal is for `up` alone
                preexec_fn=die_with_parent,
            )

    async def _keep_alive(self, child: _Child) -> None:
        while True:
            if child.process is not None:
                child.exit_code = await child.process.wait()
                if child.exit_code == 0 or child.is_unwanted:
                    return  # it was drained: somebody wants it gone
                child.fault = end_of(child.exit_code, child.log)
            if time.monotonic() - child.started_s > HEALTHY_AFTER_S:
                child.failures = 0
            child.failures += 1
            await asyncio.sleep(backoff_s(child.failures))
            if self._children.get(child.name) is not child:
                return  # removed meanwhile
            await self._launch(child)


def child_environment() -> dict[str, str]:
    """Ours without the flags in it: a child takes those from its file alone."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX) or key == SEED_ENV}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def _told_by_router(alive: Path) -> tuple[str, str, str]:
    """A router's state, why it cannot answer and what is wrong: on ports that several share none can be asked."""
    try:
        error = why_dead(alive)
        state, _, not_ready = alive.read_text(encoding="utf-8").partition(" ")
    except OSError:
        return STARTING, "", "it has not told its state yet"
    return STARTING if error else state, not_ready, error


def _boot_ms(lease: common_pb2.ReplicaLease) -> int:
    """When the boot of a lease began, by its generation's name."""
    try:
        return int(lease.generation.split("-")[0], 16)
    except ValueError:
        return 0


async def _sent(child: _Child, number: signal.Signals) -> None:
    _send(child, number)


def _send(child: _Child, number: signal.Signals) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)


def tail(log: Path) -> str:
    """The end of a log; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def end_of(code: int, log: Path) -> str:
    """Why a process ended with this exit code; one that was killed has no last words."""
    if code >= 0:
        return last_line(log)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"it was killed ({name}{', by somebody or for want of memory' if -code == signal.SIGKILL else ''})"


def last_line(log: Path) -> str:
    """Why a process ended, by its log: the reason of its exit code, else the last line that says something."""
    text = tail(log)
    reasons = re.findall(r" exit_code=\d+: (.+)", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (reasons or lines or [f"nothing in {log}"])[-1].removeprefix("warmfront: ")
