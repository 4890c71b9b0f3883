"""A rolling replacement of real models: nobody meets a cold system prompt on a new worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.integration.cluster import ROOT, LocalCluster, cluster
from tests.support import wait_until

SMALL = ("--kv-blocks", "1500", "--max-model-len", "2048", "--dtype", "float32", "--heartbeat", "500ms")
SYSTEM = (
    "You are the archivist of a small museum of clocks. You answer in one plain sentence, you never make up a maker's "
    "name, and where the archive says nothing you say so. Dates are given as years. Prices are never named. "
) * 3


def ask(one: LocalCluster, question: str) -> tuple[str, int]:
    """The replica that answered, and its cached tokens."""
    body = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "max_tokens": 8,
        "temperature": 0,
    }
    answer = httpx.post(f"{one.http}/v1/chat/completions", json=body, timeout=240).raise_for_status()
    usage = answer.json()["usage"]
    return answer.headers["x-warmfront-replica"], usage["prompt_tokens_details"]["cached_tokens"]


def generations(one: LocalCluster) -> set[str]:
    """Of the replicas that are READY."""
    return {replica["generation"] for replica in one.replicas().values() if replica["state"] == "READY"}


def warmfront(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "warmfront", *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_while_all_workers_are_replaced_no_request_fails_and_hits_do_not_fall() -> None:
    """The bench's short run. Its times are for a machine of one's own, so they are no matter here."""
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "bench" / "rollout.py"), "--quick", "--only", "with"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout.splitlines()[0])
    print(done.stdout, done.stderr)
    assert (figures["failed_requests"], figures["cut_streams"], figures["errors"]) == (0, 0, [])
    assert figures["hit_ratio_worst_window"] >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_first_request_on_each_new_worker_hits_the_hot_system_prompt(tmp_path: Path, redis_url: str) -> None:
    fleet = ("--redis", redis_url, "--fleet", "rolled")
    with cluster(tmp_path, "--replicas", "2", "--without-ray", *fleet, *SMALL) as one:
        for number in range(8):
            ask(one, f"Who repaired the clock with number {number}?")
        old = generations(one)
        wait_until(lambda: ask(one, "What stands in room 3?")[1] > 0 or None, guard_s=60, what="a warm system prompt")

        wait_until(lambda: warmfront("hot", "--json", *fleet).strip(), guard_s=120, what="a hot prefix")
        assert "every worker is replaced" in warmfront("rollout", "--ready-file", str(one.ready_file))
        wait_until(lambda: len(generations(one)) == 2 and not generations(one) & old, guard_s=60, what="new workers")

        cached: dict[str, list[int]] = {}
        with ThreadPoolExecutor(6) as users:  # at once: one after another they would all go to one that is warm
            for _ in range(10):
                questions = [
                    f"Which year is engraved on the case of clock {number}, and by whom?" for number in range(6)
                ]
                for replica, tokens in users.map(partial(ask, one), questions):
                    cached.setdefault(replica, []).append(tokens)
                if len(cached) == 2:
                    break
        print(f"cached tokens of each answer by a new worker, in the order of their questions: {cached}")
        assert len(cached) == 2
        assert all(tokens > 0 for answers in cached.values() for tokens in answers), "nobody met a cold system prompt"
