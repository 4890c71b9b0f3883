"""The queue over real servers: who goes when a replica is full, who is refused, who leaves. Orders and counts only."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial
from typing import Any

import grpc
import httpx
import pytest

from router.admission import Admission, Waiter
from router.config import ConfigError, RouterConfig
from router.flow import QUANTUM_TOKENS
from router.load import LoadBook
from router.metrics import RouterMetrics
from tests.fakes.simulated_worker import SimulatedWorker
from tests.router.conftest import Cluster
from tests.router.reflective import ReflectiveClient
from tests.router.test_grpc import GENERATE, token_request
from tests.router.test_hang import TOKEN as REAL_TOKEN
from tests.router.test_hang import real_worker
from tests.support import until

REPLICA = "x-warmfront-replica"


def completion(name: str, length: int = 100, **more: Any) -> dict[str, Any]:
    """A prompt of ``length`` tokens that shares no block with those of other names."""
    return {"prompt": f"{name:.<{length}}", "max_tokens": 2, "temperature": 0, **more}


async def close_gate(worker: SimulatedWorker) -> asyncio.Event:
    worker.faults.gate = asyncio.Event()
    return worker.faults.gate


class Crowd:
    """Requests under way, each a task."""

    def __init__(self, cluster: Cluster, router: int = 0) -> None:
        self._cluster = cluster
        self._router = router
        self.tasks: list[asyncio.Task[httpx.Response]] = []

    async def send(
        self, name: str, tenant: str = "", *, waits: bool = True, **more: Any
    ) -> asyncio.Task[httpx.Response]:
        """One more; returns when it stands in the queue, or on the replica."""
        router = self._cluster.routers[self._router]
        queue = router.dispatcher.queue
        before = len(queue) + queue.num_in_flight
        post = self._cluster.clients[self._router].post
        headers = {"x-warmfront-tenant": tenant} if tenant else {}
        headers |= more.pop("headers", {})
        task = asyncio.create_task(post("/v1/completions", json=completion(name, **more), headers=headers))
        self.tasks.append(task)
        if waits:
            await until(lambda: len(queue) + queue.num_in_flight > before or task.done())
        return task

    async def end(self) -> list[httpx.Response]:
        return await asyncio.gather(*self.tasks)


class Sent:
    """What a request is once it is placed."""

    work_tokens = QUANTUM_TOKENS
    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("is_placed_before", [False, True])
async def test_a_client_that_leaves_in_the_moment_in_which_it_is_placed_leaves_no_charge(
    is_placed_before: bool,
) -> None:
    config = RouterConfig(redis_url="redis://127.0.0.1:1/0")
    queue: Admission[Sent] = Admission(config, LoadBook(), RouterMetrics(), set, lambda: 1)
    sent, end_s = Sent(), time.monotonic() + 60
    waiter = Waiter(
        tenant="", priority=0, num_tokens=10, arrived_s=0.0, expires_s=end_s, deadline_s=end_s, place=lambda: sent
    )
    waiting = asyncio.create_task(queue.wait(waiter))
    await asyncio.sleep(0)
    assert len(queue) == 1
    if is_placed_before:
        queue._look()
    waiting.cancel()
    if not is_placed_before:
        queue._look()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (sent.num_closed, len(queue)) == (1, 0)


async def test_a_tenant_of_weight_3_has_three_turns_to_one_of_another() -> None:
    config = RouterConfig(redis_url="redis://127.0.0.1:1/0", tenant_weights="a=3")
    queue: Admission[Sent] = Admission(config, LoadBook(), RouterMetrics(), set, lambda: 1)
    order: list[str] = []

    def place(tenant: str) -> Sent:
        order.append(tenant)
        return Sent()

    end_s = time.monotonic() + 60
    waiting = [
        asyncio.create_task(
            queue.wait(
                Waiter(
                    tenant=tenant,
                    priority=0,
                    num_tokens=10,
                    arrived_s=0.0,
                    expires_s=end_s,
                    deadline_s=end_s,
                    place=partial(place, tenant),
                )
            )
        )
        for tenant in "aaaaaabbbbbb"
    ]
    await asyncio.gather(*waiting)
    assert "".join(order[:8]) == "aaabaaab"


def test_weights_are_read_and_refused_by_name() -> None:
    config = RouterConfig(redis_url="redis://h", tenant_weights="gold=4, free=0.5")
    assert config.tenant_weights_by_name == {"gold": 4.0, "free": 0.5}
    for wrong in ("gold", "gold=0", "=1", "gold=x", "gold=1000"):
        with pytest.raises(ConfigError, match="--tenant-weights"):
            RouterConfig(redis_url="redis://h", tenant_weights=wrong)


def order(worker: SimulatedWorker) -> list[str]:
    return [request.tenant for request in worker.requests]


async def test_a_flood_of_one_tenant_makes_another_wait_for_one_turn_of_it(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    router = await cluster.add_router(replica_requests=1, trust_tenant_header=True)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    for number in range(40):
        await crowd.send(f"a{number}", "flood")
    for number in range(5):
        await crowd.send(f"b{number}", "b")
    assert len(router.dispatcher.queue) == 44
    gate.set()
    assert {response.status_code for response in await crowd.end()} == {200}
    # About 100 tokens each against a quantum of 512: after the one that runs, 6 of the flood, 6 of b, 6 of the flood.
    assert order(worker).count("flood") == 40
    assert Counter(order(worker)[:13])["b"] == 5
    assert cluster.load == 0


async def test_without_trust_every_request_is_of_one_tenant_and_they_go_in_their_order(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router(replica_requests=1)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    for number in range(8):
        await crowd.send(f"a{number}", "flood" if number < 6 else "b", headers={"x-request-id": f"r{number}"})
    gate.set()
    await crowd.end()
    assert [request.request_id for request in worker.requests] == [f"r{number}" for number in range(8)]


async def test_a_lower_priority_number_goes_first(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router(replica_requests=1)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    for number, priority in enumerate([0, 0, 5, 0, -1, 5, -1]):
        await crowd.send(f"a{number}", priority=priority)
    gate.set()
    await crowd.end()
    assert [request.priority for request in worker.requests] == [0, -1, -1, 0, 0, 5, 5]


async def test_a_full_queue_answers_429_and_says_when_to_come_back(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    router = await cluster.add_router(replica_requests=1, queue_requests=2)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    for number in range(3):
        await crowd.send(f"a{number}")
    refused = await (await crowd.send("one too many"))
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["type"] == "rate_limit_error"
    client = ReflectiveClient(cluster.endpoints[0].grpc)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.call(GENERATE, token_request())
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 1 <= float(dict(error.value.trailing_metadata() or ())["retry-after"]) <= 60
    await client.channel.close()
    status = (await cluster.http.get("/v1/replicas")).json()["queue"]
    assert (status["requests"], status["tenants"], status["full_replicas"]) == (2, 1, 1)
    assert status["tokens"] == 200 and status["oldest_s"] > 0
    gate.set()
    await crowd.end()
    metrics = router.metrics.text().decode()
    assert 'warmfront_router_rejected_total{reason="queue_full"} 2.0' in metrics
    assert "warmfront_router_queue_seconds_count 2.0" in metrics
    assert "warmfront_router_queue_requests 0.0" in metrics


async def test_the_flood_gives_way_in_a_full_queue(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router(replica_requests=1, queue_requests=4, trust_tenant_header=True)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    for number in range(5):
        await crowd.send(f"a{number}", "flood")
    await crowd.send("b", "b", waits=False)
    await until(lambda: crowd.tasks[4].done())
    gate.set()
    responses = await crowd.end()
    assert [response.status_code for response in responses] == [200, 200, 200, 200, 429, 200]
    assert "retry-after" in responses[4].headers


async def test_who_waits_too_long_gets_429_and_who_runs_out_of_time_504(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    router = await cluster.add_router(replica_requests=1, queue_timeout_s=0.3)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    await crowd.send("runs")
    late = await (await crowd.send("waits"))
    assert late.status_code == 429
    assert "no replica had room within --queue-timeout, after " in late.json()["error"]["message"]
    client = ReflectiveClient(cluster.endpoints[0].grpc)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.call(GENERATE, token_request(), timeout=0.1)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await client.channel.close()
    await until(lambda: not router.dispatcher.queue)
    assert len(worker.requests) == 1  # neither was sent
    gate.set()
    await crowd.end()
    assert cluster.load == 0


async def test_a_client_that_leaves_leaves_the_queue_at_once(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    router = await cluster.add_router(replica_requests=1)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    await crowd.send("runs")
    leaves = await crowd.send("leaves")
    stays = await crowd.send("stays")
    client = ReflectiveClient(cluster.endpoints[0].grpc)
    over_grpc = asyncio.create_task(client.call(GENERATE, token_request()))
    await until(lambda: len(router.dispatcher.queue) == 3)
    leaves.cancel()
    over_grpc.cancel()
    await until(lambda: len(router.dispatcher.queue) == 1)
    gate.set()
    assert (await stays).status_code == 200
    assert len(worker.requests) == 2
    await asyncio.gather(*crowd.tasks, over_grpc, return_exceptions=True)
    await client.channel.close()
    assert cluster.load == 0


async def test_a_request_waits_for_its_warm_replica_while_that_is_cheaper_and_else_goes_cold(cluster: Cluster) -> None:
    """The cost of the policy decides, over full replicas as over others: no second rule."""
    for name in ("w0", "w1"):
        await cluster.add_worker(name)
    router = await cluster.add_router(replica_requests=1)
    first = await cluster.http.post("/v1/completions", json=completion("shared", 2000))
    home = first.headers["x-warmfront-replica"]
    warm, cold = cluster.workers[home], next(w for name, w in cluster.workers.items() if name != home)
    await until(cluster.index_is_true)
    gate = await close_gate(warm)
    crowd = Crowd(cluster)
    await crowd.send("shared", length=2000)
    await until(lambda: warm.running == 1 or len(warm.requests) == 2)
    waits = await crowd.send("shared", length=2000)
    assert len(router.dispatcher.queue) == 1
    other = await crowd.send("something else", length=300)  # what cannot use the queue's replica is not kept by it
    assert (await other).headers["x-warmfront-replica"] == cold.spec.replica
    gate.set()
    answer = await waits
    assert answer.headers["x-warmfront-replica"] == home
    assert int(answer.headers["x-warmfront-matched-tokens"]) > 1900
    # A cold prompt that would have to wait behind a long one goes to the idle replica.
    gate = await close_gate(warm)
    await crowd.send("shared", length=2000)
    assert (await (await crowd.send("new", length=2000))).headers["x-warmfront-replica"] == cold.spec.replica
    gate.set()
    await crowd.end()


async def test_what_was_held_back_says_so_in_its_explanation(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router(replica_requests=1)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    await crowd.send("runs")
    await crowd.send("waits", headers={"x-request-id": "held"})
    asked = (await cluster.http.post("/v1/explain", json=completion("a third"))).json()
    assert "would wait" in asked["replicas"][0]["detail"]
    gate.set()
    await crowd.end()
    explained = (await cluster.http.post("/v1/explain", json={"request_id": "held"})).json()
    assert explained["queue_s"] > 0


async def test_a_replica_is_full_by_the_tokens_that_wait_there_too(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    router = await cluster.add_router(replica_tokens=150)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    for number in range(3):
        await crowd.send(f"a{number}")
    assert (router.dispatcher.queue.num_in_flight, len(router.dispatcher.queue)) == (2, 1)
    gate.set()
    assert {response.status_code for response in await crowd.end()} == {200}


async def test_a_router_at_its_own_bound_queues_though_replicas_have_room(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    router = await cluster.add_router(max_inflight_requests=2)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    for number in range(4):
        await crowd.send(f"a{number}")
    assert (router.dispatcher.queue.num_in_flight, len(router.dispatcher.queue)) == (2, 2)
    gate.set()
    assert {response.status_code for response in await crowd.end()} == {200}
    await until(lambda: (router.dispatcher.queue.num_in_flight, router.dispatcher.queue.tokens_in_flight) == (0, 0))


async def test_one_release_lets_one_request_go_and_the_router_s_bound_holds_at_every_moment(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0", decode_s=0.01)
    router = await cluster.add_router(max_inflight_requests=2)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    for number in range(20):
        await crowd.send(f"a{number}")
    gate.set()
    assert {response.status_code for response in await crowd.end()} == {200}
    assert worker.most_running == 2
    assert (router.dispatcher.queue.num_in_flight, router.dispatcher.queue.tokens_in_flight) == (0, 0)


async def test_two_routers_keep_one_replica_s_bound_together(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    for _ in range(2):
        await cluster.add_router(replica_requests=2)
    await until(lambda: all(len(router.fleet.shared_load.peers) == 1 for router in cluster.routers))
    gate = await close_gate(worker)
    crowds = [Crowd(cluster, 0), Crowd(cluster, 1)]
    await crowds[0].send("a")
    await until(lambda: cluster.routers[1].fleet.loads.of("w0").in_flight == 1)
    await crowds[1].send("b")
    await until(lambda: cluster.routers[0].fleet.loads.of("w0").in_flight == 2)
    for number in range(3):
        await crowds[0].send(f"c{number}")
        await crowds[1].send(f"d{number}")
    assert [len(router.dispatcher.queue) for router in cluster.routers] == [3, 3]
    assert len(worker.requests) == 2
    gate.set()
    for crowd in crowds:
        assert {response.status_code for response in await crowd.end()} == {200}
    await until(lambda: cluster.load == 0)


async def test_a_replica_that_others_keep_busy_is_full_by_its_lease_for_every_router(cluster: Cluster) -> None:
    """Somebody who is no router of this fleet sends there: the lease tells, and the next one takes it back."""
    worker = await cluster.add_worker("w0")
    for _ in range(3):
        await cluster.add_router(replica_requests=2)
    worker.running += 5
    await until(lambda: all(router.fleet.full() == {"w0"} for router in cluster.routers))
    for router in cluster.routers:
        router.fleet.full().clear()  # whoever asks may change what it is given
        assert router.fleet.full() == {"w0"}
    crowd = Crowd(cluster)
    await crowd.send("waits")
    assert len(cluster.router.dispatcher.queue) == 1
    worker.running -= 5
    assert (await crowd.end())[0].status_code == 200


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_request_that_failed_is_tried_again_before_all_that_wait_though_every_replica_is_full(
    cluster: Cluster, is_begun: bool
) -> None:
    """It has had its turn. A second wait might cost it its deadline, and a stream that has begun its reader."""
    for name in ("w0", "w1"):
        await cluster.add_worker(name)
    router = await cluster.add_router(replica_requests=1)
    home = cluster.workers[(await cluster.http.post("/v1/completions", json=completion("x"))).headers[REPLICA]]
    (other,) = [worker for worker in cluster.workers.values() if worker is not home]
    await until(cluster.index_is_true)
    home_gate, gate = await close_gate(home), await close_gate(other)
    crowd = Crowd(cluster)
    failing = await crowd.send("x", max_tokens=8)
    await crowd.send("runs there")
    await until(lambda: len(home.requests) == 2 and len(other.requests) == 1)
    for number in range(3):
        await crowd.send(f"waits{number}")
    assert len(router.dispatcher.queue) == 3
    if is_begun:
        home.faults.cut_after_tokens = 4
    else:
        home.spec.max_queue = 0
    home.faults.gate = asyncio.Event()  # nobody else gets through there
    home_gate.set()
    await until(lambda: len(other.requests) == 2)
    assert other.requests[1].num_prior_output_tokens == (4 if is_begun else 0)
    assert router.fleet.loads.of(other.spec.replica).in_flight == 2
    gate.set()
    assert (await failing).status_code == 200
    home.faults.cut_after_tokens, home.spec.max_queue = None, 1000
    home.faults.gate.set()
    assert {one.status_code for one in await crowd.end()} == {200}
    assert cluster.load == router.dispatcher.queue.num_in_flight == 0


async def test_a_front_that_many_wait_for_makes_a_replica_no_fuller_than_it_is(cluster: Cluster) -> None:
    """Its lease and the router charge such a front once: more would pass for the work of somebody unknown."""
    async with real_worker(cluster, "w0", prefill_tokens_per_s=2_000.0, max_num_batched_tokens=128):
        router = await cluster.add_router(worker_token=REAL_TOKEN, replica_tokens=100_000)
        front = "the front of all of them " * 80
        bodies = [{"prompt": f"{front}{number}", "max_tokens": 2, "n": 1 + number % 2} for number in range(8)]
        calls = [asyncio.create_task(cluster.http.post("/v1/completions", json=body)) for body in bodies]
        load, waited = router.fleet.loads.of("w0"), 0
        while not all(call.done() for call in calls):
            told = router.fleet.members["w0"].replica.lease.load.waiting_tokens
            waited = max(waited, told)
            assert load.foreign_tokens < 2_000, "a lease may be old; that of 8 fronts would be 14,000 more"
            await asyncio.sleep(0.01)
        assert waited > 500
        assert {(await call).status_code for call in calls} == {200}


async def test_a_router_that_drains_serves_its_queue_or_answers_it(cluster: Cluster) -> None:
    workers = [await cluster.add_worker("w0")]
    router = await cluster.add_router(replica_requests=1, drain_deadline_s=4.0)
    gate = await close_gate(workers[0])
    crowd = Crowd(cluster)
    for number in range(4):
        await crowd.send(f"a{number}")
    drained = asyncio.create_task(router.drain())
    await until(lambda: router.dispatcher.queue.is_draining)
    gate.set()
    assert {response.status_code for response in await crowd.end()} == {200}
    await drained
    cluster.routers.clear()


async def test_who_still_waits_when_the_drain_is_over_is_told_to_go_elsewhere(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    router = await cluster.add_router(replica_requests=1, drain_deadline_s=2.0)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    for number in range(3):
        await crowd.send(f"a{number}")
    drained = asyncio.create_task(router.drain())
    for task in crowd.tasks[1:]:
        response = await task
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
    gate.set()
    assert (await crowd.tasks[0]).status_code == 200
    await drained
    cluster.routers.clear()


async def test_a_new_replica_takes_from_the_queue(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router(replica_requests=1)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    for number in range(3):
        await crowd.send(f"a{number}")
    await cluster.add_worker("w1")
    await crowd.tasks[1]
    await crowd.tasks[2]
    assert len(cluster.workers["w1"].requests) == 2
    gate.set()
    await crowd.end()


async def test_a_replica_that_leaves_while_requests_wait_for_it_fails_nobody_who_can_go_elsewhere(
    cluster: Cluster,
) -> None:
    for name in ("w0", "w1"):
        await cluster.add_worker(name)
    router = await cluster.add_router(replica_requests=1)
    gates = [await close_gate(worker) for worker in cluster.workers.values()]
    crowd = Crowd(cluster)
    for number in range(6):
        await crowd.send(f"a{number}")
    assert len(router.dispatcher.queue) == 4
    await cluster.workers["w0"].stop()
    gates[1].set()
    assert {response.status_code for response in await crowd.end()} == {200}
    assert cluster.load == 0


async def test_choices_count_and_a_request_of_more_than_the_bound_gets_an_empty_replica_in_its_turn(
    cluster: Cluster,
) -> None:
    worker = await cluster.add_worker("w0")
    router = await cluster.add_router(replica_requests=4)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)
    queue = router.dispatcher.queue

    def in_flight() -> int:
        return router.fleet.loads.of("w0").in_flight

    await crowd.send("a", n=3)
    await crowd.send("b", n=2)  # 5 would be in flight
    assert (queue.num_in_flight, len(queue), in_flight()) == (1, 1, 3)
    await crowd.send("c")  # there is room for this one, and b was before it
    await crowd.send("d", n=16)
    await crowd.send("e")
    assert (queue.num_in_flight, len(queue), in_flight()) == (1, 4, 3)
    gate.set()
    answers = await crowd.end()
    assert [len(answer.json()["choices"]) for answer in answers] == [3, 2, 1, 16, 1]
    assert [request.sampling.n for request in worker.requests] == [3, 2, 1, 16, 1]
    assert cluster.load == 0


async def test_a_client_that_leaves_gives_back_the_room_of_all_its_choices(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    router = await cluster.add_router(replica_requests=4)
    gate = await close_gate(worker)
    crowd = Crowd(cluster)

    def in_flight() -> int:
        return router.fleet.loads.of("w0").in_flight

    left = await crowd.send("a", n=16)
    await crowd.send("b")
    assert in_flight() == 16
    left.cancel()
    await until(lambda: in_flight() == 1)
    gate.set()
    crowd.tasks.remove(left)
    assert [answer.status_code for answer in await crowd.end()] == [200]
    assert cluster.load == 0
