"""The Ray side: a router inside an actor, and the controller that replaces workers that hang. No model."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from router.controller import STATUS_FILE, Controller
from router.launcher import MAX_STRIKES, Desired, Health, Launcher
from router.reconcile import Group
from tests.support import wait_until

ray = pytest.importorskip("ray")

WorkerSettings: TypeAlias = dict[str, Any]


def test_a_worker_that_loads_its_model_gets_no_strikes_until_its_time_is_over() -> None:
    health = Health(started_s=0)
    assert not any(health.observe("loading", now, start_timeout_s=100) for now in range(50))
    assert health.strikes == 0
    assert [health.observe("loading", 100 + n, start_timeout_s=100) for n in range(MAX_STRIKES)] == [False, False, True]
    assert health.restarts == 1


def test_a_good_answer_takes_strikes_back() -> None:
    health = Health(started_s=0)
    health.observe("", 1, 100)
    health.observe("hung", 2, 100)
    health.observe("hung", 3, 100)
    assert health.strikes == 2
    health.observe("", 4, 100)
    assert health.strikes == 0
    assert not health.observe("hung", 5, 100)


def test_a_new_process_may_take_its_time_again() -> None:
    health = Health(started_s=0)
    health.observe("", 1, 100)
    assert [health.observe("hung", 2, 100) for _ in range(MAX_STRIKES - 1)] == [False, False]
    health.begin_boot(now=200, boot=7)
    assert not any(health.observe("loading", now, start_timeout_s=100) for now in range(201, 300))
    assert (health.strikes, health.restarts) == (0, 0)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0", RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    root = Path.cwd()
    os.environ["PYTHONPATH"] = f"{root}{os.pathsep}{root}/proto"
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=2,
        object_store_memory=100 << 20,
        log_to_driver=False,
        namespace="router-tests",
    )
    yield
    ray.shutdown()


def desired(*workers: WorkerSettings, redis_url: str = "redis://127.0.0.1:1/0", count: int | None = None) -> Desired:
    """One group of fake workers. Redis need not be there: the controller goes on without."""
    (settings,) = workers or ({},)
    group = Group(role="worker", count=1 if count is None else count, settings=settings)
    return Desired(fleet=uuid.uuid4().hex[:8], redis_url=redis_url, groups=(group,))


@contextmanager
def controlled(
    wish: Desired, folder: Path, make_launcher: Callable[[Desired], Launcher] | None = None
) -> Iterator[tuple[list[Desired], Callable[[], dict[str, Any]]]]:
    """A controller here, of fake workers by default; change the one wish in the list, call for its status."""
    from tests.fakes.ray_worker import launcher

    wishes = [wish]
    controller = Controller(lambda: wishes[0], make_launcher or launcher, folder, period_s=0.2)

    def status() -> dict[str, Any]:
        path = folder / STATUS_FILE
        return json.loads(path.read_text()) if path.exists() else {"parts": [], "groups": {}}

    try:
        yield wishes, status
    finally:
        wishes[0] = replace(wishes[0], groups=(replace(wishes[0].groups[0], count=0),))
        wait_until(lambda: not status()["parts"])
        controller.stop()


def part(status: dict[str, Any], name: str = "w0") -> dict[str, Any]:
    return next((one for one in status["parts"] if one["name"] == name), {"state": "", "restarts": 0, "pid": 0})


def test_a_router_actor_serves_answers_pings_and_drains(local_ray: None, redis_url: str) -> None:
    from router.actor import RouterActor
    from router.config import RouterConfig

    make = partial(RouterConfig, redis_url=redis_url, fleet="actors", router_id="r0", http_port=0, grpc_port=0)
    actor = ray.remote(RouterActor).options(max_concurrency=4, num_cpus=0).remote(make)
    endpoints = ray.get(actor.ping.remote())
    assert httpx.get(endpoints["http"] + "/healthz").status_code == 200
    assert httpx.get(endpoints["http"] + "/readyz").status_code == 503
    assert "no replica is registered" in endpoints["not_ready"]
    assert endpoints["state"] == "READY", "without a worker no router can be more ready"
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(actor.drain.remote())
    with pytest.raises(httpx.ConnectError):
        httpx.get(endpoints["http"] + "/healthz")


def test_a_router_actor_that_is_killed_comes_back_on_its_ports(local_ray: None, redis_url: str) -> None:
    from router.actor import RouterActor
    from router.config import RouterConfig
    from tests.support import free_port

    port = free_port()
    make = partial(RouterConfig, redis_url=redis_url, fleet="actors", router_id="r1", http_port=port, grpc_port=0)
    actor = ray.remote(RouterActor).options(max_concurrency=4, num_cpus=0, max_restarts=-1).remote(make)
    pid = ray.get(actor.ping.remote())["pid"]
    os.kill(pid, 9)

    def is_back() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(lambda: not is_back())
    wait_until(is_back)
    ray.kill(actor)


def test_the_controller_replaces_a_worker_that_hangs(local_ray: None, tmp_path: Path) -> None:
    wish = desired()
    with controlled(wish, tmp_path) as (_, status):
        wait_until(lambda: part(status())["state"] == "READY")
        pid = part(status())["pid"]
        ray.get_actor(f"{wish.fleet}/worker/w0/{wish.groups[0].revision}").hang.remote()
        wait_until(lambda: part(status())["restarts"] == 1)
        wait_until(lambda: part(status())["state"] == "READY" and part(status())["pid"] != pid)


def test_the_controller_replaces_a_router_whose_servers_hang_while_ray_still_answers_for_it(
    local_ray: None, redis_url: str, tmp_path: Path
) -> None:
    from tests.fakes.ray_router import launcher

    settings = {"redis": redis_url, "fleet": "hung", "http_port": 0, "grpc_port": 0}
    group = Group(role="router", count=1, settings=settings)
    wish = Desired(fleet="hung", redis_url=redis_url, groups=(group,))
    with controlled(wish, tmp_path, launcher) as (_, status):
        wait_until(lambda: part(status(), "router-0")["state"] == "READY")
        pid = part(status(), "router-0")["pid"]
        ray.get(ray.get_actor(f"hung/router/router-0/{group.revision}").hang.remote())
        wait_until(lambda: part(status(), "router-0")["restarts"] == 1)
        assert "its event loop has not turned" in part(status(), "router-0")["why_ended"]
        wait_until(lambda: part(status(), "router-0")["state"] == "READY" and part(status(), "router-0")["pid"] != pid)


def test_a_killed_worker_that_loads_for_longer_than_the_strikes_starts_once(local_ray: None, tmp_path: Path) -> None:
    with controlled(desired({"starts_s": 4.0, "loads_s": 2.0}), tmp_path) as (_, status):
        wait_until(lambda: part(status())["state"] == "READY")
        pid = part(status())["pid"]
        os.kill(pid, 9)
        wait_until(lambda: part(status())["state"] != "READY")
        wait_until(lambda: part(status())["state"] == "READY" and part(status())["pid"] != pid)
        assert part(status())["restarts"] == 0


def test_a_drained_actor_stays_away_until_the_count_changes(local_ray: None, tmp_path: Path) -> None:
    wish = desired(count=2)
    with controlled(wish, tmp_path) as (wishes, status):
        wait_until(lambda: status()["groups"].get("worker", {}).get("ready") == 2)
        ray.get_actor(f"{wish.fleet}/worker/w0/{wish.groups[0].revision}").drain.remote()
        wait_until(lambda: status()["groups"]["worker"]["held_out"] == ["w0"])
        assert [one["name"] for one in status()["parts"]] == ["w1"]
        wishes[0] = replace(wish, groups=(replace(wish.groups[0], count=3),))
        wait_until(lambda: status()["groups"]["worker"]["ready"] == 3)


def test_an_actor_that_could_not_be_made_is_made_anew(local_ray: None, tmp_path: Path) -> None:
    flag = tmp_path / "model"
    with controlled(desired({"needs": str(flag)}), tmp_path) as (_, status):
        wait_until(lambda: "FileNotFoundError" in part(status()).get("fault", ""))
        flag.touch()
        wait_until(lambda: part(status())["state"] == "READY")


def test_a_controller_that_is_killed_adopts_what_runs_and_goes_on(local_ray: None, tmp_path: Path) -> None:
    """Its successor starts nothing anew, and still knows what to go back to."""
    from tests.fakes.ray_worker import launcher

    wish = desired(count=2)
    first = Controller(lambda: wish, launcher, tmp_path, period_s=0.2)
    status_file = tmp_path / STATUS_FILE
    wait_until(lambda: status_file.exists() and json.loads(status_file.read_text())["groups"]["worker"]["ready"] == 2)
    pids = {one["name"]: one["pid"] for one in json.loads(status_file.read_text())["parts"]}
    first.stop()  # as good as killed: it leaves nothing but its files
    with controlled(wish, tmp_path) as (wishes, status):
        wait_until(lambda: status()["groups"]["worker"]["ready"] == 2)
        assert {one["name"]: one["pid"] for one in status()["parts"]} == pids
        bad = replace(wish.groups[0], settings={"fault": "it cannot be"})
        wishes[0] = replace(wish, groups=(bad,))
        wait_until(lambda: status()["groups"]["worker"]["phase"] == "rolled back")
        assert status()["groups"]["worker"]["why"] == "w2: it cannot be"
        assert {one["name"]: one["pid"] for one in status()["parts"]} == pids
        good = replace(wish.groups[0], settings={"other": 1})
        wishes[0] = replace(wish, groups=(good,))
        wait_until(lambda: status()["groups"]["worker"]["phase"] == "steady")
        assert not {one["pid"] for one in status()["parts"]} & set(pids.values())
        assert {one["revision"] for one in status()["parts"]} == {good.revision}


def test_an_orphan_whose_id_a_newer_boot_holds_stops_serving_and_does_not_come_back(
    local_ray: None, redis_url: str, tmp_path: Path
) -> None:
    import redis
    from warmfront_pb.v1 import common_pb2

    from common.redis_keys import FleetKeys
    from warmfront.actors import RayLauncher

    settings = {"redis": redis_url, "engine": "simulated", "model": "bytes", "kv_blocks": 100, "heartbeat": "200ms"}
    group = Group(role="worker", count=1, settings=settings)
    wish = Desired(fleet="default", redis_url=redis_url, groups=(group,))
    controller = Controller(lambda: wish, RayLauncher, tmp_path, period_s=0.2)
    status_file = tmp_path / STATUS_FILE

    def status() -> dict[str, Any]:
        return json.loads(status_file.read_text()) if status_file.exists() else {"parts": []}

    try:
        wait_until(lambda: part(status())["state"] == "READY")
        address = part(status())["address"]
        with redis.Redis.from_url(redis_url) as client:
            newer = common_pb2.ReplicaLease(replica="w0", generation="ffffffffffff-000000", state=common_pb2.READY)
            client.set(FleetKeys("default").replica("w0"), newer.SerializeToString(), px=60_000)
            wait_until(lambda: status()["groups"]["worker"]["held_out"] == ["w0"])
            assert status()["parts"] == [], "no other takes the id back"
            kept = client.get(FleetKeys("default").replica("w0"))
            assert kept == newer.SerializeToString(), "the newer one's lease is left alone"
            client.delete(FleetKeys("default").replica("w0"))
        host, port = address.split(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5)
    finally:
        controller.stop()
