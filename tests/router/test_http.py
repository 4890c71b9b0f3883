"""The HTTP front against simulated replicas: what the official SDK and plain clients see."""

from __future__ import annotations

import json

import openai
import pytest

from tests.router.conftest import Cluster, until

CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 8, "seed": 1}


@pytest.fixture
async def two(cluster: Cluster) -> Cluster:
    await cluster.add_worker("w0")
    await cluster.add_worker("w1")
    await cluster.add_router()
    return cluster


async def test_the_second_equal_prompt_goes_to_the_warm_replica_and_the_prediction_is_exact(two: Cluster) -> None:
    first = await two.http.post("/v1/chat/completions", json=CHAT)
    assert first.status_code == 200, first.text
    assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    second = await two.http.post("/v1/chat/completions", json=CHAT)
    assert second.headers["x-warmfront-replica"] == first.headers["x-warmfront-replica"]
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert int(second.headers["x-warmfront-matched-tokens"]) == cached
    assert second.json()["choices"][0]["message"]["content"] == first.json()["choices"][0]["message"]["content"]
    assert two.load == 0


async def test_a_stream_ends_with_done_and_tells_usage_when_asked(two: Cluster) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with two.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


async def test_the_official_sdk_works_unchanged(two: Cluster) -> None:
    client = openai.AsyncOpenAI(base_url=two.endpoints[0].http + "/v1", api_key="none")
    try:
        models = await client.models.list()
        assert [model.id for model in models.data] == ["simulated"]
        whole = await client.chat.completions.create(
            model="simulated", messages=[{"role": "user", "content": "hi"}], max_tokens=5, seed=1
        )
        text = ""
        async for chunk in await client.chat.completions.create(
            model="simulated", messages=[{"role": "user", "content": "hi"}], max_tokens=5, seed=1, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        assert text == whole.choices[0].message.content
        assert whole.usage is not None and whole.usage.completion_tokens == 5
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(
                model="simulated", messages=[{"role": "user", "content": "hi"}], temperature=-1
            )
        with pytest.raises(openai.NotFoundError, match="simulated"):
            await client.completions.create(model="other", prompt="hi")
    finally:
        await client.close()


async def test_a_client_that_leaves_is_cancelled_in_the_worker_and_leaves_no_load(two: Cluster) -> None:
    for worker in two.workers.values():
        worker.spec.decode_s = 0.02
    body = {**CHAT, "max_tokens": 2000, "stream": True}
    async with two.http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for _ in response.aiter_lines():
            break
    await until(lambda: sum(worker.num_cancelled for worker in two.workers.values()) == 1)
    await until(lambda: two.load == 0)
    await until(lambda: sum(worker.running for worker in two.workers.values()) == 0)
