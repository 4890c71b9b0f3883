"""The life of one worker process: its states, its exit codes, what it leaves behind."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio as aioredis
from warmfront_pb.v1 import common_pb2

from tests.fakes.runner import FakeRunner, fake_loader
from tests.support import free_port
from tests.worker.served import config_for, serve
from worker.config import WorkerConfig
from worker.main import EXIT_FAILED, EXIT_OK, EXIT_WRONG_USE, Worker
from worker.replica import Loaded, Progress
from worker.simulated import BYTES

ROOT = Path(__file__).parents[2]
PROMPT = list(range(100, 140))


async def lease_of(config: WorkerConfig) -> common_pb2.ReplicaLease | None:
    client = aioredis.from_url(config.redis_url)
    data = await client.get(f"wf:{{{config.fleet}}}:replica:{config.replica_id}")
    await client.aclose()
    return common_pb2.ReplicaLease.FromString(data) if data else None


async def until_state(config: WorkerConfig, state: common_pb2.ReplicaState | None) -> None:
    async with asyncio.timeout(20):
        while True:
            lease = await lease_of(config)
            if (lease.state if lease else None) == state:
                return
            await asyncio.sleep(0.01)


def gated_loader(gate: threading.Event) -> Callable[[WorkerConfig, Progress], Loaded]:
    def load(config: WorkerConfig, progress: Progress) -> Loaded:
        gate.wait()
        return fake_loader()(config, progress)

    return load


async def test_a_worker_is_seen_starting_then_ready_then_gone(valkey_url: str) -> None:
    config, gate = config_for(valkey_url), threading.Event()
    worker, addresses = Worker(config, gated_loader(gate)), []
    running = asyncio.create_task(worker.run(addresses.append))
    await until_state(config, common_pb2.STARTING)
    starting = await lease_of(config)
    assert starting is not None
    assert starting.address == worker.replica.address
    assert not starting.HasField("contract")
    gate.set()
    await until_state(config, common_pb2.READY)
    ready = await lease_of(config)
    assert ready is not None
    assert ready.contract.served_model_name == "fake"
    assert addresses == [worker.replica.address]
    worker.drain()
    assert await running == EXIT_OK
    assert await lease_of(config) is None


async def test_a_drain_while_the_model_loads_ends_at_once(valkey_url: str) -> None:
    config, gate = config_for(valkey_url), threading.Event()
    worker = Worker(config, gated_loader(gate))
    running = asyncio.create_task(worker.run())
    await until_state(config, common_pb2.STARTING)
    worker.drain()
    assert await running == EXIT_OK
    gate.set()
    assert await lease_of(config) is None


async def test_draining_is_in_the_lease_while_requests_end(valkey_url: str) -> None:
    config = config_for(valkey_url)
    async with serve(config, step_s=0.01) as served:
        call = served.client.start(PROMPT, sampling={"max_tokens": 60})
        await call.read()
        served.worker.drain()
        await until_state(config, common_pb2.DRAINING)
        while (message := await call.read()) is not grpc.aio.EOF:
            last = message
        assert last.finish_reason == "length"
        assert await served.task == EXIT_OK
    assert await lease_of(config) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("no model at /nowhere"), EXIT_WRONG_USE), (RuntimeError("out of memory"), EXIT_FAILED)],
)
async def test_a_model_that_does_not_load_ends_the_process_with_its_reason(
    valkey_url: str, error: Exception, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    def load(config: WorkerConfig, progress: Progress) -> Loaded:
        raise error

    config = config_for(valkey_url)
    with caplog.at_level(logging.INFO, logger="worker"):
        assert await Worker(config, load).run() == code
    assert str(error) in caplog.records[-1].getMessage()
    assert await lease_of(config) is None


async def test_the_log_tells_of_each_step_of_a_start_and_of_each_tenth_of_one_that_knows_its_share(
    valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def load(config: WorkerConfig, progress: Progress) -> Loaded:
        for num_done in range(26):
            progress("loading weights", num_done / 100)
        progress("testing itself", None)
        raise ValueError("that is enough")

    with caplog.at_level(logging.INFO, logger="worker"):
        await Worker(config_for(valkey_url), load).run()
    told = [record.getMessage().partition("doing=")[2] for record in caplog.records if "doing=" in record.getMessage()]
    assert told == [*(f"'loading weights' percent={percent}" for percent in (0, 10, 20)), "'testing itself'"]


async def test_a_dead_redis_is_wrong_use() -> None:
    worker = Worker(config_for("redis://127.0.0.1:1/0"), fake_loader())
    assert await worker.run() == EXIT_WRONG_USE
    assert "--redis" in worker.replica.fault


async def test_a_taken_port_is_wrong_use_and_grpc_is_quiet_about_it(
    valkey_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        worker = Worker(config_for(valkey_url, port=holder.getsockname()[1]), fake_loader())
        assert await worker.run() == EXIT_WRONG_USE
    assert "cannot listen" in worker.replica.fault
    assert "Address already in use" in worker.replica.fault
    assert "chttp2" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 32}, "block_size is 32 here and 16 in the fleet"),
        ({"prefix_caching_hash_algo": "sha256"}, "hash_algorithm is sha256 here"),
        ({"hash_seed": "another"}, "the hash seed differs"),
        ({"served_model_name": "other"}, "served_model_name is other here and fake"),
        ({"max_model_len": 400}, "max_model_len is 400 here and 500"),
        ({"mode": "deterministic"}, "mode is deterministic here and fast"),
    ],
)
async def test_a_worker_that_differs_from_its_fleet_is_refused(
    valkey_url: str, settings: dict[str, object], words: str
) -> None:
    config = config_for(valkey_url)
    async with serve(config):
        other = Worker(config_for(valkey_url, fleet=config.fleet, replica_id="w1", **settings), fake_loader())
        assert await other.run() == EXIT_WRONG_USE
    assert words in other.replica.fault


async def test_a_worker_with_a_larger_pool_takes_the_longest_context_of_its_fleet(valkey_url: str) -> None:
    def settings(fleet: str, name: str, kv_blocks: int) -> WorkerConfig:
        more: dict[str, Any] = {"engine": "simulated", "model": BYTES, "prewarm": False}
        return config_for(valkey_url, fleet=fleet, replica_id=name, kv_blocks=kv_blocks, **more)

    worker = Worker(settings("pools", "w0", 100))
    running = asyncio.create_task(worker.run())
    await until_state(settings("pools", "w0", 100), common_pb2.READY)
    larger = Worker(settings("pools", "w1", 200))
    larger_running = asyncio.create_task(larger.run())
    await until_state(settings("pools", "w1", 200), common_pb2.READY)
    lease = await lease_of(settings("pools", "w1", 200))
    assert lease is not None
    assert (lease.limits.max_model_len, lease.contract.max_model_len, lease.cache.kv_blocks) == (1600, 1600, 200)
    smaller = Worker(settings("pools", "w2", 50))
    assert await smaller.run() == EXIT_WRONG_USE
    assert "max_model_len is 800 here and 1600 in the fleet" in smaller.replica.fault
    for one in (worker, larger):
        one.drain()
    assert await running == await larger_running == EXIT_OK


async def test_two_workers_of_one_fleet_get_along(valkey_url: str) -> None:
    config = config_for(valkey_url)
    async with serve(config) as one, serve(config_for(valkey_url, fleet=config.fleet, replica_id="w1")) as two:
        assert one.address != two.address
        first = await one.client.generate(PROMPT, sampling={"max_tokens": 8})
        second = await two.client.generate(PROMPT, sampling={"max_tokens": 8})
    assert first.token_ids == second.token_ids


async def test_a_newer_boot_of_the_same_replica_ends_the_older_one(valkey_url: str) -> None:
    config = config_for(valkey_url)
    async with serve(config) as old:
        await asyncio.sleep(0.002)
        async with serve(config) as new:
            assert await old.task == EXIT_FAILED
            assert new.worker.replica.generation in old.worker.replica.fault
            lease = await lease_of(config)
            assert lease is not None
            assert lease.generation == new.worker.replica.generation
            assert (await new.client.generate(PROMPT, sampling={"max_tokens": 1})).token_ids


async def test_a_dead_engine_ends_the_process_and_its_requests_can_go_elsewhere(valkey_url: str) -> None:
    config = config_for(valkey_url)
    async with serve(config, runner=FakeRunner(201, 16, step_s=0.01)) as served:
        call = served.client.start(PROMPT, sampling={"max_tokens": 400})
        await call.read()
        served.runner.dead = True
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await served.task == EXIT_FAILED
        assert "the device is gone" in served.worker.replica.fault
    assert await lease_of(config) is None


async def test_a_step_that_never_ends_ends_the_process(valkey_url: str) -> None:
    config = config_for(valkey_url, step_limit_s=0.5)
    async with serve(config, step_s=0.005) as served:
        call = served.client.start(PROMPT, sampling={"max_tokens": 400})
        await call.read()
        served.runner.hangs.set()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await served.task == EXIT_FAILED
        assert "one step has lasted" in served.worker.replica.fault
        served.runner.hangs.clear()
        assert served.worker._engine is not None
        await asyncio.to_thread(served.worker._engine.stop)
    assert await lease_of(config) is None


async def test_a_step_that_takes_far_too_long_is_told_in_the_lease_until_it_ends(valkey_url: str) -> None:
    config = config_for(valkey_url, heartbeat_s=0.4)
    async with serve(config, step_s=0.005, hung_after_s=0.3) as served:
        call = served.client.start(PROMPT, sampling={"max_tokens": 40})
        for _ in range(10):
            await call.read()
        served.runner.hangs.set()
        while not (lease := await lease_of(config)) or not lease.load.hung_s:
            await asyncio.sleep(0.05)
        assert lease.state == common_pb2.READY
        assert lease.load.hung_s > 0.3
        served.runner.hangs.clear()
        while await call.read() is not grpc.aio.EOF:
            pass
        while not (lease := await lease_of(config)) or lease.load.hung_s:
            await asyncio.sleep(0.05)
        assert not served.task.done()


async def test_a_worker_whose_engine_hangs_still_ends_at_its_drain_deadline(valkey_url: str) -> None:
    config = config_for(valkey_url)
    async with serve(config, step_s=0.005, hung_after_s=0.3) as served:
        call = served.client.start(PROMPT, sampling={"max_tokens": 400})
        for _ in range(10):
            await call.read()
        served.runner.hangs.set()
        served.worker.drain(0.6)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await served.task == EXIT_OK
        served.runner.hangs.clear()
        assert served.worker._engine is not None
        await asyncio.to_thread(served.worker._engine.stop)
    assert await lease_of(config) is None


async def test_metrics_are_served_where_asked_and_nowhere_else(valkey_url: str) -> None:
    port = free_port()
    async with serve(config_for(valkey_url, metrics_port=port, compat_metrics=True)) as served:
        for _ in range(2):
            await served.client.generate(PROMPT, sampling={"max_tokens": 4})
        text = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        )
    assert "warmfront_worker_prefix_cache_queries_tokens_total 80.0" in text
    assert 'warmfront_worker_prefix_cache_hits_tokens_total{tier="device"} 32.0' in text
    assert "vllm:prefix_cache_hits_total 32.0" in text
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


async def test_workers_that_share_a_setting_take_the_first_metrics_port_that_is_free(valkey_url: str) -> None:
    first = free_port()
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", first))
        stranger.listen()
        async with serve(config_for(valkey_url, metrics_port=first), num_metrics_ports=3) as served:
            assert served.worker._metrics_server is not None
            assert first < served.worker._metrics_server.port <= first + 2


PROGRAM = """
import sys
from worker.config import WorkerConfig
from worker.main import run_workers
from worker.simulated import BYTES

