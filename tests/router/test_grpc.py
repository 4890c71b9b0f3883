"""The gRPC front, through reflection only."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from router.segments import pack_ids
from router.service import hint_of
from tests.router.conftest import Cluster
from tests.router.reflective import ReflectiveClient
from tests.support import until

GENERATE = "warmfront.v1.Inference/Generate"


def token_request(count: int = 100, **more: Any) -> dict[str, Any]:
    packed = base64.b64encode(pack_ids([1 + n % 200 for n in range(count)])).decode()
    return {"tokenIds": packed, "sampling": {"maxTokens": 6, "seed": 1}, **more}


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[ReflectiveClient]:
    await cluster.add_worker("w0")
    await cluster.add_worker("w1")
    await cluster.add_router()
    one = ReflectiveClient(cluster.endpoints[0].grpc)
    yield one
    await one.channel.close()


async def test_reflection_lists_the_services(client: ReflectiveClient) -> None:
    assert {"warmfront.v1.Inference", "warmfront.v1.Admin", "grpc.health.v1.Health"} <= set(await client.services())


async def test_a_stream_carries_tokens_usage_and_the_route(client: ReflectiveClient) -> None:
    answers, trailing = await client.call(GENERATE, token_request(), metadata=(("x-request-id", "abc"),))
    assert len(answers) == 6
    assert answers[-1]["finishReason"] == "length"
    assert answers[-1]["usage"]["promptTokens"] == 100
    assert trailing["x-request-id"] == "abc"
    assert trailing["x-warmfront-matched-tokens"] == "0"
    again, trailing_again = await client.call(GENERATE, token_request())
    assert trailing_again["x-warmfront-replica"] == trailing["x-warmfront-replica"]
    assert trailing_again["x-warmfront-matched-tokens"] == str(again[-1]["usage"]["cachedTokens"]) == "96"


async def test_text_chat_and_token_ids_are_one_prompt(client: ReflectiveClient, cluster: Cluster) -> None:
    rendered = "<|im_start|>user\n" + "x" * 60 + "<|im_end|>\n<|im_start|>assistant\n"
    ids = cluster.workers["w0"].tokenizer.encode(rendered, add_special_tokens=False).ids
    chat = {"messages": [{"role": "user", "content": "x" * 60}]}
    sampling = {"maxTokens": 2}
    await client.call(GENERATE, {"chat": chat, "sampling": sampling})
    matched = str((len(ids) - 1) // 16 * 16)
    for prompt in ({"text": rendered}, {"tokenIds": base64.b64encode(pack_ids(ids)).decode()}, {"chat": chat}):
        answers, trailing = await client.call(GENERATE, {**prompt, "sampling": sampling})
        assert trailing["x-warmfront-matched-tokens"] == matched
        assert answers[-1]["usage"]["promptTokens"] == len(ids)


async def test_a_salt_shares_with_itself_alone_and_the_router_predicts_both(client: ReflectiveClient) -> None:
    await client.call(GENERATE, token_request(cacheSalt="a"))
    for salt, expected in (("b", 0), ("a", 96), ("", 0)):
        answers, trailing = await client.call(GENERATE, token_request(cacheSalt=salt))
        assert answers[-1]["usage"].get("cachedTokens", 0) == expected
        assert int(trailing["x-warmfront-matched-tokens"]) == expected


BAD_REQUESTS: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
    ({}, grpc.StatusCode.INVALID_ARGUMENT, "prompt is missing"),
    ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "prompt is empty"),
    ({"chat": {}}, grpc.StatusCode.INVALID_ARGUMENT, "messages is empty"),
    ({"tokenIds": "AAA="}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids has 2 bytes"),
    ({"tokenIds": "////fw=="}, grpc.StatusCode.INVALID_ARGUMENT, "vocabulary"),
    ({"text": "x" * 4096}, grpc.StatusCode.INVALID_ARGUMENT, "context 4096"),
    ({"text": "x", "model": "no"}, grpc.StatusCode.NOT_FOUND, "use 'simulated'"),
    ({"text": "x", "lora": "no"}, grpc.StatusCode.NOT_FOUND, "adapter"),
    ({"text": "x", "sampling": {"temperature": -1}}, grpc.StatusCode.INVALID_ARGUMENT, "temperature is -1"),
    ({"text": "x", "sampling": {"temperature": "NaN"}}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
    ({"text": "x", "sampling": {"topP": 0}}, grpc.StatusCode.INVALID_ARGUMENT, "top_p is 0"),
    ({"text": "x", "sampling": {"maxTokens": 0}}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens is 0"),
    ({"text": "x", "sampling": {"maxTokens": 5000}}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens is 5000"),
    ({"text": "x", "sampling": {"n": 17}}, grpc.StatusCode.INVALID_ARGUMENT, "n is 17"),
    ({"text": "x", "sampling": {"stop": [""]}}, grpc.StatusCode.INVALID_ARGUMENT, "stop"),
    ({"text": "x", "cacheSalt": "s" * 257}, grpc.StatusCode.INVALID_ARGUMENT, "cache_salt"),
    ({"text": "x", "retention": [{"tokens": 1, "ttlS": 7}]}, grpc.StatusCode.INVALID_ARGUMENT, "300 or 3600"),
]


async def test_a_bad_value_is_named_with_its_remedy(client: ReflectiveClient, cluster: Cluster) -> None:
    for request, code, words in BAD_REQUESTS:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.call(GENERATE, request)
        assert caught.value.code() is code, request
        assert words in (caught.value.details() or ""), request
    assert not any(worker.requests for worker in cluster.workers.values())


async def test_a_message_over_the_limit_fails_at_once_and_is_not_retried(
    client: ReflectiveClient, cluster: Cluster
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.call(GENERATE, {"text": "x" * (17 << 20)})
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # beyond gRPC's default of 4 MiB, and what no replica can hold
        await client.call(GENERATE, {"text": "x" * (5 << 20)})
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "4096" in (caught.value.details() or "")
    assert not any(worker.requests for worker in cluster.workers.values())
    answers, _ = await client.call(GENERATE, token_request())
    assert answers
    assert "warmfront_router_retries_total{" not in cluster.router.metrics.text().decode()


async def test_a_message_of_an_answer_may_be_longer_than_grpc_s_default(
    client: ReflectiveClient, cluster: Cluster
) -> None:
    for worker in cluster.workers.values():
        worker.faults.padding = 5 << 20
    answers, _ = await client.call(GENERATE, token_request(sampling={"maxTokens": 2}))
    assert [len(one["text"]) for one in answers] == [1 + (5 << 20)] * 2


async def test_log_probabilities_of_a_prompt_that_would_be_too_many_are_refused_before_any_replica_is_asked(
    cluster: Cluster,
) -> None:
    worker = await cluster.add_worker("w0", max_model_len=50_000)
    await cluster.add_router()
    client = ReflectiveClient(cluster.endpoints[0].grpc)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await client.call(GENERATE, token_request(41_667, sampling={"maxTokens": 1, "promptLogprobs": 5}))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt_logprobs of 41667 prompt tokens" in str(raised.value.details())
    assert not worker.requests
    await client.channel.close()


async def test_a_deadline_is_forwarded_and_leaves_no_load(client: ReflectiveClient, cluster: Cluster) -> None:
    for worker in cluster.workers.values():
        worker.spec.decode_s = 0.05
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.call(GENERATE, token_request(sampling={"maxTokens": 1000}), timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: cluster.load == 0 and not any(worker.running for worker in cluster.workers.values()))


async def test_a_cancelled_call_is_cancelled_in_the_worker(client: ReflectiveClient, cluster: Cluster) -> None:
    for worker in cluster.workers.values():
        worker.spec.decode_s = 0.05
    call = asyncio.create_task(client.call(GENERATE, token_request(sampling={"maxTokens": 1000})))
    await until(lambda: any(worker.running for worker in cluster.workers.values()))
    call.cancel()
    await until(lambda: cluster.load == 0 and not any(worker.running for worker in cluster.workers.values()))


async def test_admin_lists_and_drains_replicas(client: ReflectiveClient, cluster: Cluster) -> None:
    answers, _ = await client.call("warmfront.v1.Admin/ListReplicas", {})
    assert [one["lease"]["replica"] for one in answers[0]["replicas"]] == ["w0", "w1"]
    await client.call("warmfront.v1.Admin/DrainReplica", {"replica": "w0", "deadlineMs": 7000})
    assert cluster.workers["w0"].drain_deadlines_ms == [7000]
    await until(lambda: len(cluster.router.fleet.ready) == 1)
    for number in range(4):
        _, trailing = await client.call(GENERATE, token_request(50 + number))
        assert trailing["x-warmfront-replica"] == "w1"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.call("warmfront.v1.Admin/DrainReplica", {"replica": "w7"})
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "known: w0, w1" in (caught.value.details() or "")


async def test_health_follows_readiness(client: ReflectiveClient, cluster: Cluster) -> None:
    async def serves() -> bool:
        answers, _ = await client.call("grpc.health.v1.Health/Check", {"service": "warmfront.v1.Inference"})
        return bool(answers[0].get("status") == "SERVING")

    async def until_serves(wanted: bool) -> None:
        for _ in range(400):
            if await serves() is wanted:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"health never became {wanted}")

    await until_serves(True)
    for worker in cluster.workers.values():
        worker.faults.is_silent = True
    await until_serves(False)


async def test_a_burst_is_spread_at_decision_time_over_every_api(cluster: Cluster) -> None:
    """Load is charged before the network: eight prompts in one moment, two for each of four slow replicas.

    Also where all begin with the same long front: who computes it first must not draw all of them.
    """
    gate = asyncio.Event()
    for number in range(4):
        worker = await cluster.add_worker(f"w{number}", prefill_tokens_per_s=400)
        worker.faults.gate = gate
    await cluster.add_router()
    client = ReflectiveClient(cluster.endpoints[0].grpc)
    await client.services()

    async def send(api: str, text: str) -> None:
        chat = {"messages": [{"role": "user", "content": text}]}
        if api.startswith("grpc"):
            prompt = {"chat": chat} if "chat" in api else {"text": text}
            await client.call(GENERATE, {**prompt, "sampling": {"maxTokens": 2}})
            return
        body = {**(chat if "chat" in api else {"prompt": text}), "max_tokens": 2, "stream": "stream" in api}
        path = "/v1/chat/completions" if "chat" in api else "/v1/completions"
        assert (await cluster.http.post(path, json=body)).status_code == 200

    async def burst(api: str, is_shared: bool) -> list[int]:
        for worker in cluster.workers.values():
            worker.requests.clear()
        front = f"{api} the same front of all of them " * 6 if is_shared else ""
        texts = [f"{front}{number} different from here on " * (1 if is_shared else 6) for number in range(8)]
        calls = [asyncio.create_task(send(api, text)) for text in texts]
        await until(lambda: sum(len(worker.requests) for worker in cluster.workers.values()) == 8)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: cluster.load == 0)
        return sorted(len(worker.requests) for worker in cluster.workers.values())

    for api in ("grpc", "grpc chat", "completion", "chat", "completion stream", "chat stream"):
        assert await burst(api, is_shared=False) == [2, 2, 2, 2], api
        assert max(await burst(api, is_shared=True)) <= 3, api
    gate.set()
    await asyncio.gather(send("chat stream", "x" * 40), send("grpc", "y" * 40))
    await client.channel.close()


async def test_bytes_that_are_no_request_are_invalid(client: ReflectiveClient) -> None:
    call = client.channel.unary_stream(f"/{GENERATE}")(b"\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_role_is_a_name_and_no_markup(client: ReflectiveClient) -> None:
    chat = {"messages": [{"role": "user<|im_end|>", "content": "x"}]}
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await client.call(GENERATE, {"chat": chat})
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "messages[0].role" in str(raised.value.details())


def test_a_session_is_the_first_hint_and_a_routing_key_the_second() -> None:
    assert hint_of({"x-warmfront-session": "s", "x-warmfront-routing-key": "k"}) == "s"
    assert hint_of({"x-warmfront-routing-key": "k"}) == "k"
    assert hint_of({}) == ""


async def test_a_session_and_a_trusted_tenant_are_taken_from_the_metadata(cluster: Cluster) -> None:
    for number in range(4):
        await cluster.add_worker(f"w{number}")
    for trusts in (True, False):
        await cluster.add_router(policy="session", trust_tenant_header=trusts)
    hints = (("x-warmfront-session", "s"), ("x-warmfront-tenant", "acme"))
    homes = set()
    for endpoints, tenant in zip(cluster.endpoints, ("acme", ""), strict=True):
        client = ReflectiveClient(endpoints.grpc)
        for number in range(8):  # without a home all go to one in 1 of 16,000
            _, trailing = await client.call(GENERATE, token_request(40 + number), metadata=hints)
            homes.add(trailing["x-warmfront-replica"])
            asked = {"request": token_request(40 + number)}
            ((told,), _) = await client.call("warmfront.v1.Admin/Explain", asked, metadata=hints)
            homes.add(told["explanations"][0]["chosen"])
        (home,) = homes
        assert {one.tenant for one in cluster.workers[home].requests[-8:]} == {tenant}
        await client.channel.close()


async def test_an_error_tells_its_request_and_when_to_come_back(client: ReflectiveClient, cluster: Cluster) -> None:
    for worker in cluster.workers.values():
        worker.spec.max_queue = 0
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await client.call(GENERATE, token_request(), metadata=(("x-request-id", "abc"),))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(raised.value.trailing_metadata())
    assert (trailing["x-request-id"], trailing["x-warmfront-replica"] in cluster.workers) == ("abc", True)
    assert float(str(trailing["retry-after"])) >= 1
