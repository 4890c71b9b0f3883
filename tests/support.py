"""What tests of several folders need."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence

from warmfront.store import lasting_port


def free_port(below: int = 32_768) -> int:
    """A port of 127.0.0.1 that nobody listens on right now, and that nobody is given who asks for any.

    So it is still free when a server starts on it a minute later, or once more: the system gives others ports from
    32768 on. The bus of a Redis cluster wants one 10,000 above it.
    """
    while (port := lasting_port()) >= below:
        pass
    return port


def free_ports(count: int) -> int:
    """The first of so many in a row, each of them as from ``free_port``."""
    while True:
        first = free_port(below=32_768 - count)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as they stand in messages: 4 bytes each, little-endian."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)
