"""The chart's own containers as local processes: what it renders is what the program takes, and it serves."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import redis
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.config import RouterConfig
from tests.fakes.authority import Authority
from tests.helm import tools
from tests.helm.kubelet import POD_IP, Kubelet
from tests.helm.tools import Helm, Objects, one
from tests.support import free_port, wait_until
from warmfront import parts
from warmfront.desired import parse
from warmfront.options import fill
from worker.config import WorkerConfig

GUARD_S = 120.0
PORTS = ("router.ports.http", "router.ports.grpc", "router.ports.metrics", "worker.ports.grpc", "worker.ports.metrics")


def pod(objects: Objects, component: str) -> dict[str, Any]:
    spec: dict[str, Any] = tools.pod(objects, component)["spec"]
    return spec


def port(spec: dict[str, Any], name: str) -> int:
    return next(item["containerPort"] for item in spec["containers"][0]["ports"] if item["name"] == name)


def probe(spec: dict[str, Any], kind: str) -> bool:
    """Whether the first container passes this probe now."""
    asked = spec["containers"][0][kind]
    try:
        if "grpc" in asked:
            with grpc.insecure_channel(f"127.0.0.1:{asked['grpc']['port']}") as channel:
                said = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
                return bool(said.status == health_pb2.HealthCheckResponse.SERVING)
        url = f"http://127.0.0.1:{port(spec, asked['httpGet']['port'])}{asked['httpGet']['path']}"
        return httpx.get(url, timeout=10).status_code == 200
    except (grpc.RpcError, httpx.HTTPError):
        return False


@pytest.fixture(scope="module")
def release(helm: Helm) -> Objects:
    """Everything as by default, but for a simulated engine, loopback, ports of this machine, and a secret hash seed."""
    own = [f"{name}={free_port()}" for name in (*PORTS, "redis.bundled.port")]
    return helm.template("--set", ",".join([*own, *OWN, "cache.hashAlgorithm=xxhash_cbor"]))


@pytest.fixture(scope="module")
def kubelet(release: Objects, tmp_path_factory: pytest.TempPathFactory) -> Kubelet:
    return Kubelet(release, tmp_path_factory.mktemp("kubelet"))


EXISTING = {
    "warmfront-secrets": {"worker-token": b"a token of 16 b.", "hash-seed": b"a seed", "ray-token": b"a token"},
    "public-tls": {"tls.crt": b"", "tls.key": b""},
    "clients-ca": {"ca.crt": b""},
    "wf-warmfront-worker-tls": {"tls.crt": b"", "tls.key": b"", "ca.crt": b""},
    "wf-warmfront-router-tls": {"tls.crt": b"", "tls.key": b"", "ca.crt": b""},
    "warmfront-redis": {
        f"{name}url": b"rediss://user:password@redis.data.svc:6380/0" for name in ("", "router-", "worker-", "reader-")
    },
}


@pytest.mark.parametrize("component", ["router", "worker"])
def test_the_program_takes_what_every_scenario_gives_it(
    scenarios: dict[str, Objects], component: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, objects in scenarios.items():
        kubelet = Kubelet(objects, tmp_path / name, EXISTING)
        words, env = kubelet.command(f"{component}-0", pod(objects, component))
        if words[0] == "ray":
            continue
        with monkeypatch.context() as patch:
            for variable, value in env.items():
                patch.setenv(variable, value)
            command = {"router": parts.router, "worker": parts.worker}[component]
            params = command.make_context(component, words[2:]).params
            config: RouterConfig | WorkerConfig = fill(
                {"router": RouterConfig, "worker": WorkerConfig}[component], params
            )
        assert words[:2] == ["warmfront", component]
        assert config.worker_token
        assert config.redis_url.startswith(("redis://", "rediss://"))


@pytest.mark.parametrize("name", ["ray", "ray-workers", "kuberay"])
def test_the_controller_takes_the_desired_state_of_every_scenario(
    scenarios: dict[str, Objects], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMFRONT_REDIS", "redis://r:6379/0")
    text = one(scenarios[name], "ConfigMap", "-desired")["data"]["desired.yaml"]
    (tmp_path / "hash-seed").write_text("a seed")  # the head's pod has it
    text = text.replace("/run/secrets/warmfront", str(tmp_path))
    groups = {group.role: group for group in parse(yaml.safe_load(text)).groups}
    assert groups["router"].each_node
    if "worker" in groups:
        assert groups["worker"].rollout.surge == (name == "ray-workers")
    assert ("worker" in groups) is (name != "ray")


Running = dict[str, subprocess.Popen[bytes]]
OWN = ["worker.flags.engine=simulated", "worker.flags.kv-blocks=512", "worker.flags.prewarm-deadline=5s"]
OWN += ["ray.mode=none", "listenAddress=127.0.0.1", "worker.gpu.count=0"]


@pytest.fixture(scope="module")
def running(release: Objects, kubelet: Kubelet) -> Iterator[Running]:
    with started(release, kubelet) as processes:
        yield processes


@contextlib.contextmanager
def started(release: Objects, kubelet: Kubelet) -> Iterator[Running]:
    """Valkey, one worker and one router, all of them ready by their own probes."""
    valkey, worker, router = (pod(release, name) for name in ("valkey", "worker", "router"))
    with (
        kubelet.run("valkey-0", valkey, "--bind", "127.0.0.1") as valkey_process,
        kubelet.run("worker-0", worker) as worker_process,
        kubelet.run("router-0", router) as router_process,
    ):
        processes = {"valkey": valkey_process, "worker": worker_process, "router": router_process}
        for name, spec in (("worker", worker), ("router", router)):

            def is_ready(name: str = name, spec: dict[str, Any] = spec) -> bool:
                log = kubelet.log(f"{name}-0")
                assert processes[name].poll() is None, f"{name} ended:\n{log.read_text()}"
                return all(probe(spec, kind) for kind in ("startupProbe", "readinessProbe", "livenessProbe"))

            wait_until(is_ready, guard_s=GUARD_S, what=f"{name} is ready; {kubelet.log(f'{name}-0')}")
        yield processes


def test_the_password_of_redis_is_asked_for_and_stands_in_nobody_s_arguments(
    release: Objects, running: Running, kubelet: Kubelet
) -> None:
    valkey = pod(release, "valkey")
    password = kubelet.command("valkey-0", valkey)[1]["REDIS_PASSWORD"]
    for process in running.values():
        assert password.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    with redis.Redis(port=port(valkey, "redis")) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    with redis.Redis(port=port(valkey, "redis"), password=password) as client:
        assert client.ping()
        assert client.config_get("maxmemory-policy", "save") == {"maxmemory-policy": "noeviction", "save": ""}


def test_a_request_is_answered_and_its_repetition_comes_from_the_cache(release: Objects, running: Running) -> None:
    url = f"http://127.0.0.1:{port(pod(release, 'router'), 'http')}/v1"
    model = httpx.get(f"{url}/models").raise_for_status().json()["data"][0]["id"]
    body = {"model": model, "prompt": "Once upon a time " * 20, "max_tokens": 4}
    cached = []
    for _ in range(2):
        answer = httpx.post(f"{url}/completions", json=body, timeout=60).raise_for_status().json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 < cached[1]


def test_the_replica_has_the_pod_s_name_and_address(release: Objects, running: Running) -> None:
    url = f"http://127.0.0.1:{port(pod(release, 'router'), 'http')}/v1/replicas"
    said = httpx.get(url).raise_for_status().json()
    (replica,) = said["replicas"]
    assert (
        said["fleet"]
        == one(release, "Deployment", "-router")["spec"]["template"]["metadata"]["annotations"]["warmfront/fleet"]
    )
    assert (replica["id"], replica["state"]) == ("worker-0", "READY")
    assert replica["address"] == f"127.0.0.1:{port(pod(release, 'worker'), 'grpc')}"


def test_metrics_are_where_the_monitors_look(release: Objects, running: Running) -> None:
    for component in ("router", "worker"):
        text = httpx.get(f"http://127.0.0.1:{port(pod(release, component), 'metrics')}/metrics").raise_for_status().text
        assert f"warmfront_{component}_" in text


def test_helm_test_passes(release: Objects, running: Running, kubelet: Kubelet) -> None:
    process = kubelet.start("test", one(release, "Pod", "-test")["spec"])
    assert process.wait(timeout=GUARD_S) == 0, kubelet.log("test").read_text()
    assert "worker-0" in kubelet.log("test").read_text()


def test_sigterm_ends_both_in_good_order_worker_first(running: Running, kubelet: Kubelet) -> None:
    for name in ("worker", "router"):
        running[name].send_signal(signal.SIGTERM)
        assert running[name].wait(timeout=GUARD_S) == 0, kubelet.log(f"{name}-0").read_text()


def test_a_wrong_argument_would_be_noticed(release: Objects, tmp_path: Path) -> None:
    kubelet = Kubelet(release, tmp_path)
    process = kubelet.start("bad", pod(release, "router"), "--no-such-flag")
    assert process.wait(timeout=GUARD_S) == 2


@pytest.mark.slow
def test_a_release_on_tls_is_ready_by_its_probes_and_serves(helm: Helm, tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    def secret(name: str, *hosts: str) -> dict[str, bytes]:
        pair = authority.issue(name, *hosts)
        content = {"tls.crt": pair.cert, "tls.key": pair.key, "ca.crt": authority.ca}
        return {key: path.read_bytes() for key, path in content.items()}

    secrets = {
        "public": secret("public", POD_IP),
        "workers": secret("workers", "wf-warmfront-worker"),
        "routers": secret("routers", "wf-warmfront-router"),
    }
    own = [f"{name}={free_port()}" for name in (*PORTS, "redis.bundled.port")]
    tls = ["tls.public.enabled=true,tls.public.existingSecret=public", "tls.workers.enabled=true"]
    tls += ["tls.workers.existingSecret=workers,tls.workers.routerSecret=routers"]
    release = helm.template("--set", ",".join([*own, *OWN, *tls]))
    kubelet = Kubelet(release, tmp_path / "kubelet", secrets)
    with started(release, kubelet):
        process = kubelet.start("test", one(release, "Pod", "-test")["spec"])
        assert process.wait(timeout=GUARD_S) == 0, kubelet.log("test").read_text()
        url = f"http://{POD_IP}:{port(pod(release, 'router'), 'http')}/healthz"
        with pytest.raises(httpx.HTTPError):
            httpx.get(url)
