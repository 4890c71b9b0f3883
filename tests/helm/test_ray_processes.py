"""``ray.mode: static`` as local processes: head, controller, router node and worker, by the chart's own commands.

On one machine, so with one router node at a time: each has the ports of its pod. Ray listens on the machine's address.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.helm.kubelet import POD_IP, Kubelet
from tests.helm.test_processes import GUARD_S, PORTS, port, probe
from tests.helm.tools import Helm, Objects, one, pod
from tests.support import free_port, free_ports, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RAY_PORTS = ("redis.bundled.port", "ray.ports.gcs", "ray.ports.nodeManager")
NODE_PORTS = (  # a pod's are its own; here they must differ from the head's
    *("object-manager-port", "runtime-env-agent-port", "metrics-export-port"),
    *("dashboard-agent-listen-port", "dashboard-agent-grpc-port"),
)


STARTED = "Ray runtime started"
MOST_RESTARTS = 5
# Ray gives up a node that is not up after 30 s, and that can be changed nowhere. On a busy machine a try lasts a minute
# with all that is imported around it: there is time for every restart.
RAY_GUARD_S = 90.0 * (MOST_RESTARTS + 1)


class Release:
    """The chart's processes on this machine."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        self.objects = objects
        self.kubelet = Kubelet(objects, folder)
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, tuple[str, tuple[str, ...], int]] = {}
        self._restarts = 0
        self.node_port = free_port()

    def spec(self, component: str) -> dict[str, Any]:
        spec: dict[str, Any] = pod(self.objects, component)["spec"]
        return spec

    @property
    def url(self) -> str:
        return f"http://{POD_IP}:{port(self.spec('router'), 'http')}"

    def start(self, component: str, *more: str, container: int = 0) -> subprocess.Popen[bytes]:
        name = f"{component}.{container}" if container else component
        process = self.kubelet.start(f"{component}-0", self.spec(component), *more, container=container)
        self.running[name] = process
        self._started[name] = (component, more, container)
        return process

    def start_head(self, *more: str) -> None:
        """Head and controller, in a new pod on the old volume."""
        self.forget_cluster("head")
        before = self.log("head").count(STARTED)
        self.start("head")
        self.until(lambda: probe(self.spec("head"), "readinessProbe"), "the head is ready")
        # In a pod the controller sees one node of Ray alone; here it would take the router's while there is no other.
        self.until(lambda: self.log("head").count(STARTED) > before, "the head's own node is up")
        self.start("head", *more, container=1)

    def start_node(self) -> None:
        """A router's pod, as far as Ray's node is up."""
        self._start_node("router", self.node_port)

    def _start_node(self, component: str, node_port: int) -> None:
        self.forget_cluster(component)
        own = [f"--{name}=0" for name in NODE_PORTS]
        first = free_ports(21)
        own += [
            f"--node-manager-port={node_port}",
            f"--min-worker-port={first}",
            f"--max-worker-port={first + 20}",
        ]
        self.start(component, *own)
        spec = self.spec(component)
        spec["containers"][0]["startupProbe"]["grpc"]["port"] = node_port
        self.until(lambda: probe(spec, "startupProbe"), f"the {component}'s node is up")

    def start_worker_node(self) -> None:
        """The pod of workers on Ray, as far as its node is up."""
        self._start_node("worker", free_port())

    def forget_cluster(self, component: str) -> None:
        """Ray takes a note of an earlier head, beside the processes of others, for a head that runs."""
        shutil.rmtree(self.folder / f"{component}-0" / "tmp", ignore_errors=True)

    def is_ready(self) -> bool:
        return probe(self.spec("router"), "readinessProbe")

    def until(self, holds: Any, what: str) -> None:
        def check() -> bool:
            for name, process in list(self.running.items()):
                if process.poll() is not None:  # a kubelet starts it again; Ray gives up early on a busy machine
                    component, more, container = self._started[name]
                    self._restarts += 1
                    assert self._restarts <= MOST_RESTARTS, self.log(component, container)[-4000:]
                    self.forget_cluster(component)
                    self.start(component, *more, container=container)
            return bool(holds())

        try:
            wait_until(check, guard_s=RAY_GUARD_S, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.words()}") from error

    def words(self) -> str:
        """The end of each log, and what the controller said last."""
        ends = [*sorted(self.folder.glob("*.log")), *self.folder.glob("head-0/state/*/status.json")]
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in ends)

    def log(self, component: str, container: int = 0) -> str:
        return self.kubelet.log(f"{component}-0", container).read_text(encoding="utf-8", errors="replace")

    def router_pids(self) -> set[int]:
        """Processes of router actors below the node."""
        found = set()
        for process in psutil.Process(self.running["router"].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "RouterActor" in " ".join(process.cmdline()):
                    found.add(process.pid)
        return found

    def kill(self, name: str) -> None:
        """SIGKILL to a container: everything in it ends at once."""
        process = self.running.pop(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()

    def complete(self, **body: Any) -> dict[str, Any]:
        model = httpx.get(f"{self.url}/v1/models").raise_for_status().json()["data"][0]["id"]
        answer = httpx.post(f"{self.url}/v1/completions", json={"model": model, **body}, timeout=60)
        made: dict[str, Any] = answer.raise_for_status().json()
        return made


@contextlib.contextmanager
def made(helm: Helm, *more: str) -> Iterator[Release]:
    """A release with a simulated engine, of which nothing runs yet."""
    folder = Path(tempfile.mkdtemp(prefix="wf-k8s-", dir="/tmp"))  # Ray's sockets need short paths
    own = [f"{name}={free_port()}" for name in (*PORTS, *RAY_PORTS)]
    flags = ["engine=simulated", "kv-blocks=512", "prewarm-deadline=5s", "decode-time=50ms"]
    values = [f"secretsPath={folder}/secrets", "ray.mode=static", "listenAddress=127.0.0.1", "worker.gpu.count=0"]
    first = free_ports(110)
    values += [f"ray.ports.others={first}", f"ray.ports.workers={first + 10}"]
    objects = helm.template("--set", ",".join([*own, *values, *(f"worker.flags.{flag}" for flag in flags), *more]))
    release = Release(objects, folder)
    try:
        yield release
    finally:
        for name in list(release.running):
            release.kill(name)
        shutil.rmtree(folder, ignore_errors=True)


def test_workers_on_ray_are_placed_and_drain_with_their_node(helm: Helm) -> None:
    """The first of all: two releases on one machine take each other's nodes for their own."""
    with made(helm, "worker.placement=ray,worker.replicas=1,worker.ray.nodes=1") as release:
        release.start("valkey", "--bind", "127.0.0.1")
        (release.folder / "head-0.log").touch()
        release.start_head()
        release.start_node()
        release.start_worker_node()
        release.until(release.is_ready, "a router is ready, for a worker is")
        release.complete(prompt="to a worker on Ray", max_tokens=2)
        metrics = f"http://{POD_IP}:{port(release.spec('worker'), 'metrics-0')}/metrics"
        assert "warmfront_worker_" in httpx.get(metrics).raise_for_status().text
        node = release.running.pop("worker")
        node.terminate()
        node.wait(timeout=GUARD_S)
        assert "finished draining" in release.log("worker")
        release.until(lambda: not release.is_ready(), "no worker is left")


@pytest.fixture(scope="module")
def release(helm: Helm) -> Iterator[Release]:
    with made(helm) as running:
        running.start("valkey", "--bind", "127.0.0.1")
        running.start("worker")
        running.start("head")
        running.until(lambda: probe(running.spec("head"), "readinessProbe"), "the head is ready")
        running.until(lambda: STARTED in running.log("head"), "the head's own node is up")
        running.start_node()
        yield running


def test_a_router_s_pod_is_ready_when_the_controller_has_placed_its_router(release: Release) -> None:
    assert not release.is_ready()
    release.start("head", container=1)
    release.until(release.is_ready, "the router is ready")
    assert len(release.router_pids()) == 1


def test_the_controller_lives_by_its_probes(release: Release) -> None:
    controller = {"containers": release.spec("head")["containers"][1:]}
    assert all(probe(controller, kind) for kind in ("startupProbe", "livenessProbe"))


def test_a_request_is_answered_and_its_repetition_comes_from_the_cache(release: Release) -> None:
    cached = []
    for _ in range(2):
        answer = release.complete(prompt="Once upon a time " * 20, max_tokens=4)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 < cached[1]


def test_helm_test_passes(release: Release) -> None:
    process = release.kubelet.start("test", one(release.objects, "Pod", "-test")["spec"])
    assert process.wait(timeout=GUARD_S) == 0, release.kubelet.log("test").read_text()


def test_what_actors_log_is_in_the_log_of_their_pod(release: Release) -> None:
    assert "router listens" in release.log("router")
    release.until(lambda: "part=router-0 state=READY" in release.log("head", 1), "word of the router")


def test_nobody_joins_ray_without_the_token(release: Release) -> None:
    address = f"{POD_IP}:{port(release.spec('head'), 'gcs')}"
    code = f"import ray; ray.init(address={address!r}); print('joined', len(ray.nodes()))"
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    made = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert made.returncode != 0
    assert "joined" not in made.stdout


def test_a_new_head_finds_the_router_where_it_runs(release: Release) -> None:
    before = release.router_pids()
    for name in ("head.1", "head"):
        release.kill(name)
    release.complete(prompt="while no head is there", max_tokens=2)
    release.start_head()
    line = "part=router-0 state=READY"
    count = release.log("head", 1).count(line)
    release.until(lambda: release.log("head", 1).count(line) > count, "the controller has adopted the router")
    release.complete(prompt="under a new head", max_tokens=2)
    assert release.router_pids() == before


def roll_routers(release: Release, **settings: str) -> None:
    before = release.router_pids()
    words = release.kubelet.command("head-0", release.spec("head"), 1)[0]
    file = Path(words[words.index("--desired") + 1])
    wanted = yaml.safe_load(file.read_text(encoding="utf-8"))
    wanted["routers"]["settings"] |= settings
    file.write_text(yaml.safe_dump(wanted), encoding="utf-8")
    release.until(lambda: before.isdisjoint(release.router_pids()) and release.is_ready(), "another router is ready")


@contextlib.contextmanager
def users_of_the_service(release: Release) -> Iterator[dict[str, list[str]]]:
    """Who ask, each time over a new connection, while the readiness probe has the pod among a Service's endpoints."""
    asked = release.spec("router")["containers"][0]["readinessProbe"]
    outcomes: dict[str, list[str]] = {"answered": [], "failed": []}
    is_endpoint, is_over = threading.Event(), threading.Event()

    def kubelet() -> None:
        failures = 0
        while not is_over.wait(asked["periodSeconds"]):
            failures = 0 if release.is_ready() else failures + 1
            if not failures:
                is_endpoint.set()
            elif failures >= asked["failureThreshold"]:
                is_endpoint.clear()

    def user(number: int) -> None:
        while not is_over.wait(0.05):
            try:
                if is_endpoint.is_set():
                    release.complete(prompt=f"user {number} has a question", max_tokens=2)
                    outcomes["answered"].append("")
            except httpx.HTTPError as error:
                outcomes["failed"].append(repr(error))

    threads = [threading.Thread(target=kubelet), *(threading.Thread(target=user, args=(n,)) for n in range(3))]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_changed_flags_are_rolled_out_without_a_new_pod_or_a_refused_connection(release: Release) -> None:
    roll_routers(release, **{"drain-notice": "10s"})  # longer than the probe needs to see it, on a busy machine too
    with users_of_the_service(release) as outcomes:
        wait_until(lambda: len(outcomes["answered"]) >= 5, guard_s=GUARD_S, what="the first answers")
        roll_routers(release, policy="longest_prefix")
        count = len(outcomes["answered"])
        wait_until(lambda: len(outcomes["answered"]) > count + 5, guard_s=GUARD_S, what="answers by the new one")
    assert outcomes["failed"] == []


def test_a_node_that_is_shut_down_lets_its_router_s_answers_end(release: Release) -> None:
    answers: list[dict[str, Any]] = []
    asked = threading.Thread(
        target=lambda: answers.append(release.complete(prompt="a long answer", max_tokens=60, ignore_eos=True))
    )
    asked.start()
    wait_until(
        lambda: any(item["running"] for item in httpx.get(f"{release.url}/v1/replicas").json()["replicas"]),
        guard_s=GUARD_S,
        what="the request runs",
    )
    node = release.running.pop("router")
    node.terminate()
    asked.join(GUARD_S)
    assert answers[0]["usage"]["completion_tokens"] == 60
    release.until(lambda: "part was drained part=router-0" in release.log("head"), "the router has ended")
    node.wait(timeout=GUARD_S)
    assert "finished draining" in release.log("router")


def test_the_next_node_gets_a_router(release: Release) -> None:
    release.start_node()
    release.until(release.is_ready, "a router is ready on the new node")
    release.complete(prompt="on a new node", max_tokens=2)


def test_routers_of_a_fleet_that_was_replaced_serve_until_their_nodes_end(release: Release) -> None:
    """What happens to the old pods of a release whose contract has changed."""
    words = release.kubelet.command("head-0", release.spec("head"), 1)[0]
    text = Path(words[words.index("--desired") + 1]).read_text(encoding="utf-8")
    wanted = yaml.safe_load(text)
    wanted["fleet"] += "-new"
    wanted["routers"]["resources"] = {"of_the_new_nodes": 1}
    folder = release.folder / "new"
    folder.mkdir()
    (folder / "desired.yaml").write_text(yaml.safe_dump(wanted), encoding="utf-8")
    for name in ("head.1", "head"):
        release.kill(name)
    release.start_head("--desired", f"{folder}/desired.yaml", "--state-dir", str(folder))
    release.until(lambda: (folder / "status.json").exists(), "the controller of the new fleet runs")
    release.complete(prompt="from the old fleet", max_tokens=2)
    node = release.running.pop("router")
    node.terminate()
    node.wait(timeout=GUARD_S)
    assert "finished draining" in release.log("router")
