"""A worker is replaced behind a real router: what users hit on the old one, they hit on the new one at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import redis.asyncio as aioredis
from warmfront_pb.v1 import common_pb2

from router.config import RouterConfig
from router.main import Router
from worker.config import WorkerConfig
from worker.main import Worker
from worker.simulated import BYTES

SYSTEM = "You answer briefly and in the words of somebody who has seen much. " * 4


@asynccontextmanager
async def worker_of(store: str, name: str, **more: Any) -> AsyncIterator[Worker]:
    settings: dict[str, Any] = {
        "replica_id": name,
        "redis_url": store,
        "engine": "simulated",
        "model": BYTES,
        "kv_blocks": 256,
        "decode_time_s": 0.0,
        "heartbeat_s": 0.1,
        "lease_s": 1.0,
    }
    worker = Worker(WorkerConfig(**{**settings, **more}))
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda _: ready.set()))
    async with asyncio.timeout(60):
        await ready.wait()
    try:
        yield worker
    finally:
        worker.drain(0.0)
        await running


async def ask(client: httpx.AsyncClient, question: str) -> tuple[str, int]:
    """Who answered, and how many tokens of the prompt it had."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    answer = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-warmfront-replica"], answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def figure(client: httpx.AsyncClient, name: str) -> float:
    found = re.search(rf"^warmfront_router_{name} (\S+)$", (await client.get("/metrics")).text, re.MULTILINE)
    assert found is not None
    return float(found[1])


async def test_what_users_hit_on_the_old_worker_they_hit_on_the_new_one_at_once(store: str) -> None:
    config = RouterConfig(redis_url=store, http_port=0, grpc_port=0, heartbeat_s=0.1, lease_s=1.0)
    async with worker_of(store, "old") as old:
        router = Router(config)
        client = httpx.AsyncClient(base_url=(await router.start()).http, timeout=60)
        redis = aioredis.from_url(store)
        async with asyncio.timeout(60):
            while router.fleet.why_not_ready():
                await asyncio.sleep(0.02)
            for number in range(4):
                await ask(client, f"{number}: what is a cache?")
            while not await redis.exists("wf:{default}:hot"):
                await asyncio.sleep(0.02)
        await redis.aclose()
        slow = {"prefill_tokens_per_s": 500.0}  # so that the router sees it WARMING
        async with worker_of(store, "new", **slow) as new:
            async with asyncio.timeout(60):
                while "new" not in router.fleet.ready:
                    await asyncio.sleep(0.02)
                old.drain()
                while "old" in router.fleet.ready:
                    await asyncio.sleep(0.02)
                replica, cached = await ask(client, "another one: what is a queue?")
                assert replica == "new"
                assert cached >= len(SYSTEM) // 16 * 16
                while not await figure(client, "prewarm_tokens_total"):
                    await asyncio.sleep(0.02)
            held = await figure(client, "prewarm_tokens_total")
            assert held > await figure(client, "prewarm_missed_total")
            assert new.replica.state == common_pb2.READY
            await client.aclose()
            await router.stop()
