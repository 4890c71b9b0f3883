"""What tests of several folders need."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from warmfront.store import lasting_port

T = TypeVar("T")
_given: deque[int] = deque(maxlen=1000)  # not given again so soon: nobody may listen there yet


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on right now, and that nobody is given who asks for any.

    So it is still free when a server starts on it a minute later, or once more: the system gives others ports from
    32768 on, Ray its workers those below 20000, and no call here gives it again.
    """
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of so many in a row, each of them as from ``free_port``."""
    while not _take(range(first := lasting_port(), first + count)):
        pass
    return first


def free_cluster_port() -> int:
    """One as from ``free_port`` for a node of a Redis cluster, whose bus wants the port that is 10,000 above it."""
    while not _take((port := lasting_port(), port + 10_000)):
        pass
    return port


def _take(ports: Sequence[int]) -> bool:
    """They are this caller's, if all of them can be had."""
    if ports[-1] >= 32_768 or not set(_given).isdisjoint(ports):
        return False
    with contextlib.ExitStack() as probes:
        for port in ports:
            try:
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                return False
    _given.extend(ports)
    return True


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as they stand in messages: 4 bytes each, little-endian."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def wait_until(look: Callable[[], T | None], what: str = "what is waited for", guard_s: float = 180.0) -> T:
    """The first true value of ``look``. Fails after ``guard_s``, which is a guard and no figure."""
    end_s = time.monotonic() + guard_s
    while not (value := look()):
        assert time.monotonic() < end_s, f"not seen within {guard_s:g} s: {what}"
        time.sleep(0.05)
    return value


async def until(look: Callable[[], Any], what: str = "what is waited for", guard_s: float = 180.0) -> None:
    """The same in an event loop; ``look`` may have to be awaited."""
    end_s = time.monotonic() + guard_s
    while True:
        value = look()
        if await value if inspect.isawaitable(value) else value:
            return
        assert time.monotonic() < end_s, f"not seen within {guard_s:g} s: {what}"
        await asyncio.sleep(0.01)