given = {"redis_url": sys.argv[1], "fleet": sys.argv[2], "engine": "simulated", "model": BYTES}
config = WorkerConfig(replica_id="w0", lease_s=2.0, **given)
sys.exit(run_workers([config], lambda address: print(address, flush=True)))
"""


def start_process(config: WorkerConfig) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, config.redis_url, config.fleet],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_the_process(valkey_url: str, number: signal.Signals) -> None:
    config = config_for(valkey_url)
    process = start_process(config)
    assert process.stdout is not None
    assert (await asyncio.to_thread(process.stdout.readline)).startswith("127.0.0.1:")
    process.send_signal(number)
    assert await asyncio.to_thread(process.wait, 60) == EXIT_OK
    assert await lease_of(config) is None


def test_the_last_line_of_the_log_says_why_it_ended() -> None:
    process = start_process(config_for("redis://127.0.0.1:1/0"))
    _, log = process.communicate(timeout=60)
    assert process.returncode == EXIT_WRONG_USE
    last = log.strip().splitlines()[-1]
    assert re.match(r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=ERROR logger=worker.main ", last)
    assert "cannot use Redis at 127.0.0.1:1" in last


async def test_a_model_that_is_not_there_ends_a_worker_before_it_takes_a_living_one_s_id(valkey_url: str) -> None:
    config = config_for(valkey_url)
    async with serve(config) as served:
        other = Worker(config_for(valkey_url, fleet=config.fleet, model=Path("/nowhere")))
        assert await other.run() == EXIT_WRONG_USE
        assert other.replica.fault == "--model /nowhere: there is no such file or folder"
        assert (await served.client.generate(PROMPT, sampling={"max_tokens": 1})).token_ids
        lease = await lease_of(config)
        assert lease is not None
        assert lease.generation == served.worker.replica.generation
