from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warmfront.conftest import Cli
from warmfront.run_dir import RUN_DIR_ENV, Process, RunDir, all_run_dirs, marked_processes, wait_gone, write_private

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(300)",
]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def dead_cluster(path: Path, *processes: Process, ready_file: Path | None = None) -> RunDir:
    """What a killed `up` leaves: its own entry is of a process that is gone."""
    path.mkdir(mode=0o700)
    gone = Process("up", 2**22 - 1, 1)
    run_dir = RunDir(
        path=path, processes=[gone, *processes], ready_file=str(ready_file) if ready_file else None, cluster={}
    )
    run_dir.save()
    return run_dir


def test_a_run_directory_is_private_and_reads_back(temp_root: Path) -> None:
    run_dir = RunDir.create()
    run_dir.cluster = {"http": "http://127.0.0.1:8000"}
    run_dir.save()
    assert run_dir.path.parent == temp_root
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    assert (run_dir.path / "state.json").stat().st_mode & 0o777 == 0o600
    assert RunDir.load(run_dir.path) == run_dir
    owner = run_dir.owner()
    assert owner is not None and owner.pid == os.getpid()


def test_a_folder_that_others_may_read_or_without_a_state_is_no_run_directory(temp_root: Path) -> None:
    run_dir = RunDir.create()
    run_dir.path.chmod(0o755)
    (temp_root / "wf-other").mkdir(mode=0o700)
    (temp_root / "wf-broken").mkdir(mode=0o700)
    (temp_root / "wf-broken" / "state.json").write_text("{")
    (temp_root / "wf-link").symlink_to(run_dir.path)
    assert all_run_dirs() == []


def test_a_reused_process_id_is_never_touched(temp_root: Path, sleeper: subprocess.Popen[bytes]) -> None:
    real = Process.of("worker", sleeper.pid)
    reused = Process("worker", sleeper.pid, real.start_ticks - 1)
    assert (real.is_alive(), reused.is_alive()) == (True, False)
    dead_cluster(temp_root / "wf-dead", reused).remove()
    assert sleeper.poll() is None


def test_a_recorded_process_and_a_marked_one_are_ended(temp_root: Path, sleeper: subprocess.Popen[bytes]) -> None:
    path = temp_root / "wf-dead"
    marked = subprocess.Popen(STUBBORN, env={**os.environ, RUN_DIR_ENV: str(path)}, stdout=subprocess.PIPE)
    assert marked.stdout is not None
    marked.stdout.readline()  # it ignores SIGTERM from here on
    other = subprocess.Popen(SLEEP, env={**os.environ, RUN_DIR_ENV: str(path) + "-other"})
    try:
        run_dir = dead_cluster(path, Process.of("worker", sleeper.pid))
        assert [process.pid for process in marked_processes(path)] == [marked.pid]
        ended = run_dir.remove(grace_s=0.2)
        assert {process.pid for process in ended} == {sleeper.pid, marked.pid}
        assert (sleeper.wait(), marked.wait(), other.poll()) == (-signal.SIGTERM, -signal.SIGKILL, None)
        assert not path.exists()
    finally:
        for process in (marked, other):
            process.kill()
            process.wait()
        marked.stdout.close()


def test_a_zombie_counts_as_gone(sleeper: subprocess.Popen[bytes]) -> None:
    process = Process.of("worker", sleeper.pid)
    process.signal(signal.SIGKILL)
    assert wait_gone([process], 10)
    assert sleeper.returncode is None  # nobody has asked for its exit code yet
    with pytest.raises(ProcessLookupError):
        Process.of("worker", sleeper.pid)


def test_down_removes_what_a_killed_up_left(cli: Cli, temp_root: Path, sleeper: subprocess.Popen[bytes]) -> None:
    ready = temp_root / "ready.json"
    path = temp_root / "wf-dead"
    write_private(ready, json.dumps({"run_dir": str(path)}))
    dead_cluster(path, Process.of("redis", sleeper.pid), ready_file=ready)
    result = cli("down")
    assert (result.exit_code, "removed what was left of it (1 processes)" in result.out) == (0, True)
    assert (path.exists(), ready.exists(), sleeper.wait()) == (False, False, -signal.SIGTERM)
    assert "No cluster" in cli("down").out


def live_cluster(path: Path, up: subprocess.Popen[bytes], http: str) -> RunDir:
    run_dir = dead_cluster(path)
    run_dir.processes, run_dir.cluster = [Process.of("up", up.pid)], {"http": http}
    run_dir.save()
    return run_dir


def test_down_removes_the_dead_and_leaves_who_lives(
    cli: Cli, temp_root: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    live = live_cluster(temp_root / "wf-live", sleeper, "http://127.0.0.1:8001")
    for name in ("wf-1", "wf-2"):
        dead_cluster(temp_root / name)
    result = cli("down")
    assert (result.exit_code, result.out.count("removed")) == (0, 2)
    assert "still running: http://127.0.0.1:8001; end one by --url or" in result.out
    assert (all_run_dirs(), sleeper.poll()) == ([live], None)


def test_down_asks_which_one_when_two_run(cli: Cli, temp_root: Path, sleeper: subprocess.Popen[bytes]) -> None:
    for port in (8001, 8002):
        live_cluster(temp_root / f"wf-{port}", sleeper, f"http://127.0.0.1:{port}")
    result = cli("down")
    assert (result.exit_code, "--all: http://127.0.0.1:8001, http://127.0.0.1:8002" in result.err) == (2, True)
    assert cli("down", "--url", "http://127.0.0.1:8003").exit_code == 2
    assert sleeper.poll() is None
    assert cli("down", "--url", "http://127.0.0.1:8002/").exit_code == 0
    assert [run_dir.path.name for run_dir in all_run_dirs()] == ["wf-8001"]
    assert cli("down", "--all").exit_code == 0
    assert all_run_dirs() == []


def test_down_with_a_ready_file_ends_that_cluster_alone(cli: Cli, temp_root: Path) -> None:
    ready = temp_root / "ready.json"
    write_private(ready, json.dumps({"run_dir": str(temp_root / "wf-1")}))
    for name in ("wf-1", "wf-2"):
        dead_cluster(temp_root / name)
    assert cli("down", "--ready-file", str(ready)).exit_code == 0
    assert [run_dir.path.name for run_dir in all_run_dirs()] == ["wf-2"]
    again = cli("down", "--ready-file", str(ready))
    assert (again.exit_code, "gone already" in again.err, ready.exists()) == (2, True, False)


def test_down_refuses_a_file_that_up_did_not_write(cli: Cli, temp_root: Path) -> None:
    other = temp_root / "other.json"
    other.write_text("[]")
    for path, words in ((other, "has not written this file"), (temp_root / "missing", "No such file")):
        result = cli("down", "--ready-file", str(path))
        assert (result.exit_code, words in result.err) == (2, True), result.err
    assert other.exists()


def test_a_ready_file_that_another_cluster_has_rewritten_stays(temp_root: Path) -> None:
    ready = temp_root / "ready.json"
    run_dir = dead_cluster(temp_root / "wf-1", ready_file=ready)
    write_private(ready, json.dumps({"run_dir": str(temp_root / "wf-2")}))
    run_dir.remove()
    assert ready.exists()
