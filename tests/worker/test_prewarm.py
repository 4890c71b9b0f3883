"""Pre-warm: a new worker holds what its fleet finds hot, says nothing of it in user figures, and is READY in time."""

from __future__ import annotations

import asyncio
import dataclasses
import urllib.request
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
import redis.asyncio as aioredis
from warmfront_pb.v1 import common_pb2

from cache.hot import HotPrefix, Ranked, by_value, encode_hot, saved_tokens
from tests.fakes.runner import FakeRunner, fake_loader
from tests.support import free_port, packed
from tests.worker.served import Client, config_for, serve
from tests.worker.test_adapters import write as write_adapter
from worker.adapters import read_files
from worker.config import WorkerConfig
from worker.main import EXIT_OK, Worker
from worker.prewarm import Progress, RedisSource, fill, make_plan, pressure_of

SYSTEM = list(range(100, 164))  # four blocks
PROMPT = [*SYSTEM, *range(300, 330)]
OTHER = list(range(500, 548))
HOT = [HotPrefix(packed(SYSTEM), 40.0), HotPrefix(packed(OTHER), 2.0)]


async def write_hot(
    config: WorkerConfig,
    prefixes: Sequence[HotPrefix] = HOT,
    tokenizer: str = "tokenizer",
    data: bytes | None = None,
    fleet: str = "",
) -> None:
    """As a router does."""
    client: Any = aioredis.from_url(config.redis_url)
    seconds, _ = await client.time()
    key = f"wf:{{{fleet or config.fleet}}}:hot"
    await client.set(f"{key}:r0", data or encode_hot(by_value(prefixes, 1 << 20), seconds * 1000, tokenizer))
    await client.zadd(key, {"r0": seconds * 1000})
    await client.aclose()


