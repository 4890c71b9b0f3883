"""The figures that a router tells of its requests, its replicas and its index: each moves when what it counts does."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

from warmfront_pb.v1 import common_pb2

from cache.events import EventBatch, Stored
from cache.prefix_index import Outcome
from tests.router.conftest import Cluster
from tests.support import until

BODY: dict[str, Any] = {"prompt": "p" * 100, "max_tokens": 2, "temperature": 0}


def figure(cluster: Cluster, name: str, **labels: str) -> float:
    """Of the first router; one that was never set is 0."""
    return cluster.router.metrics.registry.get_sample_value(f"warmfront_router_{name}", labels) or 0.0


async def ask(cluster: Cluster, **more: Any) -> str:
    """Which replica answered."""
    response = await cluster.http.post("/v1/completions", json={**BODY, **more})
    assert response.status_code == 200, response.text
    return str(response.headers["x-warmfront-replica"])


async def test_what_was_predicted_and_what_was_found_are_told_and_how_long_it_took(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router()

    def errors() -> tuple[float, ...]:
        return tuple(figure(cluster, "prediction_error_tokens_bucket", le=le) for le in ("-1.0", "64.0", "256.0"))

    await ask(cluster)
    await until(cluster.index_is_true)
    await ask(cluster)
    assert figure(cluster, "prompt_tokens_total") == 200
    assert figure(cluster, "matched_tokens_total") == 96
    assert errors() == (0, 2, 2)
    worker.faults.is_reporting_paused = True
    assert worker.cache.reset()  # which the router cannot know
    await ask(cluster)
    assert errors() == (0, 2, 3), "96 tokens that were predicted were not there"
    assert [figure(cluster, f"{name}_seconds_count") for name in ("decision", "ttft", "queue")] == [3, 3, 0]
    assert figure(cluster, "decision_seconds_sum") > 0
    assert figure(cluster, "ttft_seconds_sum") > figure(cluster, "decision_seconds_sum")


async def test_regret_is_what_the_chosen_one_held_less_than_the_best(cluster: Cluster) -> None:
    for name in ("w0", "w1"):
        await cluster.add_worker(name)
    await cluster.add_router(policy="round_robin")
    assert await ask(cluster) != await ask(cluster)
    assert figure(cluster, "regret_tokens_total") == 96


async def test_tokens_that_were_not_encoded_again_are_counted(cluster: Cluster) -> None:
    await cluster.add_worker("w0")
    await cluster.add_router()
    chat = {"max_tokens": 2, "messages": [{"role": "user", "content": "a question " * 40}]}
    for _ in range(2):
        assert (await cluster.http.post("/v1/chat/completions", json=chat)).status_code == 200
    await until(lambda: figure(cluster, "tokenizer_cache_hits_total") >= len("a question ") * 40)


async def test_what_waits_in_the_router_is_told_in_requests_and_tokens(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router(max_inflight_requests=1)
    worker.faults.gate = asyncio.Event()
    asked = [asyncio.create_task(ask(cluster, prompt=letter * 100)) for letter in "abc"]
    await until(lambda: figure(cluster, "queue_requests") == 2)
    assert figure(cluster, "queue_tokens") == 200
    assert figure(cluster, "inflight_tokens", replica="w0") in (0, 100)  # set with the next look at the leases
    await until(lambda: figure(cluster, "inflight_tokens", replica="w0") == 100)
    worker.faults.gate.set()
    await asyncio.gather(*asked)
    assert (figure(cluster, "queue_requests"), figure(cluster, "queue_tokens")) == (0, 0)
    assert figure(cluster, "queue_seconds_count") == 2


async def test_the_fleet_is_told_by_its_states_and_by_the_work_that_its_leases_tell_of(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0", prefill_tokens_per_s=1000.0)
    await cluster.add_worker("other", own_contract=True, block_size=32)
    router = await cluster.add_router()
    await until(lambda: len(router.fleet.members) == 2)
    await until(lambda: figure(cluster, "replicas_refused") == 1)
    assert (figure(cluster, "replicas_ready"), figure(cluster, "redis_up")) == (1, 1)
    assert (figure(cluster, "waiting_seconds"), figure(cluster, "work")) == (0, 0)
    worker.faults.waiting_tokens = 500
    await until(lambda: figure(cluster, "waiting_seconds") == 0.5)
    assert figure(cluster, "work") == 1  # target: half a second
    worker.state = common_pb2.DRAINING
    await until(lambda: figure(cluster, "replicas_ready") == 0)


async def test_blocks_that_no_prompt_can_match_and_replicas_known_in_part_are_told(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0", lease_s=60.0)
    router = await cluster.add_router()
    index = router.fleet.index
    await ask(cluster)
    await until(cluster.index_is_true)
    await until(lambda: figure(cluster, "index_blocks", replica="w0") == index.num_blocks("w0") == 6)
    assert (figure(cluster, "index_parentless_blocks"), figure(cluster, "index_partial_replicas")) == (0, 0)
    worker.faults.is_reporting_paused = True  # so that nothing heals
    seq = index.last_seq("w0")
    orphans = Stored(2**63, array("Q", [1, 2, 3]))
    assert index.apply("w0", EventBatch("w0", worker.generation, seq + 1, (orphans,))) is Outcome.APPLIED
    await until(lambda: figure(cluster, "index_parentless_blocks") == 3)
    index.max_blocks = index._roomy = 4
    more = Stored(0, array("Q", [4]))
    assert index.apply("w0", EventBatch("w0", worker.generation, seq + 2, (more,))) is Outcome.APPLIED
    await until(lambda: figure(cluster, "index_partial_replicas") == 1)
