"""Faults that routers of this kind were seen to have, as far as no other module has their test: see docs/faults.md."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from array import array
from typing import Any

import grpc
import pytest
from warmfront_pb.v1 import common_pb2

from cache.block_hash import HashScheme
from cache.events import Snapshot, Stored
from cache.prefix_index import PrefixIndex
from router.load import LoadBook
from router.placement import Placement
from tests.router.conftest import Cluster
from tests.router.test_hang import TOKEN, real_worker
from tests.support import until

PROMPT: dict[str, Any] = {"prompt": "p" * 200, "max_tokens": 2, "temperature": 0}


async def test_a_replica_that_leaves_with_calls_hanging_holds_up_nobody_who_joins(cluster: Cluster) -> None:
    leaving = await cluster.add_worker("w0")
    router = await cluster.add_router()
    leaving.faults.is_hung = True
    hanging = [asyncio.create_task(cluster.http.post("/v1/completions", json=PROMPT)) for _ in range(5)]
    await until(lambda: len(leaving.requests) == 5)
    await cluster.add_worker("w1")  # where they go when it leaves
    await until(lambda: set(router.fleet.ready) == {"w0", "w1"})
    leaving.state = common_pb2.GONE
    await leaving.report()
    await cluster.add_worker("w2")
    await until(lambda: set(router.fleet.ready) == {"w1", "w2"})
    assert {(await request).status_code for request in hanging} == {200}
    assert router.fleet.index.num_blocks("w0") == 0


async def test_a_replica_that_was_full_once_gets_its_prompts_again(cluster: Cluster) -> None:
    for name in ("w0", "w1"):
        await cluster.add_worker(name)
    await cluster.add_router()
    other = {**PROMPT, "prompt": "q" * 200}
    home = (await cluster.http.post("/v1/completions", json=PROMPT)).headers["x-warmfront-replica"]
    (away,) = cluster.workers.keys() - {home}
    cluster.workers[away].state = common_pb2.DRAINING
    await cluster.workers[away].report()
    await until(lambda: set(cluster.router.fleet.ready) == {home})
    await cluster.http.post("/v1/completions", json=other)  # so that home alone holds both
    cluster.workers[away].state = common_pb2.READY
    await until(lambda: set(cluster.router.fleet.ready) == {home, away})
    cluster.workers[home].faults.statuses.append(grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert (await cluster.http.post("/v1/completions", json=PROMPT)).headers["x-warmfront-replica"] == away
    again = await cluster.http.post("/v1/completions", json=other)
    assert (again.status_code, again.headers["x-warmfront-replica"]) == (200, home)


async def test_a_worker_that_gets_sigterm_ends_its_streams_and_its_process_and_leaves_nothing(
    cluster: Cluster,
) -> None:
    command = [sys.executable, "-m", "warmfront", "worker", "--engine", "simulated", "--model", "bytes"]
    command += ["--redis", cluster.redis_url, "--fleet", cluster.fleet, "--replica-id", "w0", "--decode-time", "30ms"]
    command += ["--kv-blocks", "2000"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        router = await cluster.add_router(worker_token=TOKEN)
        bodies = [{**PROMPT, "prompt": f"{number} " * 40, "max_tokens": 60, "ignore_eos": True} for number in range(3)]
        running = [asyncio.create_task(cluster.http.post("/v1/completions", json=body)) for body in bodies]
        await until(
            lambda: router.fleet.loads.of("w0").in_flight == 3 and not router.fleet.loads.of("w0").waiting_requests
        )
        async with real_worker(cluster, "w1"):
            await until(lambda: set(router.fleet.ready) == {"w0", "w1"})
            process.terminate()
            await until(lambda: set(router.fleet.ready) == {"w1"})
            new = [await cluster.http.post("/v1/completions", json=PROMPT) for _ in range(4)]
            assert {(one.status_code, one.headers["x-warmfront-replica"]) for one in new} == {(200, "w1")}
            ended = await asyncio.gather(*running)
            assert {(one.status_code, one.headers["x-warmfront-replica"]) for one in ended} == {(200, "w0")}
            assert {one.json()["usage"]["completion_tokens"] for one in ended} == {60}
            assert await process.wait() == 0
            await until(lambda: "w0" not in router.fleet.members)
            assert router.fleet.index.num_blocks("w0") == 0
            assert "failovers_total 0.0" in router.metrics.text().decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_load_is_counted_once_and_never_below_nothing_through_a_hundred_requests_of_which_many_fail(
    cluster: Cluster,
) -> None:
    workers = [await cluster.add_worker(f"w{number}") for number in range(3)]
    router = await cluster.add_router()
    lowest = 0

    async def watch() -> None:
        nonlocal lowest
        while True:
            loads = [router.fleet.loads.of(worker.spec.replica) for worker in workers]
            lowest = min(lowest, *(value for load in loads for value in load.own))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    for worker in workers:
        worker.faults.statuses += [grpc.StatusCode.UNAVAILABLE] * 10
    bodies = [{**PROMPT, "prompt": f"{number % 7} " * 60} for number in range(100)]
    answers = await asyncio.gather(*(cluster.http.post("/v1/completions", json=body) for body in bodies))
    watching.cancel()
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert [tuple(router.fleet.loads.of(worker.spec.replica).own) for worker in workers] == [(0, 0, 0)] * 3
    assert lowest == 0
    for worker in workers:
        worker.faults.statuses.clear()
    while (again := await cluster.http.post("/v1/completions", json=PROMPT)).status_code != 200:
        assert again.status_code == 503, again.text
        await asyncio.sleep(0.05)  # until a breaker tries its replica again


async def test_two_fleets_on_one_redis_never_meet(cluster: Cluster, redis_url: str) -> None:
    """Two models whose prompts are the same tokens: no block, no replica and no error of the one in the other."""
    other = Cluster(redis_url)
    try:
        for one in (cluster, other):
            await one.add_worker("w0")
            await one.add_router()
            assert (await one.http.post("/v1/completions", json=PROMPT)).headers["x-warmfront-matched-tokens"] == "0"
        await cluster.workers["w0"].stop()  # the replica of the one, by the name that the other has too
        del cluster.workers["w0"]
        await until(lambda: not cluster.router.fleet.members)
        assert (await cluster.http.post("/v1/completions", json=PROMPT)).status_code == 503
        again = await other.http.post("/v1/completions", json=PROMPT)
        assert (again.status_code, again.headers["x-warmfront-matched-tokens"]) == (200, "192")
    finally:
        await other.close()


def fleet_of(num_replicas: int, keys: array[int]) -> tuple[Placement, dict[str, common_pb2.CacheState]]:
    index = PrefixIndex()
    for number in range(num_replicas):
        index.load(f"w{number}", Snapshot(f"w{number}", "g", 1, (Stored(0, keys),)))
    caches = {f"w{n}": common_pb2.CacheState(prefix_caching=True, kv_blocks=5000) for n in range(num_replicas)}
    return Placement(index, LoadBook(), "warmfront", random.Random(0)), caches


def test_a_look_up_ends_at_the_first_miss_however_long_the_prompt_and_large_the_fleet() -> None:
    held = HashScheme().keys(list(range(64_000)))
    index = PrefixIndex()
    for number in range(64):
        index.load(f"w{number}", Snapshot(f"w{number}", "g", 1, (Stored(0, held),)))
    others = HashScheme().keys(list(range(1, 64_001)))
    assert len(others) == 4000

    def best_s(keys: array[int]) -> float:
        times = []
        for _ in range(200):
            began = time.perf_counter()
            assert not index.match(keys)
            times.append(time.perf_counter() - began)
        return min(times)

    assert best_s(others) < 10 * best_s(others[:1])  # about equal; were each block looked at, hundreds of times


def test_a_decision_writes_no_log_line_whatever_the_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys = HashScheme().keys(list(range(3200)))
    placement, caches = fleet_of(8, keys)
    for now in range(10):
        placement.place(3200, keys, 16, caches, now).ticket.close(now)
    assert not caplog.records


def test_a_decision_looks_at_no_more_replicas_of_a_thousand_than_of_a_few() -> None:
    keys = HashScheme().keys(list(range(320)))
    placement, caches = fleet_of(1000, keys)
    for now in range(20):
        placed = placement.place(320, keys, 16, caches, now)
        assert len(placed.decision.candidates) <= 32
        placed.ticket.close(now)
