"""A whole warmfront cluster of real processes for a test, started and ended as a user would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from tests.support import free_port, wait_until

ROOT = Path(__file__).resolve().parents[2]
READY_GUARD_S = 240.0  # a start takes about 20 s on a quiet machine


class LocalCluster:
    """``warmfront up`` with its ready file and the clients a test needs."""

    def __init__(self, folder: Path, *args: str, env: Mapping[str, str] | None = None) -> None:
        self.ready_file = folder / "ready.json"
        self.log = folder / "up.log"
        self.http_port, self.grpc_port = free_port(), free_port()
        command = [sys.executable, "-m", "warmfront", "up", "--http-port", str(self.http_port)]
        command += ["--grpc-port", str(self.grpc_port), "--ready-file", str(self.ready_file), *args]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", **(env or {})},
            )

    def wait_ready(self) -> LocalCluster:
        def look() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"up ended with {self.process.returncode}:\n{self.log.read_text()}")
            return self.ready_file.exists()

        wait_until(look, guard_s=READY_GUARD_S, what=f"ready file; log so far: {self.log}")
        self.ready: dict[str, Any] = json.loads(self.ready_file.read_text())
        return self

    @property
    def http(self) -> str:
        return str(self.ready["http"])

    @property
    def grpc(self) -> str:
        return str(self.ready["grpc"])

    def sdk(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.http}/v1", api_key="none", max_retries=0, timeout=240)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """What ``GET /v1/replicas`` says, by replica id."""
        return {one["id"]: one for one in httpx.get(f"{self.http}/v1/replicas").raise_for_status().json()["replicas"]}

    def stop(self) -> int:
        """SIGTERM, wait, and check that no process of the cluster is left."""
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=120)
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not alive, f"left running: {[process.cmdline() for process in alive]}\n{self.log.read_text()}"
        return code


@contextlib.contextmanager
def cluster(folder: Path, *args: str, env: Mapping[str, str] | None = None) -> Iterator[LocalCluster]:
    one = LocalCluster(folder, *args, env=env)
    try:
        yield one.wait_ready()
    finally:
        if one.process.poll() is None:
            code = one.stop()
            assert code == 0, f"up ended with {code}:\n{one.log.read_text()}"
