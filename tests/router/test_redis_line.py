"""A loop's own connection: an answer belongs to its command, whatever became of the one before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.redis_client import Line, connect_redis


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    client = connect_redis(redis_url, fleet="line", timeout_s=0.3)
    yield client
    await client.aclose()


async def test_streams_are_read_as_the_client_reads_them(client: Any) -> None:
    await client.delete("line:a", "line:b")
    for number in range(3):
        await client.xadd("line:a", {"b": b"\xff%d" % number, "t": str(number)})
    await client.xadd("line:b", {"b": "other"})
    cursors: Any = {b"line:a": "0-0", b"line:b": "0-0"}
    line = Line(client)
    found = await line.read_streams(cursors, 2, 10)
    expected = await client.xread(cursors, count=2, block=10)
    assert found == [(stream, entries) for stream, entries in expected]
    assert [len(entries) for _, entries in found] == [2, 1]
    assert await line.read_streams({b"line:a": found[0][1][-1][0].decode()}, 2, 10) != []
    assert await line.read_streams({b"line:b": found[1][1][-1][0].decode()}, 2, 10) == []


async def test_an_error_is_the_answer_of_its_command_alone(client: Any) -> None:
    line = Line(client)
    await client.set("line:text", "x")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await line.ask("SMEMBERS", "line:text")
    assert await line.ask("GET", "line:text") == b"x"


async def test_what_a_cancelled_command_would_have_got_is_nobody_s_answer(client: Any) -> None:
    line = Line(client)
    for _ in range(3):
        waiting = asyncio.create_task(line.ask("BLPOP", "line:nothing", "0.1"))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await line.ask("ECHO", "mine") == b"mine"


async def test_a_silent_server_is_given_up_after_the_client_s_timeout(client: Any) -> None:
    line = Line(client)
    with pytest.raises(RedisTimeoutError):
        await line.ask("BLPOP", "line:nothing", 5)
    assert await line.ask("ECHO", "mine") == b"mine"
    assert await client.ping(), "and the client's pool goes on with connections that have its timeout"
