"""Parts as child processes: what cannot be started is tried again, and told of."""

from __future__ import annotations

import asyncio
from pathlib import Path

from router.reconcile import Group
from tests.warmfront.test_cluster import GUARD_S
from warmfront.processes import ChildProcesses
from warmfront.run_dir import RunDir


async def test_a_part_that_cannot_be_started_is_tried_again_and_hides_nobody_else(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    redis_url = "redis://127.0.0.1:1/0"  # nobody: the process ends by itself
    parts = ChildProcesses(RunDir(path=tmp_path), logs, {})
    await parts.begin("few")  # whose controller wants nothing yet: there is no file
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
