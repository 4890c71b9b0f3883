"""During a rollout a router meets workers of the version before: it works with them, and says that they are."""

from __future__ import annotations

import io

from rich.console import Console

from common.protocol import PROTOCOL_VERSION
from router.registry import SUPPORTED_PROTOCOLS
from tests.fakes.previous_worker import PreviousWorker
from tests.fakes.simulated_worker import Spec
from tests.router.conftest import Cluster
from tests.support import until
from warmfront.status import render

PROMPT = "the same long question of somebody " * 8


async def complete(cluster: Cluster, prompt: str = PROMPT) -> tuple[str, int]:
    """The replica that answered, and the cached tokens."""
    answer = await cluster.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "temperature": 0})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.headers["x-warmfront-replica"], usage["prompt_tokens_details"]["cached_tokens"]


async def previous(cluster: Cluster, name: str) -> PreviousWorker:
    worker = PreviousWorker(Spec(cluster.redis_url, replica=name, fleet=cluster.fleet))
    cluster.workers[name] = worker
    await worker.start()
    return worker


def test_routers_know_their_own_protocol_and_the_one_before() -> None:
    assert SUPPORTED_PROTOCOLS == (PROTOCOL_VERSION, PROTOCOL_VERSION - 1)


async def test_requests_go_to_workers_of_both_versions_and_hit_what_they_hold(cluster: Cluster) -> None:
    new, old = await cluster.add_worker("new"), await previous(cluster, "old")
    await cluster.add_router()
    served = [await complete(cluster, f"{number} {PROMPT}") for number in range(24)]
    assert {replica for replica, _ in served} == {"new", "old"}
    await until(cluster.index_is_true)
    for number, (replica, _) in enumerate(served):
        again, cached = await complete(cluster, f"{number} {PROMPT}")
        assert (again, cached > 0) == (replica, True)
    assert old.unknown_fields == []
    assert cluster.load == 0
    assert len(new.requests) + len(old.requests) == 48


async def test_a_worker_that_dies_is_stood_in_for_by_one_of_the_other_version(cluster: Cluster) -> None:
    await cluster.add_worker("new")
    old = await previous(cluster, "old")
    await cluster.add_router()
    for number in range(6):
        await complete(cluster, f"{number} {PROMPT}")
    await old.stop()
    assert {(await complete(cluster, f"{number} {PROMPT}"))[0] for number in range(6)} == {"new"}


async def test_status_says_which_workers_are_of_the_version_before(cluster: Cluster) -> None:
    await cluster.add_worker("new")
    await previous(cluster, "old")
    await cluster.add_router()
    answer = (await cluster.http.get("/v1/replicas")).json()
    assert answer["protocol_version"] == PROTOCOL_VERSION
    versions = {one["id"]: (one["protocol_version"], one["fault"]) for one in answer["replicas"]}
    assert versions == {"new": (PROTOCOL_VERSION, ""), "old": (PROTOCOL_VERSION - 1, "")}
    console = Console(file=io.StringIO(), width=200)
    console.print(render(answer, "http://x"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "old: speaks protocol 1, this router 2: it is of the version before" in shown
    assert "new: speaks" not in shown


async def test_what_came_later_is_done_by_the_new_ones_and_the_old_ones_say_that_they_cannot(cluster: Cluster) -> None:
    await cluster.add_worker("new")
    await previous(cluster, "old")
    await cluster.add_router()
    await complete(cluster)
    explained = await cluster.http.post("/v1/explain", json={"prompt": PROMPT})
    assert explained.status_code == 200, explained.text
    reset = (await cluster.http.post("/v1/cache/reset", json={})).json()
    assert {one["replica"]: one["outcome"] for one in reset["replicas"]} == {"new": "reset", "old": "reset"}
    drained = await cluster.http.post("/v1/drain", json={"replica": "old", "deadline_ms": 1000})
    assert drained.status_code == 200
    await until(lambda: set(cluster.router.fleet.ready) == {"new"})
