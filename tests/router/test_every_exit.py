"""Whatever way a request ends, over HTTP or gRPC: nothing of it stays charged anywhere, in no router."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product

import grpc
import httpx
import pytest
from warmfront_pb.v1 import common_pb2

from tests.fakes.simulated_worker import SimulatedWorker
from tests.router.conftest import Cluster
from tests.router.reflective import ReflectiveClient
from tests.router.test_grpc import GENERATE
from tests.support import until

APIS = ["http", "http stream", "grpc"]
LEFT = "the client left"
ENDS = [(LEFT, 1), (LEFT, 2), ("deadline", 2), ("end", 1)]  # and how many choices
# 200: a stream had begun, and the error is its last event.
LATE = ("error 504", "error 200", "DEADLINE_EXCEEDED")
FAILED = ("error 503", "error 200", "UNAVAILABLE")
BAD = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


def charged(cluster: Cluster) -> dict[str, int]:
    """All that some router holds for a request, and all that runs or lies in use at a worker; empty when it is none."""
    found: Counter[str] = Counter()
    for router in cluster.routers:
        queue = router.dispatcher.queue
        found["queued"] += len(queue)
        found["requests in flight"] += abs(queue.num_in_flight)
        found["tokens in flight"] += abs(queue.tokens_in_flight)
        found["attempts"] += len(router.dispatcher._attempts)
        for name in router.fleet.members:
            load = router.fleet.loads.of(name)
            found["in flight"] += abs(load.in_flight)
            found["waiting"] += abs(load.waiting_requests) + abs(load.waiting_tokens)
            found["held"] += load.held_requests
            found["others"] += len(load.others)
            found["pending"] += len(load.pending)
    for worker in cluster.workers.values():
        found["running"] += worker.running
        found["blocks"] += worker.cache.num_used_blocks
    return {name: count for name, count in found.items() if count}


class Client:
    """Asks by any API; gives what came of it: a status by gRPC's name, or ``LEFT``."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._over_grpc = [ReflectiveClient(endpoints.grpc) for endpoints in cluster.endpoints]

    def ask(
        self,
        api: str,
        prompt: str,
        *,
        router: int = 0,
        n: int = 1,
        timeout_s: float = 20.0,
        tenant: str = "",
        max_tokens: int = 20,
    ) -> asyncio.Task[str]:
        if api == "grpc":
            return asyncio.create_task(self._by_grpc(router, prompt, n, timeout_s, tenant, max_tokens))
        return asyncio.create_task(self._by_http(api, router, prompt, n, timeout_s, tenant, max_tokens))

    async def _by_http(
        self, api: str, router: int, prompt: str, n: int, timeout_s: float, tenant: str, max_tokens: int
    ) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "n": n, "seed": 1, "stream": api == "http stream"}
        headers = {"x-request-timeout": f"{timeout_s}", "x-warmfront-tenant": tenant or "none"}
        client = self._cluster.clients[router]
        try:
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                text = (await response.aread()).decode()
        except asyncio.CancelledError:
            return LEFT
        except httpx.HTTPError as error:
            return type(error).__name__
        is_whole = response.status_code == 200 and '"error"' not in text
        return "OK" if is_whole else f"error {response.status_code}"

    async def _by_grpc(self, router: int, prompt: str, n: int, timeout_s: float, tenant: str, max_tokens: int) -> str:
        request = {"text": prompt, "sampling": {"maxTokens": max_tokens, "n": n, "seed": 1}}
        metadata = (("x-warmfront-tenant", tenant or "none"),)
        try:
            await self._over_grpc[router].call(GENERATE, request, metadata=metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        except asyncio.CancelledError:
            return LEFT
        return "OK"

    async def close(self) -> None:
        for one in self._over_grpc:
            await one.channel.close()


@asynccontextmanager
async def fleet_of(cluster: Cluster, num_workers: int, max_requests: int = 2) -> AsyncIterator[Client]:
    for number in range(num_workers):
        await cluster.add_worker(f"w{number}", decode_s=0.002)
    for _ in range(2):
        await cluster.add_router(replica_requests=max_requests, trust_tenant_header=True)
    client = Client(cluster)
    yield client
    await client.close()


async def home_of(cluster: Cluster, prompt: str) -> SimulatedWorker:
    """The replica that this prompt goes to from now on."""
    answer = await cluster.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    await until(lambda: cluster.index_is_true() and not charged(cluster))
    return cluster.workers[answer.headers["x-warmfront-replica"]]


def bar(cluster: Cluster) -> asyncio.Event:
    """Requests go no further at any replica until this is set."""
    gate = asyncio.Event()
    for worker in cluster.workers.values():
        worker.faults.gate = gate
        worker.requests.clear()
    return gate


async def test_it_ends_while_it_is_tried_again_before_its_first_token(cluster: Cluster) -> None:
    async with fleet_of(cluster, 2) as client:
        for number, (api, (ends, n)) in enumerate(product(APIS, ENDS)):
            prompt = f"{number} " * 50
            home = await home_of(cluster, prompt)
            (other,) = [worker for worker in cluster.workers.values() if worker is not home]
            gate = bar(cluster)
            home.faults.statuses = [grpc.StatusCode.RESOURCE_EXHAUSTED]
            call = client.ask(api, prompt, n=n, timeout_s=0.3 if ends == "deadline" else 20)
            await until(lambda: bool(other.requests) or call.done())  # noqa: B023
            assert call.done() or charged(cluster)["in flight"] >= n
            if ends == LEFT:
                call.cancel()
            elif ends == "end":
                gate.set()
            assert await call in {LEFT: (LEFT,), "deadline": LATE, "end": ("OK",)}[ends], (api, ends, n)
            await until(lambda: not charged(cluster))  # though the replica would have gone on waiting
            gate.set()


async def test_it_ends_while_it_goes_on_elsewhere(cluster: Cluster) -> None:
    async with fleet_of(cluster, 12) as client:  # so many, since a breaker keeps requests from those that failed
        for number, (api, ends) in enumerate(product(APIS, (LEFT, "deadline", "failure", "end"))):
            prompt = f"{number} " * 50
            home = await home_of(cluster, prompt)
            gate = bar(cluster)
            home.faults.gate, home.faults.cut_after_tokens = None, 5
            others = [worker for worker in cluster.workers.values() if worker is not home]
            call = client.ask(api, prompt, timeout_s=0.3 if ends == "deadline" else 20)
            await until(lambda: any(worker.requests for worker in others) or call.done())  # noqa: B023
            other = max(others, key=lambda worker: len(worker.requests))
            assert call.done() or other.requests[0].num_prior_output_tokens == 5
            if ends == LEFT:
                call.cancel()
            elif ends == "failure":
                other.faults.cut_after_tokens = 3
            if ends in ("failure", "end"):
                gate.set()
            failed = ("OK",) if api == "http" else FAILED  # of a whole answer nobody has seen anything: it begins anew
            assert await call in {LEFT: (LEFT,), "deadline": LATE, "failure": failed, "end": ("OK",)}[ends], (api, ends)
            await until(lambda: not charged(cluster))  # though the replica would have gone on waiting
            gate.set()
            home.faults.cut_after_tokens = other.faults.cut_after_tokens = None


async def test_it_ends_while_it_is_queued(cluster: Cluster) -> None:
    async with fleet_of(cluster, 2, max_requests=1) as client:
        queue = cluster.router.dispatcher.queue
        for api, (ends, n) in product(APIS, ENDS):
            gate = bar(cluster)
            running = [client.ask("http", f"{number} " * 40) for number in range(2)]
            await until(lambda: sum(len(worker.requests) for worker in cluster.workers.values()) == 2)
            call = client.ask(api, "p" * 100, n=n, timeout_s=0.3 if ends == "deadline" else 20)
            await until(lambda: len(queue) == 1 or call.done())  # noqa: B023
            if ends == LEFT:
                call.cancel()
            elif ends == "end":
                gate.set()
            assert await call in {LEFT: (LEFT,), "deadline": LATE, "end": ("OK",)}[ends], (api, ends, n)
            await until(lambda: len(queue) == 0)
            gate.set()
            assert await asyncio.gather(*running) == ["OK"] * 2
            await until(lambda: not charged(cluster))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
async def test_however_requests_end_at_random_nothing_stays_charged(cluster: Cluster, seed: int) -> None:
    """Two routers with small bounds; replicas that fail, cut, stall, drain and come anew; clients that leave."""
    rng = random.Random(seed)
    for name in ("w0", "w1", "w2"):
        await cluster.add_worker(name, decode_s=0.002)
    for _ in range(2):
        await cluster.add_router(
            replica_requests=3, max_inflight_requests=8, queue_requests=8, queue_timeout_s=0.4, trust_tenant_header=True
        )
    client = Client(cluster)
    is_over = False

    async def trouble() -> None:
        while not is_over:
            await asyncio.sleep(rng.uniform(0.01, 0.04))
            name = rng.choice(list(cluster.workers))
            faults, action = cluster.workers[name].faults, rng.random()
            if action < 0.4:
                faults.statuses = [rng.choice(BAD) for _ in range(rng.randrange(3))]
            elif action < 0.7:
                faults.cut_after_tokens = rng.choice([None, None, 0, 1, 7])
            elif action < 0.85:
                faults.is_hung = True
                await asyncio.sleep(rng.uniform(0, 0.1))
                faults.is_hung = False
            elif action < 0.95:
                cluster.workers[name].state = rng.choice([common_pb2.READY, common_pb2.DRAINING])
            else:
                await cluster.workers[name].stop()
                await cluster.add_worker(name, decode_s=0.002)

    async def one(number: int) -> str:
        await asyncio.sleep(rng.uniform(0, 2))
        call = client.ask(
            rng.choice(APIS),
            f"{rng.randrange(12)} " * 40,
            router=rng.randrange(2),
            n=rng.choice([1, 1, 2, 3]),
            timeout_s=rng.choice([0.05, 0.3, 20, 20]),
            tenant=f"t{rng.randrange(3)}",
            max_tokens=rng.choice([1, 20, 60]),
        )
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0, 0.15))
            call.cancel()
        return await call

    troubling = asyncio.create_task(trouble())
    results = Counter(await asyncio.gather(*map(one, range(200))))
    is_over = True
    await troubling
    assert results["OK"] and results[LEFT] and len(results) >= 6, results
    await until(lambda: not charged(cluster))
    await client.close()
