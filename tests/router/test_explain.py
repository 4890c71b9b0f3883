"""Every decision can be explained in the terms of its cost, and explaining changes nothing."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from typing import Any

import grpc
import pytest
from warmfront_pb.v1 import common_pb2

from router.errors import NotFoundError
from router.explain import Absence, RecentDecisions, Record, as_metadata, explain
from router.policy import Ask, Candidate, choose
from router.segments import pack_ids
from tests.router.conftest import Cluster
from tests.router.reflective import ReflectiveClient
from tests.support import until

PROMPT = {"prompt": "p" * 100, "max_tokens": 2}


def record(num_tokens: int = 100, policy: str = "warmfront", *candidates: Candidate, **changes: Any) -> Record:
    decision = choose(policy, Ask(num_tokens), candidates, random.Random(0)) if candidates else None
    fields: dict[str, Any] = {
        "request_id": "r1",
        "decided_at_s": 1.0,
        "policy": policy,
        "num_tokens": num_tokens,
        "num_blocks": num_tokens // 16,
        "block_size": 16,
        "num_retries": 0,
        "decision": decision,
        "absent": {},
        "passed_over": {},
        "eligible": {one.replica: None for one in candidates},
    }
    return Record(**{**fields, **changes})


def reasons(one: Record) -> dict[str, str]:
    return {replica.replica: replica.reason for replica in explain(one).replicas}


def test_blocks_are_told_by_tier_and_the_cost_by_term() -> None:
    warm = Candidate("a", matched_tokens=80, pending_tokens=16, host_tokens=32, waiting_tokens=50, waiting_requests=1)
    warm.speed = 100
    explanation = explain(record(100, "warmfront", warm, Candidate("b", waiting_tokens=900, speed=100)))
    assert (explanation.chosen, explanation.reason) == ("a", "warmest")
    first, second = explanation.replicas
    assert (first.device_blocks, first.host_blocks, first.pending_blocks, first.matched_tokens) == (2, 2, 1, 80)
    assert (first.wait_s, first.miss_s, first.cost_s, first.predicted_ttft_s) == (0.5, 0.23, 1.0175, 0.73)
    assert (second.replica, second.reason, second.wait_s) == ("b", "more_expensive", 9)


def test_a_predicted_first_token_takes_what_each_one_takes_for_itself_and_for_those_before_it() -> None:
    busy = Candidate("a", matched_tokens=96, waiting_tokens=200, waiting_requests=2, speed=1000)
    (told,) = explain(record(100, "warmfront", busy, overhead_s=0.01)).replicas
    assert (told.wait_s, told.miss_s, told.predicted_ttft_s) == (0.2, 0.004, 0.234)


@pytest.mark.parametrize(
    ("num_tokens", "matched", "waiting", "reason", "other"),
    [
        (16, 0, 0, "below_block", "below_block"),
        (100, 0, 0, "cold", "tied"),
        (100, 96, 0, "warmest", "more_expensive"),
        (100, 96, 10_000, "cheaper", "more_expensive"),
    ],
)
def test_the_reason_says_what_the_cache_had_to_do_with_it(
    num_tokens: int, matched: int, waiting: int, reason: str, other: str
) -> None:
    holder = Candidate("holder", matched_tokens=matched, waiting_tokens=waiting, waiting_requests=min(1, waiting))
    one = record(num_tokens, "warmfront", holder, Candidate("other"))
    assert explain(one).reason == reason
    assert sorted(reasons(one).values()) == sorted(["chosen", other])


def test_policies_without_costs_are_explained_too() -> None:
    one = record(100, "longest_prefix", Candidate("a", matched_tokens=32), Candidate("b"))
    assert reasons(one) == {"a": "chosen", "b": "not_preferred"}
    assert reasons(record(100, "round_robin", Candidate("a"), Candidate("b"))) == {"a": "chosen", "b": "not_preferred"}


def test_those_that_could_not_be_chosen_are_listed_with_the_reason() -> None:
    one = record(
        100,
        "warmfront",
        Candidate("a"),
        absent={"d": Absence("DRAINING", "draining"), "x": Absence("READY", "contract", "dtype is 'a'")},
        passed_over={"f": Absence("READY", "overloaded", "RESOURCE_EXHAUSTED: full")},
        eligible={"a": None, "far": None, "f": None},
    )
    assert reasons(one) == {
        "a": "chosen",
        "d": "draining",
        "f": "overloaded",
        "far": "not_sampled",
        "x": "contract",
    }
    nobody = record(100, "warmfront", absent={"d": Absence("DRAINING", "draining")})
    assert (explain(nobody).reason, explain(nobody).chosen, reasons(nobody)) == ("no_replica", "", {"d": "draining"})


def test_in_trailing_metadata_a_large_fleet_is_cut_to_the_cheapest() -> None:
    many = [Candidate(f"worker-{n}", waiting_tokens=float(n)) for n in range(64)]
    line = as_metadata(explain(record(100, "warmfront", *many)))
    assert len(line) <= 4096 and line.isascii()
    told = json.loads(line)
    assert told["replicas"][0]["replica"] == told["chosen"] == "worker-0"
    assert len(told["replicas"]) + told["left_out"] == 64
    assert len(told["replicas"]) >= 4


def test_the_oldest_decisions_are_forgotten() -> None:
    recent = RecentDecisions(max_records=2)
    for number in range(3):
        recent.add(record(request_id=f"r{number}"))
    assert [one.request_id for one in recent.last(9)] == ["r2", "r1"]
    assert recent.of("r1").request_id == "r1"
    with pytest.raises(NotFoundError, match="last 2 decisions"):
        recent.of("r0")


async def ask(cluster: Cluster, body: dict[str, Any]) -> dict[str, Any]:
    answer = await cluster.http.post("/v1/explain", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_asking_where_a_prompt_would_go_tells_the_truth_and_changes_nothing(two: Cluster) -> None:
    answer = await two.http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "first"})
    home = answer.headers["x-warmfront-replica"]
    await until(two.index_is_true)
    before = two.router.metrics.text().split(b"warmfront_router_decision_seconds_created")[0]
    told = await ask(two, PROMPT)
    assert await ask(two, PROMPT) == {**told, "decided_at_s": pytest.approx(told["decided_at_s"], abs=60)}
    assert (told["chosen"], told["reason"], told["request_id"]) == (home, "warmest", "")
    assert told["replicas"][0]["device_blocks"] == 6
    assert told["replicas"][0]["matched_tokens"] == 96
    assert two.load == 0
    assert len(two.workers["w0"].requests) + len(two.workers["w1"].requests) == 1
    assert two.router.metrics.text().split(b"warmfront_router_decision_seconds_created")[0] == before
    assert [one["request_id"] for one in (await ask(two, {"last": 20}))["explanations"]] == ["first"]
    again = await two.http.post("/v1/completions", json=PROMPT)
    assert again.headers["x-warmfront-replica"] == home


async def test_a_request_of_the_past_is_explained_by_its_id_with_what_came_of_it(two: Cluster) -> None:
    for name in ("first", "second"):
        await two.http.post("/v1/completions", json=PROMPT, headers={"x-request-id": name})
    told = await ask(two, {"request_id": "second"})
    assert (told["request_id"], told["prompt_tokens"], told["cached_tokens"]) == ("second", 100, 96)
    assert told["ttft_s"] > 0
    assert "pppp" not in json.dumps(told)
    missing = await two.http.post("/v1/explain", json={"request_id": "third"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "request_id")


async def test_the_header_makes_an_answer_explain_itself_whole_or_as_events(two: Cluster) -> None:
    headers = {"x-warmfront-explain": "1"}
    chat = {"messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 2}
    plain = await two.http.post("/v1/chat/completions", json=chat)
    assert "warmfront" not in plain.json()
    whole = await two.http.post("/v1/chat/completions", json=chat, headers=headers)
    assert whole.json()["warmfront"]["chosen"] == whole.headers["x-warmfront-replica"]
    assert whole.json()["warmfront"]["cached_tokens"] == whole.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    for more in ({}, {"stream_options": {"include_usage": True}}):
        streamed = await two.http.post("/v1/chat/completions", json={**chat, "stream": True, **more}, headers=headers)
        lines = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
        last = json.loads(lines[-2])
        assert (lines[-1], last["warmfront"]["chosen"]) == ("[DONE]", streamed.headers["x-warmfront-replica"])
        assert bool(last.get("usage")) == bool(more)


async def test_a_failed_a_full_and_a_draining_replica_are_named_as_such(cluster: Cluster) -> None:
    for name in ("w0", "w1", "w2"):
        await cluster.add_worker(name)
    await cluster.add_router()
    router = cluster.router
    cluster.workers["w2"].state = common_pb2.DRAINING
    await until(lambda: "w2" not in router.fleet.ready)
    for status, reason in (
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded"),
        (grpc.StatusCode.UNAVAILABLE, "excluded"),
    ):
        prompt = {**PROMPT, "prompt": f"{reason} " * 20}
        home = (await cluster.http.post("/v1/completions", json=prompt)).headers["x-warmfront-replica"]
        await until(cluster.index_is_true)
        cluster.workers[home].faults.statuses = [status]
        answer = await cluster.http.post("/v1/completions", json=prompt, headers={"x-warmfront-explain": "1"})
        told = answer.json()["warmfront"]
        found = {one["replica"]: one["reason"] for one in told["replicas"]}
        assert told["retries"] == 1
        assert found == {told["chosen"]: "chosen", home: reason, "w2": "draining"}
        passed_over = next(one for one in told["replicas"] if one["replica"] == home)
        assert passed_over["device_blocks"] == len(prompt["prompt"]) // 16 > 0, "it held them, and could not be asked"
    troubled = next(name for name, found_reason in found.items() if found_reason == "excluded")
    router.fleet.members[troubled].breaker._open_until_s += 60  # it would be half a second, however slow this is
    found = {one["replica"]: one["reason"] for one in (await ask(cluster, PROMPT))["replicas"]}
    assert found[troubled] == "failing"


async def test_whatever_keeps_a_replica_from_taking_requests_is_its_reason(cluster: Cluster) -> None:
    for name in ("ready", "starting", "warming", "draining"):
        worker = await cluster.add_worker(name)
        worker.state = common_pb2.ReplicaState.Value(name.upper())
    await cluster.add_worker("contract", own_contract=True, block_size=32)
    router = await cluster.add_router()
    await until(lambda: len(router.fleet.members) == 5 and set(router.fleet.ready) == {"ready"})
    told = {one["replica"]: (one["reason"], one["detail"]) for one in (await ask(cluster, PROMPT))["replicas"]}
    assert told.pop("ready") == ("chosen", "")
    assert "block_size is 32, the fleet has 16" in told["contract"][1]
    assert {name: reason for name, (reason, _) in told.items()} == {name: name for name in told}
    assert len(told) == 4


async def test_a_warm_replica_that_takes_nothing_is_told_with_what_it_holds_in_each_tier(cluster: Cluster) -> None:
    """20 usable blocks on the device: a prompt of 300 tokens sends most of one of 100 to host memory."""
    worker = await cluster.add_worker("w0", num_blocks=21, num_host_blocks=100)
    await cluster.add_router()
    for letter, length in (("p", 100), ("q", 300)):
        body = {"prompt": letter * length, "max_tokens": 2}
        assert (await cluster.http.post("/v1/completions", json=body)).status_code == 200
    await until(cluster.index_is_true)
    await cluster.add_worker("w1")
    await until(lambda: "w1" in cluster.router.fleet.ready)
    (ready,) = [one for one in (await ask(cluster, PROMPT))["replicas"] if one["replica"] == "w0"]
    assert ready["host_blocks"] > 0 and ready["device_blocks"] + ready["host_blocks"] == 6
    worker.state = common_pb2.DRAINING
    await until(lambda: "w0" not in cluster.router.fleet.ready)
    told = await ask(cluster, PROMPT)
    draining = next(one for one in told["replicas"] if one["replica"] == "w0")
    names = ("device_blocks", "host_blocks", "matched_tokens")
    assert [draining[name] for name in names] == [ready[name] for name in names]
    assert (told["chosen"], told["reason"], draining["reason"]) == ("w1", "cold", "draining")


async def test_a_large_fleet_is_explained_whole_when_asked_and_by_those_looked_at_on_an_answer(
    cluster: Cluster,
) -> None:
    names = {f"w{number:02}" for number in range(40)}
    for name in sorted(names):
        await cluster.add_worker(name, lease_s=20.0, heartbeat_s=1.0)
    await cluster.add_router()
    home = (await cluster.http.post("/v1/completions", json=PROMPT)).headers["x-warmfront-replica"]
    await until(cluster.index_is_true)
    preview = await ask(cluster, PROMPT)
    assert (preview["chosen"], {one["replica"] for one in preview["replicas"]}) == (home, names)
    assert {one["reason"] for one in preview["replicas"]} == {"chosen", "more_expensive"}
    answer = await cluster.http.post("/v1/completions", json=PROMPT, headers={"x-warmfront-explain": "1"})
    told = answer.json()["warmfront"]
    assert (told["chosen"], {one["replica"] for one in told["replicas"]}) == (home, names)
    reasons = Counter(one["reason"] for one in told["replicas"])
    assert reasons["chosen"] == 1 and 0 < reasons["more_expensive"] <= 20
    assert sum(reasons.values()) - reasons["not_sampled"] == 1 + reasons["more_expensive"]
    client = ReflectiveClient(cluster.endpoints[0].grpc)
    metadata = (("x-warmfront-explain", "1"),)
    request = {"text": PROMPT["prompt"], "sampling": {"maxTokens": 2}}
    _, trailing = await client.call("warmfront.v1.Inference/Generate", request, metadata=metadata)
    line = json.loads(trailing["x-warmfront-explain"])
    assert (line["chosen"], line["replicas"][0]["replica"]) == (home, home)
    assert len(line["replicas"]) + line["left_out"] == 40
    await client.channel.close()


async def test_a_fleet_that_takes_nothing_is_explained_too(two: Cluster) -> None:
    for worker in two.workers.values():
        worker.state = common_pb2.DRAINING
    await until(lambda: not two.router.fleet.ready)
    told = await ask(two, PROMPT)
    assert (told["chosen"], told["reason"]) == ("", "no_replica")
    assert {one["reason"] for one in told["replicas"]} == {"draining"}


async def test_what_cannot_be_explained_is_refused_by_name(two: Cluster) -> None:
    for body, words in (
        ({}, "give the body of a completion"),
        ({"prompt": ["a", "b"]}, "2 entries"),
        ({"prompts": "a"}, "prompts"),
        ({"last": -1}, "last"),
    ):
        answer = await two.http.post("/v1/explain", json=body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
    assert (await two.http.post("/v1/explain", content=b"[]")).status_code == 400


async def test_grpc_explains_the_same(two: Cluster) -> None:
    client = ReflectiveClient(two.endpoints[0].grpc)
    packed = base64.b64encode(pack_ids(list(range(1, 101)))).decode()
    request = {"tokenIds": packed, "sampling": {"maxTokens": 2}}
    metadata = (("x-warmfront-explain", "1"), ("x-request-id", "g1"))
    _, trailing = await client.call("warmfront.v1.Inference/Generate", request, metadata=metadata)
    told = json.loads(trailing["x-warmfront-explain"])
    assert (told["chosen"], told["request_id"]) == (trailing["x-warmfront-replica"], "g1")
    explain_call = "warmfront.v1.Admin/Explain"
    await until(two.index_is_true)
    for asked, reason in (({"request": request}, "warmest"), ({"requestId": "g1"}, "cold"), ({"last": 5}, "cold")):
        ((answer,), _) = await client.call(explain_call, asked)
        (explanation,) = answer["explanations"]
        assert (explanation["chosen"], explanation["reason"]) == (told["chosen"], reason)
    for asked, code in (({}, grpc.StatusCode.INVALID_ARGUMENT), ({"requestId": "no"}, grpc.StatusCode.NOT_FOUND)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.call(explain_call, asked)
        assert caught.value.code() is code
    await client.channel.close()


async def test_the_chosen_replica_says_what_its_cache_has_of_a_prompt_and_who_evicted_the_rest(
    cluster: Cluster,
) -> None:
    """20 usable blocks: a prompt of 300 tokens takes the place of one of 100."""
    await cluster.add_worker("w0", num_blocks=21)
    await cluster.add_router()

    async def cache_of(body: dict[str, Any]) -> dict[str, Any]:
        explained: dict[str, Any] = (await cluster.http.post("/v1/explain", json=body)).json()
        return explained["cache"]

    assert (await cache_of(PROMPT))["reason"] == "never_seen"
    first = await cluster.http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "first"})
    assert first.status_code == 200
    assert (await cache_of(PROMPT))["reason"] == "hit"
    past = await cache_of({"request_id": "first"})
    assert (past["reason"], past["cached_tokens"]) == ("never_seen", 0)
    large = {"prompt": "q" * 300, "max_tokens": 2}
    await cluster.http.post("/v1/completions", json=large, headers={"x-request-id": "large"})
    found = await cache_of(PROMPT)
    assert (found["reason"], found["removal_reason"], found["evicted_for"]) == ("evicted", "evicted", "large")
    await cluster.http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "second"})
    past = await cache_of({"request_id": "second"})
    assert (past["reason"], past["evicted_for"]) == ("evicted", "large")
    for body, name in ((large, "again"), (PROMPT, "third"), (large, "once more")):
        await cluster.http.post("/v1/completions", json=body, headers={"x-request-id": name})
    past = await cache_of({"request_id": "third"})
    assert past["reason"] == "unknown", "the block came, and went again, since it was missed"


async def test_a_replica_that_cannot_explain_its_cache_costs_the_explanation_that_part_alone(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router()
    worker.faults.statuses_of_explain.append(grpc.StatusCode.UNIMPLEMENTED)
    explained = (await cluster.http.post("/v1/explain", json=PROMPT)).json()
    assert explained["chosen"] == "w0" and "cache" not in explained
