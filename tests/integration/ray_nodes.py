"""Ray clusters of several nodes on this machine: each node is a `ray start --block` of its own, with its own raylet."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.integration.cluster import ROOT
from tests.support import free_port, wait_until


class RayNodes:
    """A head that keeps its state in Redis, and nodes beside it. Nothing else of this machine's Ray is touched."""

    def __init__(self, folder: Path, redis_port: int) -> None:
        self._folder = folder
        self._home = Path(tempfile.mkdtemp(prefix="wfr-", dir="/tmp"))  # short: sockets live in it
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("WARMFRONT_")},
            "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "120",  # so long nodes wait for a head that is away
        }
        self._head_env = {
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{redis_port}",
            "RAY_external_storage_namespace": "tests",
        }
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start_head(self) -> None:
        """The head, without room for parts; again after it was killed."""
        # Where Ray's nodes share a machine it takes their sight for a head that runs.
        (self._home / "ray_current_cluster").unlink(missing_ok=True)
        head = ["--head", f"--port={self.port}", f"--temp-dir={self._home}", "--include-dashboard=false"]
        self._start("head", [*head, "--num-cpus=0"], self._head_env)

    def start_node(self, name: str, resources: str) -> None:
        """A node with these resources, as JSON."""
        self._start(name, [f"--address={self.address}", "--num-cpus=2", f"--resources={resources}"], {})

    def kill(self, name: str, process: str = "raylet") -> None:
        """SIGKILL for a node's raylet, or the head's gcs_server: then `ray start` ends what is left of the node."""
        node = self._nodes.pop(name)
        family = psutil.Process(node.pid).children(recursive=True)
        (victim,) = [one for one in family if one.name() == process]
        victim.send_signal(signal.SIGKILL)
        node.wait(timeout=120)
        psutil.wait_procs(family, timeout=60)

    def close(self) -> None:
        for node in self._nodes.values():
            family = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
            node.kill()
            node.wait()
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(family, timeout=30)
        shutil.rmtree(self._home, ignore_errors=True)

    def _start(self, name: str, options: list[str], env: dict[str, str]) -> None:
        for _ in range(3):  # Ray gives a raylet 30 s to start, which a busy machine may need
            log = self._launch(name, options, env)
            node = self._nodes[name]
            wait_until(
                lambda: node.poll() is not None or "will now block" in log.read_text(),  # noqa: B023
                guard_s=180,
                what=f"Ray node {name}",
            )
            if node.poll() is None:
                return
        raise AssertionError(log.read_text())

    def _launch(self, name: str, options: list[str], env: dict[str, str]) -> Path:
        log = self._folder / f"ray-{name}-{len(list(self._folder.glob('ray-*')))}.log"
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", *options]
        command += ["--node-ip-address=127.0.0.1", "--object-store-memory=100000000"]
        command += [f"--dashboard-agent-{kind}-port={free_port()}" for kind in ("listen", "grpc")]
        with log.open("ab") as output:
            self._nodes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.env, **env},
                cwd=self._home,
            )
        return log


@contextlib.contextmanager
def ray_nodes(folder: Path, redis_port: int) -> Iterator[RayNodes]:
    nodes = RayNodes(folder, redis_port)
    try:
        yield nodes
    finally:
        nodes.close()
