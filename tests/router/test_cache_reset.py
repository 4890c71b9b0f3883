"""A reset reaches every replica, and whoever did not reset is named."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from tests.router.conftest import Cluster
from tests.router.reflective import ReflectiveClient
from tests.support import until

PROMPT = {"prompt": "p" * 100, "max_tokens": 2}


@pytest.fixture
async def two(cluster: Cluster) -> Cluster:
    """Both replicas warm, seen by two routers."""
    await cluster.add_worker("w0", decode_s=0.01)
    await cluster.add_worker("w1", decode_s=0.01)
    await cluster.add_router()
    await cluster.add_router()
    for number in itertools.count():  # which of two equals is asked is drawn
        await cluster.http.post("/v1/completions", json={**PROMPT, "prompt": f"{number} " * 40})
        if all(cached_blocks(cluster).values()):
            break
    await until(cluster.index_is_true)
    return cluster


def cached_blocks(cluster: Cluster) -> dict[str, int]:
    return {name: worker.cache.num_cached_blocks for name, worker in cluster.workers.items()}


async def test_all_caches_are_emptied_and_every_router_s_index_follows(two: Cluster) -> None:
    before = cached_blocks(two)
    answer = await two.http.post("/v1/cache/reset")
    assert answer.status_code == 200, answer.text
    told = {one["replica"]: (one["outcome"], one["blocks"]) for one in answer.json()["replicas"]}
    assert told == {name: ("reset", blocks) for name, blocks in before.items()}
    assert answer.json()["complete"]
    await until(two.index_is_true)
    assert all(router.fleet.index.num_blocks(name) == 0 for router in two.routers for name in two.workers)
    again = await two.http.post("/v1/completions", json={**PROMPT, "prompt": "0 " * 40})
    assert again.headers["x-warmfront-matched-tokens"] == "0"
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_busy_replica_is_listed_as_not_reset_and_keeps_its_blocks(two: Cluster) -> None:
    body = {**PROMPT, "max_tokens": 400}
    running = asyncio.create_task(two.http.post("/v1/completions", json=body))
    await until(lambda: any(worker.cache.num_used_blocks for worker in two.workers.values()))
    busy = next(name for name, worker in two.workers.items() if worker.cache.num_used_blocks)
    answer = await two.http.post("/v1/cache/reset")
    assert (answer.status_code, answer.json()["complete"]) == (207, False)
    outcomes: dict[str, Any] = {one["replica"]: one for one in answer.json()["replicas"]}
    assert (outcomes[busy]["outcome"], outcomes[busy]["blocks"]) == ("busy", 0)
    assert "hold blocks" in outcomes[busy]["detail"]
    assert [one["outcome"] for name, one in outcomes.items() if name != busy] == ["reset"]
    assert (await running).status_code == 200
    await until(two.index_is_true)
    assert [name for name, blocks in cached_blocks(two).items() if blocks] == [busy]


async def test_a_replica_that_is_gone_is_unreachable_and_grpc_tells_the_same(two: Cluster) -> None:
    client = ReflectiveClient(two.endpoints[0].grpc)
    await two.workers["w1"].stop()
    ((answer,), _) = await client.call("warmfront.v1.Admin/ResetCache", {})
    assert [one["outcome"] for one in answer["replicas"]] == ["reset", "unreachable"]
    assert "complete" not in answer
    await client.channel.close()


async def test_a_fleet_of_nobody_has_nothing_to_reset(cluster: Cluster) -> None:
    await cluster.add_router(wait=False)
    answer = await cluster.http.post("/v1/cache/reset")
    assert (answer.status_code, "no replica is registered" in answer.text) == (503, True)
