"""Somebody else writes into our Redis: wrong types, rubbish, strange stream entries. It heals, and nobody notices."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import redis.asyncio as aioredis
from redis.exceptions import ResponseError

from router.config import RouterConfig
from router.main import Router
from tests.warmfront.test_prewarm_fleet import worker_of
from worker.main import Worker

GUARD_S = 60.0


async def clear(client: Any, key: str, rng: random.Random) -> None:
    await client.delete(key)


async def write_string(client: Any, key: str, rng: random.Random) -> None:
    await client.set(key, b"somebody's own")


async def write_rubbish(client: Any, key: str, rng: random.Random) -> None:
    await client.set(key, rng.randbytes(rng.randrange(200)))


async def write_list(client: Any, key: str, rng: random.Random) -> None:
    await client.delete(key)
    await client.rpush(key, b"a", b"b")


async def write_hash(client: Any, key: str, rng: random.Random) -> None:
    await client.delete(key)
    await client.hset(key, "a", b"b")


async def write_stream(client: Any, key: str, rng: random.Random) -> None:
    """An entry after all others where it is a stream; a stream where it is not."""
    if await client.type(key) not in (b"stream", b"none"):
        await client.delete(key)
    last = await client.xrevrange(key, count=1)
    after = int(last[0][0].split(b"-")[0]) + rng.choice([1, 7, 10**6, 10**12]) if last else time.time_ns() // 10**6
    await client.xadd(key, {b"b": rng.randbytes(40)}, id=f"{after}-0")


async def flip_bytes(client: Any, key: str, rng: random.Random) -> None:
    """The first bytes of what stands there, changed: it is no message or frame any more."""
    if await client.type(key) == b"string":
        data = await client.get(key)
        await client.set(key, b"\xff\xff" + (data or b"")[2:], keepttl=True)


async def add_member(client: Any, key: str, rng: random.Random) -> None:
    """A name that is no UTF-8, where names stand."""
    member = b"\xff" + rng.randbytes(3)
    if await client.type(key) == b"set":
        await client.sadd(key, member)
    elif await client.type(key) == b"zset":
        await client.zadd(key, {member: 1})


DEEDS: list[Callable[[Any, str, random.Random], Awaitable[None]]] = [
    *(clear, write_string, write_rubbish, write_list, write_hash, write_stream, flip_bytes, add_member),
]


def keys_of(fleet: str, workers: list[Worker], router: Router) -> list[str]:
    prefix = f"wf:{{{fleet}}}:"
    names = ["contract", "replicas", "routers", "dispatch", "hot", f"load:{router.config.router_id}"]
    for worker in workers:
        replica = worker.replica
        boot = f"{replica.config.replica_id}:{replica.generation}"
        names += [f"replica:{replica.config.replica_id}", f"events:{boot}", f"snapshot:{boot}", f"wanted:{boot}"]
    return [prefix + name for name in names]


def differences(workers: list[Worker], router: Router) -> list[str]:
    """Where the router's index is not the workers' caches: in number, or for any key that a cache holds."""
    index, wrong = router.fleet.index, []
    for worker in workers:
        name = worker.replica.config.replica_id
        assert worker._engine is not None
        cache = worker._engine._cache
        if index.num_blocks(name) != cache.num_cached_blocks:
            wrong.append(f"{name}: {index.num_blocks(name)} blocks, the cache has {cache.num_cached_blocks}")
            continue
        for prompt in PROMPTS:
            chain = cache.scheme.chain(list(prompt.encode()))
            held = index.match(chain.keys).get(name)
            depth = sum(1 for _ in held_front(cache, chain))
            if (held.total if held is not None else 0) != depth:
                wrong.append(f"{name}: {held} of a prompt, the cache has {depth}")
    return wrong


def held_front(cache: Any, chain: Any) -> Any:
    for one in chain.hashes:
        if one not in cache._device:
            return
        yield one


PROMPTS = [f"{letter} is for everything that begins so. " * 4 for letter in "abcdefgh"]


async def settled(workers: list[Worker], router: Router, seed: int, done: list[str]) -> None:
    end = time.monotonic() + GUARD_S
    while (
        (wrong := differences(workers, router))
        or router.fleet.why_not_ready()
        or len(router.fleet.ready) < len(workers)
    ):
        assert time.monotonic() < end, (seed, done, wrong, router.fleet.why_not_ready())
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
async def test_whatever_is_written_under_our_keys_requests_are_answered_and_the_index_comes_true(
    store: str, seed: int
) -> None:
    rng = random.Random(seed)
    fleet = f"foreign-{seed}"
    foreign: Any = aioredis.from_url(store)
    settings = {"fleet": fleet, "prewarm": False, "token_reuse": False}
    async with worker_of(store, "w0", **settings) as first, worker_of(store, "w1", **settings) as second:
        workers = [first, second]
        config = RouterConfig(
            redis_url=store, fleet=fleet, router_id="r", http_port=0, grpc_port=0, heartbeat_s=0.1, lease_s=1.0
        )
        router = Router(config)
        client = httpx.AsyncClient(base_url=(await router.start()).http, timeout=60)
        await settled(workers, router, seed, [])
        deeds: list[tuple[Any, str]] = [(deed, key) for key in keys_of(fleet, workers, router) for deed in DEEDS]
        rng.shuffle(deeds)
        done: list[str] = []
        for number, (deed, key) in enumerate(deeds):
            with contextlib.suppress(ResponseError):  # its owner has just written it anew
                await deed(foreign, key, rng)
            done = [*done[-5:], f"{deed.__name__} {key}"]
            body = {"prompt": rng.choice(PROMPTS), "max_tokens": 1 + number % 20, "temperature": 0}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, (seed, done, answer.text)
            if number % 3 == 2:
                await settled(workers, router, seed, done)
        await settled(workers, router, seed, done)
        # A router that starts now finds all it needs, and so does a worker.
        late = Router(RouterConfig(redis_url=store, fleet=fleet, http_port=0, grpc_port=0, heartbeat_s=0.1))
        await late.start()
        await settled(workers, late, seed, done)
        await late.stop()
        async with worker_of(store, "w2", **settings) as third:
            await settled([*workers, third], router, seed, done)
        assert b"redis_bad_keys_total" in router.metrics.text()
        await client.aclose()
        await router.stop()
    await foreign.aclose()
