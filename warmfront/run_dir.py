"""A cluster's run directory: what it is made of, so that whatever is left of it can be found and removed.

``/tmp/wf-XXXXXXXX`` (mode 700; the temporary directory of ``TMPDIR``) holds state.json, secrets, logs and Ray's session
folder. A process belongs to a cluster in one of two ways, and both survive a killed `up`: it stands in state.json with
its start time, so that a reused process id is never touched; or its environment carries ``WARMFRONT_RUN_DIR``, which
every child inherits, Ray's own processes too. Linux only, since both are read from /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RUN_DIR_ENV = "WARMFRONT_RUN_DIR"
_PREFIX = "wf-"
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Process:
    """A process that cannot be confused with a later one of the same id."""

    role: str  # up, redis, router, worker
    pid: int
    start_ticks: int  # since boot, field 22 of /proc/PID/stat

    @classmethod
    def of(cls, role: str, pid: int) -> Process:
        """The process that has this id now. Raises ``ProcessLookupError`` when there is none."""
        ticks = start_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(pid)
        return cls(role, pid, ticks)

    def is_alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        return start_ticks(self.pid) == self.start_ticks

    def signal(self, number: int) -> None:
        """Sends a signal, to this process or to nobody."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


@dataclass(slots=True, kw_only=True)
class RunDir:
    """One cluster on this machine. The `up` that made it is its only writer."""

    path: Path
    processes: list[Process] = field(default_factory=list)
    ready_file: str | None = None
    cluster: dict[str, Any] = field(default_factory=dict)  # http, grpc, fleet, model: for people and for `compare`

    @classmethod
    def create(cls) -> RunDir:
        """A new one, owned by this process."""
        run_dir = cls(path=Path(tempfile.mkdtemp(prefix=_PREFIX)), processes=[Process.of("up", os.getpid())])
        run_dir.save()
        return run_dir

    @classmethod
    def load(cls, path: Path) -> RunDir | None:
        """The one at ``path``; None when it is no run directory of this user."""
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o077:
                return None
            state = json.loads((path / _STATE).read_text(encoding="utf-8"))
            state["processes"] = [Process(**process) for process in state["processes"]]
            return cls(path=path, **state)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def save(self) -> None:
        """Writes state.json in one step."""
        state = asdict(self)
        del state["path"]
        write_private(self.path / _STATE, json.dumps(state, indent=1))

    def owner(self) -> Process | None:
        """The `up` that runs this cluster, if it still does."""
        return next((process for process in self.processes if process.role == "up" and process.is_alive()), None)

    def survivors(self) -> list[Process]:
        """Every process of this cluster that is alive, recorded or marked; `up` itself first."""
        alive = {process.pid: process for process in self.processes if process.is_alive()}
        for process in marked_processes(self.path):
            alive.setdefault(process.pid, process)
        alive.pop(os.getpid(), None)
        return sorted(alive.values(), key=lambda process: process.role != "up")

    def remove(self, *, grace_s: float = 2.0) -> list[Process]:
        """Ends every survivor (SIGTERM, SIGKILL after ``grace_s``), removes folder and ready file.

        Returns the processes that it ended.
        """
        ended = self.survivors()
        for process in ended:
            process.signal(signal.SIGTERM)
        if not wait_gone(ended, grace_s):
            for _ in range(20):  # a dying raylet may just have started another process
                left = self.survivors()
                for process in left:
                    process.signal(signal.SIGKILL)
                if not left:
                    break
                wait_gone(left, 0.5)
        if self.ready_file is not None:
            remove_ready_file(Path(self.ready_file), self.path)
        shutil.rmtree(self.path, ignore_errors=True)
        return ended


def all_run_dirs() -> list[RunDir]:
    """Every cluster of this user under the temporary directory, dead or alive."""
    found = (RunDir.load(path) for path in sorted(Path(tempfile.gettempdir()).glob(_PREFIX + "*")))
    return [run_dir for run_dir in found if run_dir is not None]


def marked_processes(path: Path) -> list[Process]:
    """Processes of this user whose environment carries ``WARMFRONT_RUN_DIR=path``, and Ray's that work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ProcessLookupError):
            if entry.stat().st_uid == os.getuid() and _belongs(entry, path):
                found.append(Process.of("child", int(entry.name)))
    return found


def _belongs(process: Path, run_dir: Path) -> bool:
    if f"{RUN_DIR_ENV}={run_dir}".encode() in (process / "environ").read_bytes().split(b"\0"):
        return True
    if not (process / "cmdline").read_bytes().startswith(b"ray::"):
        return False
    # Some of Ray's processes write their title over their environment; what they hold open still tells.
    session = f"{run_dir}/ray/"
    return any(str(descriptor.readlink()).startswith(session) for descriptor in (process / "fd").iterdir())


def wait_gone(processes: Iterable[Process], timeout_s: float) -> bool:
    """Waits until none of them is alive; False when some still are."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def write_private(path: Path, text: str) -> None:
    """Writes a file of mode 600 in one step: a reader sees the old content or the new, never half of it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_ready_file(path: Path, run_dir: Path) -> None:
    """Removes a ready file, unless another cluster has written its own there since."""
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text(encoding="utf-8")).get("run_dir") == str(run_dir):
            path.unlink()
