"""A cluster's parts as child processes, each ``warmfront router|worker --config FILE``, restarted when they die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from warmfront.errors import Failure, WrongUse
from warmfront.options import ENV_PREFIX, SEED_ENV
from warmfront.run_dir import RunDir, write_private
from warmfront.store import die_with_parent

HEALTHY_AFTER_S = 60.0
LONGEST_BACKOFF_S = 30.0


def backoff_s(failures: int) -> float:
    """How long to wait before the next start after so many failures in a row."""
    return float(min(LONGEST_BACKOFF_S, 0.5 * 2 ** (failures - 1)))


@dataclass(slots=True, kw_only=True)
class _Child:
    role: str  # router or worker
    name: str
    config: Path
    log: Path
    process: asyncio.subprocess.Process | None = None
    started_at: float = 0.0
    failures: int = 0
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class ChildProcesses:
    """Starts, restarts and ends the parts. Used from one event loop in the main thread.

    A child is killed by the kernel when its parent thread ends, so nothing outlives a killed `up`.
    """

    def __init__(self, run_dir: RunDir, log_dir: Path, env: dict[str, str]) -> None:
        self._run_dir, self._log_dir = run_dir, log_dir
        self._env = {**child_environment(), **env}
        self._children: list[_Child] = []

    async def start(self, routers: dict[str, dict[str, Any]], workers: dict[str, dict[str, Any]]) -> None:
        """Starts every part; the flags of each by its name."""
        for role, parts in (("router", routers), ("worker", workers)):
            for name, flags in parts.items():
                config = self._run_dir.path / f"{name}.yaml"
                write_private(config, yaml.safe_dump(flags))
                child = _Child(role=role, name=name, config=config, log=self._log_dir / f"{name}.log")
                await self._launch(child)
                self._children.append(child)

    def pids(self) -> dict[str, list[int]]:
        """The living processes by role."""
        pids: dict[str, list[int]] = {"router": [], "worker": []}
        for child in self._children:
            if child.process is not None and child.process.returncode is None:
                pids[child.role].append(child.process.pid)
        return pids

    def check_started(self) -> None:
        """Raises ``Failure`` (``WrongUse`` for exit code 2) when a part has ended: before all are ready none may."""
        for child in self._children:
            code = child.process.returncode if child.process is not None else None
            if code is not None:
                error = WrongUse if code == 2 else Failure
                raise error(f"{child.name} ended with code {code} while starting: {last_line(child.log)}")

    async def watch(self) -> None:
        """From now on a part that dies is started again, later each time it dies soon."""
        for child in self._children:
            child.task = asyncio.create_task(self._keep_alive(child), name=f"keep {child.name} alive")

    async def stop(self, role: str, deadline_s: float, hurry: asyncio.Event) -> None:
        """Lets the parts of one role drain; kills what is left at the deadline or when ``hurry`` is set."""
        children = [child for child in self._children if child.role == role]
        for child in children:
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

    async def close(self) -> None:
        """Nothing is left once both roles have stopped."""

    async def _launch(self, child: _Child) -> None:
        with child.log.open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
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
        child.started_at = time.monotonic()

    async def _keep_alive(self, child: _Child) -> None:
        while True:
            assert child.process is not None
            if await child.process.wait() == 0:
                return  # it was drained: somebody wants it gone
            if time.monotonic() - child.started_at > HEALTHY_AFTER_S:
                child.failures = 0
            child.failures += 1
            await asyncio.sleep(backoff_s(child.failures))
            await self._launch(child)


def child_environment() -> dict[str, str]:
    """Ours without the flags in it: a child takes those from its file alone."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX) or key == SEED_ENV}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def _send(child: _Child, number: signal.Signals) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)


def tail(log: Path, num_bytes: int = 8192) -> str:
    """The end of a log; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def last_line(log: Path) -> str:
    """Why a process ended, by its log: the reason of its exit code, else the last line that says something."""
    text = tail(log)
    reasons = re.findall(r" exit_code=\d+: (.+)", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (reasons or lines or [f"nothing in {log}"])[-1].removeprefix("warmfront: ")
