"""The Ray side: a router inside an actor, and the controller that replaces workers that hang. No model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.controller import MAX_STRIKES, WorkerHealth

ray = pytest.importorskip("ray")


def test_a_worker_that_loads_its_model_gets_no_strikes_until_its_time_is_over() -> None:
    health = WorkerHealth(started_s=0)
    assert not any(health.observe("loading", now, start_timeout_s=100) for now in range(50))
    assert health.strikes == 0
    assert [health.observe("loading", 100 + n, start_timeout_s=100) for n in range(MAX_STRIKES)] == [False, False, True]
    assert health.restarts == 1


def test_a_good_answer_takes_strikes_back() -> None:
    health = WorkerHealth(started_s=0)
    health.observe("", 1, 100)
    health.observe("hung", 2, 100)
    health.observe("hung", 3, 100)
    assert health.strikes == 2
    health.observe("", 4, 100)
    assert health.strikes == 0
    assert not health.observe("hung", 5, 100)


def test_a_new_process_may_take_its_time_again() -> None:
    health = WorkerHealth(started_s=0)
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


def wait_for(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.1)
    return value


def test_a_router_actor_serves_answers_pings_and_drains(local_ray: None, redis_url: str) -> None:
    from router.actor import start_router_actor
    from router.config import RouterConfig

    config = RouterConfig(redis_url=redis_url, fleet="actors", router_id="r0", http_port=0, grpc_port=0)
    actor = start_router_actor(config)
    endpoints = ray.get(actor.ping.remote())
    assert httpx.get(endpoints["http"] + "/healthz").status_code == 200
    assert httpx.get(endpoints["http"] + "/readyz").status_code == 503
    assert "no replica is registered" in endpoints["not_ready"]
    ray.get(actor.drain.remote())
    with pytest.raises(httpx.ConnectError):
        httpx.get(endpoints["http"] + "/healthz")
    ray.kill(actor)


def test_a_router_actor_that_is_killed_comes_back_on_its_ports(local_ray: None, redis_url: str) -> None:
    from router.actor import start_router_actor
    from router.config import RouterConfig
    from tests.router.conftest import free_port

    port = free_port()
    config = RouterConfig(redis_url=redis_url, fleet="actors", router_id="r1", http_port=port, grpc_port=0)
    actor = start_router_actor(config)
    pid = ray.get(actor.ping.remote())["pid"]
    os.kill(pid, 9)

    def is_back() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    wait_for(lambda: not is_back())
    wait_for(is_back)
    ray.kill(actor)


def test_the_controller_replaces_a_worker_that_hangs(local_ray: None) -> None:
    from router.controller import WatchTiming, WorkerSpec, start_controller
    from tests.fakes.ray_worker import launch

    timing = WatchTiming(period_s=0.2, deadline_s=0.5, start_timeout_s=30)
    controller = start_controller(launch, [WorkerSpec(name="w0")], name="controller", timing=timing)
    worker = wait_for(lambda: ray.get_actor("w0") if ray.get(controller.report.remote()) else None)
    wait_for(lambda: ray.get(controller.report.remote())[0]["is_serving"])
    pid = ray.get(worker.ping.remote())["pid"]
    worker.hang.remote()
    wait_for(lambda: ray.get(controller.report.remote())[0]["restarts"] == 1)
    wait_for(lambda: ray.get(controller.report.remote())[0]["is_serving"])
    assert ray.get(worker.ping.remote())["pid"] != pid
    ray.get(controller.set_workers.remote([]))
    assert ray.get(controller.report.remote()) == []
    ray.kill(controller)


def test_a_killed_worker_that_loads_for_longer_than_the_strikes_starts_once(local_ray: None) -> None:
    from router.controller import WatchTiming, WorkerSpec, start_controller
    from tests.fakes.ray_worker import launch

    timing = WatchTiming(period_s=0.2, deadline_s=0.5, start_timeout_s=60)
    spec = WorkerSpec(name="slow", settings={"starts_s": 4.0, "loads_s": 2.0})
    controller = start_controller(launch, [spec], name="controller-3", timing=timing)

    def is_serving() -> bool:
        (one,) = ray.get(controller.report.remote())
        return bool(one["is_serving"])

    wait_for(is_serving)
    os.kill(ray.get(ray.get_actor("slow").ping.remote())["pid"], 9)
    wait_for(lambda: not is_serving())
    wait_for(is_serving)
    assert ray.get(controller.report.remote())[0]["restarts"] == 0
    ray.get(controller.set_workers.remote([]))
    ray.kill(controller)


def test_a_drained_actor_stays_away_and_one_that_could_not_be_made_is_made_anew(
    local_ray: None, tmp_path: Path
) -> None:
    from router.controller import WatchTiming, WorkerSpec, start_controller
    from tests.fakes.ray_worker import launch

    flag = tmp_path / "model"
    specs = [WorkerSpec(name="drained"), WorkerSpec(name="broken", settings={"needs": str(flag)})]
    timing = WatchTiming(period_s=0.2, deadline_s=1.0, start_timeout_s=1)
    controller = start_controller(launch, specs, name="controller-2", timing=timing)

    def report() -> dict[str, Any]:
        return {one["name"]: one for one in ray.get(controller.report.remote())}

    wait_for(lambda: report()["drained"]["is_serving"])
    ray.get_actor("drained").drain.remote()
    wait_for(lambda: "drained" not in report())
    wait_for(lambda: report()["broken"]["restarts"] >= 1)
    flag.touch()
    wait_for(lambda: report()["broken"]["is_serving"])
    ray.get(controller.set_workers.remote([]))
    ray.kill(controller)
