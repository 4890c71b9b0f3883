"""An engine that hangs while its lease lives on: what waits there goes elsewhere, and nothing new is sent there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from warmfront_pb.v1 import common_pb2

from router.attempt import is_unheard
from router.load import LoadBook
from tests.fakes.simulated_worker import SimulatedWorker
from tests.router.conftest import Cluster
from tests.support import until
from worker.config import WorkerConfig
from worker.main import EXIT_OK, Worker
from worker.simulated import BYTES

BODY: dict[str, Any] = {"prompt": "once upon a time " * 4, "max_tokens": 20, "seed": 7}
TOKEN = "a token of real workers"


def ask(cluster: Cluster, number: int, **more: Any) -> asyncio.Task[httpx.Response]:
    body = {**BODY, "prompt": f"{number} " * 30, **more}
    return asyncio.create_task(cluster.http.post("/v1/completions", json=body))


async def texts(tasks: list[asyncio.Task[httpx.Response]]) -> list[str]:
    responses = await asyncio.gather(*tasks)
    assert {response.status_code for response in responses} == {200}, [response.text for response in responses]
    return [response.json()["choices"][0]["text"] for response in responses]


def hang(worker: SimulatedWorker) -> None:
    worker.faults.is_hung = True
    worker.faults.hung_s = 7.0


def go_on(worker: SimulatedWorker) -> None:
    worker.faults.is_hung = False
    worker.faults.hung_s = 0.0


async def test_streams_go_on_and_waiting_requests_are_answered_elsewhere_and_nothing_new_is_sent_there(
    cluster: Cluster,
) -> None:
    for name in ("w0", "w1"):
        await cluster.add_worker(name, decode_s=0.01)
    router = await cluster.add_router()
    sick, sound = cluster.workers["w0"], cluster.workers["w1"]
    expected = await texts([ask(cluster, number) for number in range(12)])
    await until(cluster.index_is_true)

    tasks = [ask(cluster, number) for number in range(12)]
    await until(lambda: sick.running > 0 and len(sick.requests) + len(sound.requests) == 24)
    sick.faults.is_hung = True  # some streams are under way there
    waiting = ask(cluster, 99, prompt=sick.tokenizer.decode(memoryview(sick.requests[-1].token_ids).cast("I").tolist()))
    await until(lambda: len(sick.requests) + len(sound.requests) == 25)
    sick.faults.hung_s = 7.0
    assert await texts(tasks) == expected
    assert (await waiting).status_code == 200

    seen = len(sick.requests)
    assert len(set(await texts([ask(cluster, number) for number in range(12)]))) > 1
    assert len(sick.requests) == seen
    explained = (await cluster.http.post("/v1/explain", json={"prompt": "x" * 100})).json()
    reasons = {one["replica"]: (one["reason"], one["detail"]) for one in explained["replicas"]}
    assert reasons["w0"] == ("hung", "one step of its engine has run for 7 s")
    listed = {one["id"]: one["fault"] for one in (await cluster.http.get("/v1/replicas")).json()["replicas"]}
    assert listed == {"w0": "one step of its engine has run for 7 s", "w1": ""}
    assert "warmfront_router_replicas_hung 1.0" in router.metrics.text().decode()
    assert cluster.load == 0

    go_on(sick)
    await until(lambda: not router.fleet.hung)
    await texts([ask(cluster, number) for number in range(100, 112)])
    assert len(sick.requests) > seen


async def test_where_nobody_else_can_answer_a_request_waits_until_the_engine_goes_on(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    router = await cluster.add_router()
    hang(worker)
    await until(lambda: "w0" in router.fleet.hung)
    task = ask(cluster, 1)
    await until(lambda: len(worker.requests) == 1)
    await asyncio.sleep(0.3)  # a dozen looks at its lease
    assert not task.done()
    go_on(worker)
    await texts([task])
    assert len(worker.requests) == 1


async def test_what_waits_at_a_hung_replica_leaves_as_soon_as_another_one_is_ready(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0", decode_s=0.01)
    router = await cluster.add_router()
    tasks = [ask(cluster, number, **more) for number, more in enumerate([{}, {}, {"n": 2}])]
    await until(lambda: worker.running == 3)
    hang(worker)
    await until(lambda: "w0" in router.fleet.hung)
    await cluster.add_worker("w1")
    await texts(tasks[:2])
    await asyncio.sleep(0.1)
    assert not tasks[2].done() or tasks[2].result().headers["x-warmfront-replica"] == "w1"  # two choices cannot move
    go_on(worker)
    await texts(tasks[2:])
    assert cluster.load == 0


async def test_a_request_leaves_hung_replicas_twice_at_most_and_an_answer_moves_once(cluster: Cluster) -> None:
    for number in range(4):
        await cluster.add_worker(f"w{number}")
    router = await cluster.add_router()
    for worker in cluster.workers.values():
        worker.faults.is_hung = True
    task = ask(cluster, 1)
    for tries in (1, 2, 3):
        await until(lambda tries=tries: sum(len(worker.requests) for worker in cluster.workers.values()) == tries)  # type: ignore[misc]
        for worker in cluster.workers.values():
            worker.faults.hung_s = 7.0 if worker.requests else 0.0
    await until(lambda: len(router.fleet.hung) == 3)
    await asyncio.sleep(0.2)
    assert not task.done()
    assert sum(len(worker.requests) for worker in cluster.workers.values()) == 3
    for worker in cluster.workers.values():
        go_on(worker)
    await texts([task])
    assert 'warmfront_router_retries_total{reason="hung"} 2.0' in router.metrics.text().decode()
    assert not any(member.breaker.is_troubled for member in router.fleet.members.values())


def test_a_replica_that_gives_nobody_a_first_token_is_at_fault_after_far_more_than_what_waits_there_takes() -> None:
    loads = LoadBook()
    load = loads.of("w0")
    tickets = [loads.charge("w0", 100, (), 0.0) for _ in range(4)]
    tickets[0].first_token(0.1)  # a thousand tokens per second
    assert not is_unheard(load, 5.1) and is_unheard(load, 5.2)
    loads.charge("w0", 100_000, (), 5.2)  # a long prompt: ten times its 100 s
    assert not is_unheard(load, 1000.0) and is_unheard(load, 1010.0)
    for ticket in tickets:
        ticket.close(1010.0)
    assert is_unheard(load, 1010.0)


@pytest.mark.slow  # its deadline is the patience that it tests
async def test_a_replica_at_which_deadlines_pass_in_silence_is_left_alone_even_where_no_lease_tells(
    cluster: Cluster,
) -> None:
    for name in ("w0", "w1"):
        await cluster.add_worker(name)
    router = await cluster.add_router()
    sick = cluster.workers["w0"]
    sick.faults.is_hung = True
    tasks = [ask(cluster, number) for number in range(6)]
    await until(lambda: len(sick.requests) >= 2)
    impatient = [
        asyncio.create_task(
            cluster.http.post(
                "/v1/completions", json={**BODY, "prompt": f"{n} " * 40}, headers={"x-request-timeout": "6s"}
            )
        )
        for n in range(6)
    ]
    codes = {(await task).status_code for task in impatient}
    assert codes == {200, 504}
    assert router.fleet.members["w0"].breaker.is_troubled
    go_on(sick)
    await texts(tasks)


@asynccontextmanager
async def real_worker(
    cluster: Cluster, replica: str, fault: str | None = None, **settings: Any
) -> AsyncIterator[Worker]:
    """A whole worker of ours around a simulated engine, less patient with its steps than usual."""
    config = WorkerConfig(
        redis_url=cluster.redis_url,
        fleet=cluster.fleet,
        replica_id=replica,
        worker_token=TOKEN,
        engine="simulated",
        model=BYTES,
        kv_blocks=2000,
        decode_time_s=0.02,
        heartbeat_s=0.1,
        lease_s=1.0,
        fault=fault,
        **settings,
    )
    worker = Worker(config, hung_after_s=0.5)
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.drain(0.0)
        assert await running == EXIT_OK


async def test_an_engine_that_hangs_in_the_middle_of_its_answers_costs_nobody_an_answer(cluster: Cluster) -> None:
    async with real_worker(cluster, "w0", "hang:60") as sick, real_worker(cluster, "w1"):
        router = await cluster.add_router(worker_token=TOKEN)
        await until(lambda: len(router.fleet.ready) == 2)
        answers = await texts([ask(cluster, number, ignore_eos=True) for number in range(16)])
        assert "warmfront_router_failovers_total 0.0" not in router.metrics.text().decode()
        await texts([ask(cluster, number, ignore_eos=True) for number in range(100, 116)])
        await until(lambda: set(router.fleet.hung) == {"w0"})
        assert router.fleet.loads.of("w0").in_flight == 0
        assert await texts([ask(cluster, number, ignore_eos=True) for number in range(16)]) == answers
        assert cluster.load == 0
        assert router.fleet.members["w0"].replica.is_ready  # its lease lives
        assert sick.replica.state == common_pb2.READY


async def test_a_request_that_is_placed_as_its_replica_leaves_goes_elsewhere(cluster: Cluster) -> None:
    for name in ("w0", "w1"):
        await cluster.add_worker(name)
    router = await cluster.add_router(replica_requests=1)
    for worker in cluster.workers.values():
        worker.faults.gate = asyncio.Event()
    tasks = [ask(cluster, number) for number in range(3)]
    await until(lambda: all(len(worker.requests) == 1 for worker in cluster.workers.values()))
    await until(lambda: len(router.dispatcher.queue) == 1)
    router.fleet.bounds = {}
    router.fleet._full = set()
    router.dispatcher.queue._look()  # placed, and its task has not heard of it yet
    assert not router.dispatcher.queue
    left = max(router.fleet.members.values(), key=lambda member: router.fleet.loads.of(member.replica.id).in_flight)
    left_worker = cluster.workers[left.replica.id]
    left_worker.faults.is_reporting_paused = True
    await router.fleet._remove(left.replica)
    for worker in cluster.workers.values():
        assert worker.faults.gate is not None
        worker.faults.gate.set()
    await texts(tasks)
    assert (router.dispatcher.queue.num_in_flight, router.dispatcher.queue.tokens_in_flight) == (0, 0)
    assert len(left_worker.requests) == 1


async def test_a_replica_with_a_new_address_keeps_the_streams_that_run_and_gets_new_requests_there(
    cluster: Cluster,
) -> None:
    worker = await cluster.add_worker("w0", decode_s=0.02)
    router = await cluster.add_router()
    task = ask(cluster, 1)
    await until(lambda: worker.running == 1)
    server = grpc.aio.server()
    worker.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    worker.address = f"127.0.0.1:{port}"
    await worker.report()
    await until(lambda: router.fleet.members["w0"].client.address == worker.address)
    assert not task.done()
    await texts([task])
    assert len(worker.requests) == 1  # nothing was tried again
    await worker._server.stop(None)
    await texts([ask(cluster, 2)])
    await server.stop(None)


async def test_a_request_that_every_replica_fails_on_keeps_none_of_them_from_others(cluster: Cluster) -> None:
    for number in range(3):
        await cluster.add_worker(f"w{number}")
    router = await cluster.add_router()
    for _ in range(2):
        for worker in cluster.workers.values():
            worker.faults.statuses = [grpc.StatusCode.INTERNAL]
        assert (await ask(cluster, 1)).status_code == 500
        assert not any(member.breaker.is_troubled for member in router.fleet.members.values())
        await texts([ask(cluster, number) for number in range(6)])
