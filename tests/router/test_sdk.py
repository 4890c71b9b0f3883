"""What an application developer does with OpenAI's own client, against simulated replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.router.conftest import Cluster

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello " * 20}]
ASK: dict[str, Any] = {"model": "simulated", "messages": MESSAGES, "max_completion_tokens": 8, "seed": 1}


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    await cluster.add_worker("w0")
    await cluster.add_router()
    async with openai.AsyncOpenAI(base_url=f"{cluster.endpoints[0].http}/v1", api_key="none", max_retries=0) as one:
        yield one


async def test_a_stream_of_several_choices_adds_up_to_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**ASK, n=2, logprobs=True, top_logprobs=2)
    texts, reasons, tokens, usages = ["", ""], ["", ""], [[], []], []  # type: ignore[var-annotated]
    stream = await client.chat.completions.create(
        **ASK, n=2, logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        if chunk.usage is not None:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.content or []
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert tokens == [choice.logprobs.content for choice in whole.choices if choice.logprobs is not None]
    assert whole.usage is not None
    assert [usage.completion_tokens for usage in usages] == [16] == [whole.usage.completion_tokens]


async def test_a_seed_repeats_an_answer_and_a_stop_string_ends_it(client: openai.AsyncOpenAI) -> None:
    first = (await client.chat.completions.create(**ASK)).choices[0].message.content
    assert first is not None
    assert (await client.chat.completions.create(**ASK)).choices[0].message.content == first
    stopped = (await client.chat.completions.create(**ASK, stop=[first[3]])).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (first[: first.index(first[3])], "stop")


async def test_the_helper_that_assembles_a_stream_understands_ours(client: openai.AsyncOpenAI) -> None:
    whole = (await client.chat.completions.create(**ASK)).choices[0].message.content
    assert whole is not None
    ask = {**ASK, "stop": [whole[5]]}  # the helper takes an answer that the length ends for a failed one
    async with client.chat.completions.stream(**ask) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == whole[: whole.index(whole[5])]


async def test_what_changes_nothing_here_is_let_through(client: openai.AsyncOpenAI) -> None:
    plain = await client.chat.completions.create(**ASK)
    for more in (
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s"},
        {"parallel_tool_calls": True, "tools": [], "tool_choice": "none", "modalities": ["text"], "stop": None},
        {"response_format": {"type": "text"}, "logprobs": False, "extra_body": {"top_k": -1}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello "}] * 20}]},
    ):
        assert (await client.chat.completions.create(**{**ASK, **more})).choices == plain.choices, more


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    ({"extra_body": {"colour": "red"}}, "colour"),
    ({"logit_bias": {"hello": 1}}, "logit_bias"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
]


async def test_what_is_not_offered_is_refused_by_name(client: openai.AsyncOpenAI) -> None:
    for more, param in REFUSED:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{**ASK, **more})
        assert caught.value.param == param
        assert param in caught.value.message
        assert caught.value.type == "invalid_request_error"


async def test_models_are_listed_and_found_by_name(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["simulated"]
    assert (await client.models.retrieve("simulated")).owned_by == "warmfront"
    with pytest.raises(openai.NotFoundError, match="use 'simulated'") as caught:
        await client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


async def test_an_error_and_an_answer_carry_the_id_by_which_the_log_knows_them(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ASK, extra_headers={"x-request-id": "mine"})
    assert answer._request_id == "mine"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.embeddings.create(model="simulated", input="x", extra_headers={"x-request-id": "mine too"})
    assert caught.value.request_id is not None
    assert "POST /v1/embeddings" in caught.value.message


async def test_a_base_url_without_v1_is_told_what_it_lacks(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    wrong = client.with_options(base_url=cluster.endpoints[0].http)
    with pytest.raises(openai.NotFoundError, match="under /v1"):
        await wrong.chat.completions.create(**ASK)
    with pytest.raises(openai.NotFoundError, match="leave the slash at the end out"):
        await client.post("/chat/completions/", cast_to=object, body=ASK)


async def test_a_client_of_another_api_is_told_what_is_offered(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    for path in ("/messages", "/responses", "/v1/messages"):  # the last by a client that adds a /v1 of its own
        with pytest.raises(openai.NotFoundError, match="answers come by OpenAI's /v1/chat/completions"):
            await client.post(path, cast_to=object, body=ASK)
    with pytest.raises(openai.NotFoundError, match="is /v1/chat/completions meant"):
        await client.post("/chat/completion", cast_to=object, body=ASK)
    with pytest.raises(openai.NotFoundError, match="one /v1 is enough, as in /v1/chat/completions"):
        await client.post("/v1/chat/completions", cast_to=object, body=ASK)