def figures(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


@pytest.fixture
async def first(valkey_url: str) -> AsyncIterator[WorkerConfig]:
    """The configuration of a fleet in which another worker is READY."""
    config = config_for(valkey_url, prewarm=False)
    async with serve(config):
        yield config


def second_of(first: WorkerConfig, **more: Any) -> WorkerConfig:
    return config_for(first.redis_url, **{"fleet": first.fleet, "replica_id": "w1", **more})


async def test_the_first_request_on_a_new_worker_finds_the_hot_system_prompt(first: WorkerConfig) -> None:
    config = second_of(first, metrics_port=free_port())
    await write_hot(config)
    async with serve(config) as served:
        before = await asyncio.to_thread(figures, config.metrics_port or 0)
        assert before["warmfront_worker_synthetic_tokens_total"] >= len(SYSTEM)
        reply = await served.client.generate(PROMPT, sampling={"max_tokens": 2})
        assert reply.usage.cached_tokens == len(SYSTEM)
        after = await asyncio.to_thread(figures, config.metrics_port or 0)
    for name in ("prefix_cache_queries_tokens_total", 'prefix_cache_hits_tokens_total{tier="device"}'):
        assert before[f"warmfront_worker_{name}"] == 0
    for name in ("ttft_seconds_count", "queue_seconds_count"):
        assert before[f"warmfront_worker_{name}"] == 0
        assert after[f"warmfront_worker_{name}"] == 1
    assert after["warmfront_worker_prefix_cache_queries_tokens_total"] == len(PROMPT)
    assert after['warmfront_worker_prefix_cache_hits_tokens_total{tier="device"}'] == len(SYSTEM)
    assert after["warmfront_worker_synthetic_tokens_total"] == before["warmfront_worker_synthetic_tokens_total"]


async def test_with_a_higher_target_the_rest_is_computed_too(first: WorkerConfig) -> None:
    config = second_of(first, prewarm_target=1.0)
    await write_hot(config)
    async with serve(config) as served:
        reply = await served.client.generate([*OTHER, 7], sampling={"max_tokens": 1})
        assert reply.usage.cached_tokens == len(OTHER)


async def test_hot_prefixes_of_the_worker_s_own_adapters_are_computed_with_them(
    first: WorkerConfig, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a")
    version = read_files(folder, tmp_path, 1000).version
    config = second_of(first, prewarm_target=1.0, lora=(f"a={folder}",))
    there, other = f"a@{version}", f"a@{'0' * 64}"
    await write_hot(config, [HotPrefix(packed(SYSTEM), 9.0, there), HotPrefix(packed(OTHER), 99.0, other)])
    async with serve(config) as served:
        for lora, count in (("a", len(SYSTEM)), ("", 0)):
            reply = await served.client.generate(PROMPT, lora=lora, sampling={"max_tokens": 1})
            assert reply.usage.cached_tokens == count
        assert (
            await served.client.generate([*OTHER, 7], lora="a", sampling={"max_tokens": 1})
        ).usage.cached_tokens == 0


async def test_without_prewarm_a_new_worker_is_cold(first: WorkerConfig) -> None:
    config = second_of(first, prewarm=False)
    await write_hot(config)
    async with serve(config) as served:
        assert (await served.client.generate(PROMPT, sampling={"max_tokens": 1})).usage.cached_tokens == 0


async def test_another_fleet_s_hot_prefixes_are_taken_when_asked(first: WorkerConfig) -> None:
    config = config_for(first.redis_url, prewarm_from_fleet=first.fleet)
    await write_hot(first)
    async with serve(config) as served:
        assert (await served.client.generate(PROMPT, sampling={"max_tokens": 1})).usage.cached_tokens == len(SYSTEM)


async def test_a_replica_of_another_fleet_is_another_whatever_its_name(first: WorkerConfig) -> None:
    source = RedisSource(first.redis_url, "the-new-one", also_fleet=first.fleet, own_replica=first.replica_id)
    try:
        assert (await source.pressure(), len(await source.others(first.replica_id))) == ("", 1)
    finally:
        await source.close()


@pytest.mark.parametrize("old_is_there", [False, True])
async def test_what_the_own_fleet_finds_hot_counts_beside_the_other_fleet_s(
    first: WorkerConfig, old_is_there: bool
) -> None:
    config = second_of(first, prewarm_from_fleet="the-old-one" if not old_is_there else f"{first.fleet}-old")
    await write_hot(config, HOT[:1])
    if old_is_there:
        await write_hot(config, HOT[1:], fleet=config.prewarm_from_fleet or "")
    config = dataclasses.replace(config, prewarm_target=1.0)
    async with serve(config) as served:
        cached = [
            (await served.client.generate([*prompt, 7], sampling={"max_tokens": 1})).usage.cached_tokens
            for prompt in (SYSTEM, OTHER)
        ]
    assert cached == [len(SYSTEM), len(OTHER) if old_is_there else 0]


@pytest.mark.parametrize(
    ("hot", "words"),
    [
        (None, "nothing is hot"),
        ({"tokenizer": "another"}, "nothing is hot"),
        ({"data": b"\x01rubbish"}, "nothing is hot"),
        ({"prefixes": [HotPrefix(packed(SYSTEM), 9.0, "an-adapter")]}, "no hot prefix fits"),
        ({"prefixes": [HotPrefix(packed([4_000_000] * 32), 9.0)]}, "no hot prefix fits"),
    ],
)
async def test_what_cannot_be_used_keeps_nobody_from_serving(
    first: WorkerConfig, hot: dict[str, Any] | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = second_of(first)
    if hot is not None:
        await write_hot(config, **hot)
    async with serve(config) as served:
        assert (await served.client.generate(PROMPT, sampling={"max_tokens": 1})).usage.cached_tokens == 0
    assert f"prewarm ended='{words}" in caplog.text


async def test_the_only_replica_of_a_fleet_does_not_keep_users_waiting(
    valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = config_for(valkey_url)
    await write_hot(config, [HotPrefix(packed(range(100, 100 + 400)), 1.0)])
    async with serve(config, step_s=0.2):
        pass
    assert "pressed: no other replica is ready" in caplog.text


async def test_a_fleet_in_need_gets_its_worker_cold(first: WorkerConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = second_of(first)
    await write_hot(config, [HotPrefix(packed(range(100, 100 + 400)), 1.0)])
    busy = lease(common_pb2.READY, waiting_tokens=10_000)
    async with aioredis.from_url(first.redis_url) as client:
        await client.set(f"wf:{{{first.fleet}}}:replica:{busy.replica}", busy.SerializeToString())
        await client.zadd(f"wf:{{{first.fleet}}}:replicas", {busy.replica: 2**53})
    async with serve(config, step_s=0.2):
        pass
    assert "pressed: 50.0 s of prefill wait on each replica" in caplog.text


@asynccontextmanager
async def hanging_proxy(url: str) -> AsyncIterator[str]:
    """Redis, but each connection that asks for anything hot hears nothing more."""
    target = urlsplit(url)
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if b":hot" in data:
                await asyncio.Event().wait()
            writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(target.hostname, target.port)
        for one in (pump(reader, other_writer), pump(other_reader, writer)):
            tasks.add(asyncio.create_task(one))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_source_that_hangs_costs_the_deadline_and_no_more(
    first: WorkerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with hanging_proxy(first.redis_url) as url:
        config = second_of(first, redis_url=url, prewarm_deadline_s=0.3)
        async with serve(config) as served:
            assert (await served.client.generate(PROMPT, sampling={"max_tokens": 1})).usage.cached_tokens == 0
    assert "prewarm ended='deadline'" in caplog.text


async def test_users_wait_until_a_worker_is_warm_and_a_drain_does_not(first: WorkerConfig) -> None:
    config = second_of(first)
    await write_hot(config, [HotPrefix(packed(range(100, 500 - 100)), 1.0)])
    runner = FakeRunner(201, config.block_size)
    runner.hangs.set()
    worker = Worker(config, fake_loader(runner=runner))
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(20):
        while worker.replica.state != common_pb2.WARMING:
            await asyncio.sleep(0.01)
    client = Client(worker.replica.address)
    error = await client.fail(PROMPT)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "WARMING" in (error.details() or "")
    await client.channel.close()
    worker.drain(0.0)
    runner.hangs.clear()
    assert await running == EXIT_OK


# The decisions


def test_a_plan_is_what_the_pool_holds_in_whole_blocks() -> None:
    found = [
        HotPrefix(packed(range(40)), 5.0),  # two and a half blocks here
        HotPrefix(packed(range(100, 132)), 9.0),
        HotPrefix(packed(range(200, 232)), 1.0),
        HotPrefix(packed(range(300, 316)), 99.0, "adapter"),
    ]
    limits = {"block_size": 16, "vocab_size": 1000}
    plan, wanted = make_plan(found, num_blocks=5, max_model_len=1000, **limits)
    assert [(array("I", one.prefix.token_ids)[0], one.prefix.num_tokens) for one in plan] == [(100, 32), (0, 32)]
    assert wanted == saved_tokens(found[:3])  # nobody will ask this worker for the adapter
    plan, wanted = make_plan(found, num_blocks=5, max_model_len=1000, adapters=["adapter"], **limits)
    assert [one.prefix.lora for one in plan] == ["adapter", ""]  # 3 of 4 blocks
    assert wanted == saved_tokens(found)
    (short,), _ = make_plan([HotPrefix(packed(range(64)), 1.0)], num_blocks=99, max_model_len=50, **limits)
    assert short.prefix.num_tokens == 48


async def test_filling_ends_at_the_target_and_counts_what_is_done() -> None:
    done: list[HotPrefix] = []

    async def compute(prefix: HotPrefix) -> bool:
        done.append(prefix)
        return prefix.hits != 8

    plan: list[Ranked] = by_value([HotPrefix(packed([number] * 16), float(number)) for number in range(1, 10)], 999)
    progress = Progress(wanted=sum(one.saved_tokens for one in plan))
    await fill(plan, compute, 0.5, progress)
    assert progress.ended == "target"
    assert [one.hits for one in done] == [9, 8, 7, 6, 5]  # 8 failed
    assert progress.num_done == 4
    assert progress.num_tokens == 64
    assert progress.share == pytest.approx(27 / 45)


def lease(state: common_pb2.ReplicaState, waiting_tokens: int = 0, speed: float = 100.0) -> common_pb2.ReplicaLease:
    load = common_pb2.Load(waiting_tokens=waiting_tokens, prefill_tokens_per_s=speed)
    return common_pb2.ReplicaLease(replica="r", state=state, load=load)


def test_a_fleet_cannot_wait_when_nobody_is_ready_or_all_wait_long() -> None:
    ready, warming = common_pb2.READY, common_pb2.WARMING
    assert pressure_of([]) == pressure_of([lease(warming)]) == "no other replica is ready"
    assert pressure_of([lease(ready), lease(ready, 900)]) == ""
    assert pressure_of([lease(ready, 10**6, speed=0.0)]) == ""
    assert pressure_of([lease(ready, 200), lease(ready, 1000)]).startswith("6.0 s")
