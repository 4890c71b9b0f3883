"""Parts as child processes: what cannot be started is tried again, and told of."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from warmfront_pb.v1 import common_pb2

from router.reconcile import Group
from router.registry import LeaseReader
from tests.fakes.simulated_worker import TOKEN, SimulatedWorker, Spec
from tests.support import free_port
from tests.warmfront.test_cluster import GUARD_S
from warmfront.processes import ChildProcesses
from warmfront.run_dir import RunDir
from warmfront.store import EmbeddedValkey


async def test_a_part_that_cannot_be_started_is_tried_again_and_hides_nobody_else(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    redis_url = "redis://127.0.0.1:1/0"  # nobody: the process ends by itself
    parts = ChildProcesses(RunDir(path=tmp_path), logs, {})
    await parts.begin("few", asyncio.Event())  # whose controller wants nothing yet: there is no file
    logs.rename(tmp_path / "away")  # somebody tidies up
    await asyncio.to_thread(parts.start, Group(role="worker", count=1, settings={"redis": redis_url}), "w7", "abc")
    (seen,) = await asyncio.to_thread(parts.look, {})
    assert (seen.is_restarting, "it cannot be started: [Errno 2]" in seen.fault) == (True, True), seen

    logs.mkdir()
    async with asyncio.timeout(GUARD_S):
        while not seen.pid:
            (seen,) = await asyncio.to_thread(parts.look, {})
    assert (logs / "w7.log").exists()
    hurry = asyncio.Event()
    hurry.set()
    await parts.stop("worker", 0, hurry)


async def test_a_router_on_shared_ports_tells_by_itself_whether_it_can_answer(tmp_path: Path, store: str) -> None:
    parts = ChildProcesses(RunDir(path=tmp_path), tmp_path, {})
    await parts.begin("told", asyncio.Event())
    token = tmp_path / "token"
    token.write_text(TOKEN)
    ports = {"http_port": free_port(), "grpc_port": free_port(), "reuse_port": True}
    settings = {"redis": store, "fleet": "told", "worker_token_file": str(token), "heartbeat": "100ms", **ports}
    await asyncio.to_thread(parts.start, Group(role="router", count=1, settings=settings), "router-0", "abc")

    async def until_told(state: str, not_ready: str) -> None:
        seen = None
        async with asyncio.timeout(GUARD_S):
            while seen is None or (seen.state, seen.not_ready, seen.error) != (state, not_ready, ""):
                (seen,) = await asyncio.to_thread(parts.look, {})
                await asyncio.sleep(0.05)

    await until_told("READY", "no replica is registered in fleet 'told'")
    worker = await SimulatedWorker(Spec(store, fleet="told")).start()
    await until_told("READY", "")
    await worker.stop()
    (first,) = await asyncio.to_thread(parts.look, {})
    os.kill(first.pid, signal.SIGKILL)
    again = first
    async with asyncio.timeout(GUARD_S):
        while again.pid in (0, first.pid):
            (again,) = await asyncio.to_thread(parts.look, {})
            await asyncio.sleep(0.05)
    assert again.fault.startswith("it was killed (SIGKILL")  # also by whoever did not look in between
    hurry = asyncio.Event()
    hurry.set()
    await parts.stop("router", 0, hurry)


@pytest.mark.slow
async def test_many_workers_that_hang_are_looked_at_together(tmp_path: Path, temp_root: Path) -> None:
    valkey = EmbeddedValkey(tmp_path, {})
    redis_url = valkey.url
    (tmp_path / "logs").mkdir()
    parts = ChildProcesses(RunDir(path=tmp_path), tmp_path / "logs", {})
    await parts.begin("many", asyncio.Event())
    settings = {"redis": redis_url, "fleet": "many", "engine": "simulated", "model": "bytes"}
    for name in ("w0", "w1", "w2"):
        await asyncio.to_thread(parts.start, Group(role="worker", count=3, settings=settings), name, "abc")
    reader, leases = LeaseReader(redis_url, None, "many"), {}
    async with asyncio.timeout(GUARD_S):
        while sum(lease.state == common_pb2.READY for lease in leases.values()) < 3:
            leases = {lease.replica: lease for lease in await asyncio.to_thread(reader.read) or ()}
    pids = [seen.pid for seen in await asyncio.to_thread(parts.look, leases)]

    took_s = []
    for hung in (pids[:1], pids[1:]):  # one of them, then all
        for pid in hung:
            os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        await asyncio.to_thread(parts.look, leases)
        took_s.append(time.monotonic() - began_s)
    hurry = asyncio.Event()
    hurry.set()
    await parts.stop("worker", 0, hurry)
    valkey.stop()
    assert took_s[1] < 2 * took_s[0]
