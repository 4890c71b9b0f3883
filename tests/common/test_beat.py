"""A loop that hangs is told of from outside it: by threads, by the metrics port, by a file."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from common.beat import Beat, why_dead
from common.metrics_server import MetricsServer


def healthz(port: int, path: str = "/healthz") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_a_loop_that_hangs_is_seen_and_one_that_turns_again_is_well(tmp_path: Path) -> None:
    beat = Beat(tmp_path / "alive")
    server = MetricsServer(CollectorRegistry(), lambda: "", beat.why_dead, address="127.0.0.1", port=0)
    beating = asyncio.create_task(beat.run())
    while not (tmp_path / "alive").exists() or why_dead(tmp_path / "alive") or beat.why_dead():
        await asyncio.sleep(0.05)
    while await asyncio.to_thread(healthz, server.port) != (200, "ok\n"):
        await asyncio.sleep(0.05)
    seen: list[tuple[str, str, tuple[int, str]]] = []

    def look() -> None:
        while not beat.why_dead():
            time.sleep(0.05)
        time.sleep(0.2)
        seen.append((beat.why_dead(), why_dead(tmp_path / "alive"), healthz(server.port)))

    looking = threading.Thread(target=look)
    looking.start()
    looking.join()  # here, in the loop
    inside, outside, (code, _) = seen[0]
    assert "its event loop has not turned for" in inside
    assert "its event loop has not turned for" in outside
    assert code == 503
    while beat.why_dead():
        await asyncio.sleep(0.05)
    beating.cancel()
    server.stop()


def test_the_metrics_port_has_three_paths_and_no_other() -> None:
    server = MetricsServer(CollectorRegistry(), lambda: "", lambda: "", address="127.0.0.1", port=0)
    codes = {path: healthz(server.port, path)[0] for path in ("/metrics", "/healthz", "/readyz", "/nope", "/")}
    server.stop()
    assert codes == {"/metrics": 200, "/healthz": 200, "/readyz": 200, "/nope": 404, "/": 404}


def test_a_beat_s_file_is_none_until_it_beats(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        why_dead(tmp_path / "alive")
    (tmp_path / "alive").touch()
    os.utime(tmp_path / "alive", (time.time() - 60, time.time() - 60))
    assert "60 s" in why_dead(tmp_path / "alive")
