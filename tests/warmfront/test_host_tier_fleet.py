"""A worker with blocks in host memory behind a real router: what left the device is known, told and used."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from cache.events import Tier
from router.config import RouterConfig
from router.main import Router
from tests.warmfront.test_prewarm_fleet import worker_of
from worker.main import Worker

PROMPT = "Once upon a time there was a lighthouse on an island, and nobody knew who kept its lamp. " * 4  # 22 blocks


async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int = 2) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were not computed."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def replica_of(client: httpx.AsyncClient) -> dict[str, Any]:
    one: dict[str, Any] = (await client.get("/v1/replicas")).json()["replicas"][0]
    return one


async def is_true(router: Router, client: httpx.AsyncClient) -> bool:
    """Whether lease and index agree on what both tiers hold."""
    replica, index = await replica_of(client), router.fleet.index
    told = [replica["kv_blocks_cached"], replica["host_kv_blocks_cached"]]
    return told == [index.num_blocks("w0", tier) for tier in Tier]


async def figure(worker: Worker, name: str, **labels: str) -> float:
    assert worker._metrics is not None
    return worker._metrics.registry.get_sample_value(f"warmfront_worker_{name}", labels) or 0.0


@pytest.mark.parametrize("token_reuse", [False, True])
async def test_what_left_the_device_comes_back_from_host_memory_and_everybody_knows(
    store: str, token_reuse: bool
) -> None:
    settings = {"kv_blocks": 40, "host_kv_blocks": 200, "token_reuse": token_reuse, "prewarm": False}
    fleet = f"host-{token_reuse}"
    async with worker_of(store, "w0", fleet=fleet, **settings) as worker:
        config = RouterConfig(redis_url=store, fleet=fleet, http_port=0, grpc_port=0, heartbeat_s=0.1, lease_s=1.0)
        router = Router(config)
        client = httpx.AsyncClient(base_url=(await router.start()).http, timeout=60)
        async with asyncio.timeout(60):
            while router.fleet.why_not_ready():
                await asyncio.sleep(0.02)
            cold, num_cached = await ask(client, PROMPT, 12)
            assert num_cached == 0
            for number in range(4):
                await ask(client, f"{number} " * 150)
            while not (await replica_of(client))["host_kv_blocks_cached"] or not await is_true(router, client):
                await asyncio.sleep(0.02)
            replica = await replica_of(client)
            assert (replica["kv_blocks"], replica["host_kv_blocks"]) == (40, 200)
            assert replica["host_tokens_per_s"] == 400_000

            asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            (told,) = (await client.post("/v1/explain", json=asked)).json()["replicas"]
            assert (told["device_blocks"], told["host_blocks"]) == (0, 22)
            warm, num_cached = await ask(client, PROMPT, 12)
            assert warm == cold
            assert num_cached >= 22 * 16
            assert await figure(worker, "prefix_cache_hits_tokens_total", tier="host") == 22 * 16
            while not await is_true(router, client):
                await asyncio.sleep(0.02)
            (told,) = (await client.post("/v1/explain", json=asked)).json()["replicas"]
            assert (told["device_blocks"], told["host_blocks"]) == (22, 0)

            assert (await client.post("/v1/cache/reset")).status_code == 200
            while (await replica_of(client))["host_kv_blocks_cached"] or not await is_true(router, client):
                await asyncio.sleep(0.02)
            assert (await ask(client, PROMPT, 12)) == (cold, 0)
        await client.aclose()
        await router.stop()
