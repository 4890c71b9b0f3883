"""What tests of several folders need."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence


def free_port(below: int = 65535) -> int:
    """A port of 127.0.0.1 that nobody listens on right now; the bus of a Redis cluster wants one 10,000 above it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < below:
            return port


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as they stand in messages: 4 bytes each, little-endian."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)
