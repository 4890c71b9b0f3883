"""The HTTP front against simulated replicas: what the official SDK and plain clients see."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import itertools
import json
import socket
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from warmfront_pb.v1 import inference_pb2

from router.http import bind
from tests.router.conftest import Cluster
from tests.support import until

CHAT: dict[str, Any] = {
    "model": "simulated",
    "messages": [{"role": "user", "content": "hello " * 20}],
    "max_tokens": 8,
    "seed": 1,
}


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
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-accel-buffering"] == "no"
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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_ends_all_prompts_and_is_counted_once(
    two: Cluster, stream: bool
) -> None:
    gate = asyncio.Event()
    for worker in two.workers.values():
        worker.faults.gate = gate
    body = {**COMPLETION, "prompt": ["one", "two", "three"], "stream": stream}
    call = asyncio.create_task(two.http.post("/v1/completions", json=body))
    await until(lambda: sum(len(worker.requests) for worker in two.workers.values()) == 3)
    call.cancel()
    await until(lambda: 'requests_total{code="CANCELLED"} 1.0' in two.router.metrics.text().decode())
    assert two.load == 0
    gate.set()
    assert (await two.http.post("/v1/completions", json=COMPLETION)).status_code == 200


def without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


COMPLETION: dict[str, Any] = {"model": "simulated", "prompt": "once upon a time", "max_tokens": 4, "seed": 1}


BAD_BODIES: list[tuple[str, Any, int, str]] = [
    ("chat/completions", b"", 400, "the body is empty"),
    ("chat/completions", b"{", 400, "not valid JSON"),
    ("chat/completions", b'{"model": "\xff"}', 400, "UTF-8"),
    ("chat/completions", b"[]", 400, "object"),
    ("chat/completions", without(CHAT, "messages"), 400, "messages is missing"),
    ("chat/completions", {**CHAT, "messages": []}, 400, "messages is empty"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user"}]}, 400, "messages[0].content is missing"),
    ("chat/completions", {**CHAT, "messages": [{"content": "x"}]}, 400, "messages[0].role is missing"),
    (
        "chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "type 'image_url' is not supported",
    ),
    (
        "chat/completions",
        {**CHAT, "messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
        400,
        "tool calls are not supported",
    ),
    ("chat/completions", {**CHAT, "temperature": -1}, 400, "temperature is -1: use 0 to 2"),
    ("chat/completions", {**CHAT, "temperature": "hot"}, 400, "temperature: expected `float | null`"),
    ("chat/completions", {**CHAT, "max_tokens": 0}, 400, "max_tokens: expected `int` >= 1"),
    ("chat/completions", {**CHAT, "max_tokens": 10**12}, 400, "max_tokens"),
    ("chat/completions", {**CHAT, "max_tokens": 5000}, 400, "leave"),
    ("chat/completions", {**CHAT, "max_completion_tokens": 3}, 400, "max_completion_tokens differ"),
    ("chat/completions", {**CHAT, "top_p": 0}, 400, "top_p is 0: use over 0 to 1"),
    ("chat/completions", {**CHAT, "n": 0}, 400, "n: expected"),
    ("chat/completions", {**CHAT, "n": 17}, 400, "n is 17: use 1 to 16"),
    ("chat/completions", {**CHAT, "stop": ["a"] * 17}, 400, "stop has 17 strings"),
    ("chat/completions", {**CHAT, "stop": [""]}, 400, "stop has a string of 0"),
    ("chat/completions", {**CHAT, "seed": 2**70}, 400, "seed"),
    ("chat/completions", {**CHAT, "logit_bias": {"x": 1}}, 400, "logit_bias, a key: expected `int`"),
    ("chat/completions", {**CHAT, "logit_bias": {"5": 101}}, 400, "logit_bias has 101 for token 5"),
    ("chat/completions", {**CHAT, "logit_bias": {"999999": 1}}, 400, "vocabulary"),
    ("chat/completions", {**CHAT, "top_logprobs": 3}, 400, "top_logprobs needs logprobs"),
    ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ("chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, 400, "stream_options needs stream"),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools is not supported"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format"),
    ("chat/completions", {**CHAT, "guided_json": {"type": "object"}}, 400, "guided_json is not supported"),
    ("chat/completions", {**CHAT, "guided_json": {}}, 400, "guided_json is not supported"),
    ("chat/completions", {**CHAT, "colour": "red"}, 400, "colour is not a field"),
    ("chat/completions", {**CHAT, "model": "gpt-9"}, 404, "model 'gpt-9' is not served here: use 'simulated'"),
    ("chat/completions", {**CHAT, "cache_salt": ""}, 400, "cache_salt"),
    ("chat/completions", {**CHAT, "cache_salt": "s" * 257}, 400, "cache_salt"),
    ("chat/completions", {**CHAT, "retention": [{"tokens": 5, "ttl": 7}]}, 400, "300 or 3600"),
    ("chat/completions", {**CHAT, "lora": "french"}, 404, "no adapter 'french'"),
    ("chat/completions", {**CHAT, "messages": [{"role": "boss", "content": "hi"}]}, 400, "messages[0].role is 'boss'"),
    ("chat/completions", {**CHAT, "messages": [{"role": "tool", "content": "4"}]}, 400, "tool calls are not supported"),
    ("completions", {**COMPLETION, "n": 10**9}, 400, "n is 1000000000: use 1 to 16"),
    ("completions", {**COMPLETION, "prompt": "x" * (1 << 20)}, 400, "tokens can hold: shorten it"),
    ("completions", b'{"prompt": "\xff"}', 400, "UTF-8"),
    ("completions", b'{"prompt": "\\ud800"}', 400, "JSON"),
    ("explain", b'{"prompt": "\xff"}', 400, "UTF-8"),
    ("drain", {"replica": "w0", "deadline_ms": -1}, 400, "deadline_ms"),
    ("drain", {"replica": "w0", "deadline_ms": 2**32}, 400, "deadline_ms"),
    ("completions", without(COMPLETION, "prompt"), 400, "prompt is missing"),
    ("completions", {**COMPLETION, "prompt": ""}, 400, "prompt is empty"),
    ("completions", {**COMPLETION, "prompt": []}, 400, "prompt is empty"),
    ("completions", {**COMPLETION, "prompt": ["a", ""]}, 400, "prompt is empty"),
    ("completions", {**COMPLETION, "prompt": 7}, 400, "prompt: give a string"),
    ("completions", {**COMPLETION, "prompt": [1, "a"]}, 400, "prompt: give a string"),
    ("completions", {**COMPLETION, "prompt": [-1]}, 400, "prompt: give a string"),
    ("completions", {**COMPLETION, "prompt": [999_999]}, 400, "vocabulary"),
    ("completions", {**COMPLETION, "prompt": "x" * 5000}, 400, "shorten it"),
    ("completions", {**COMPLETION, "prompt": ["x"] * 65}, 400, "at most 64"),
    ("completions", {**COMPLETION, "echo": True}, 400, "echo is not supported"),
    ("completions", {**COMPLETION, "best_of": 4}, 400, "best_of is not supported"),
    ("completions", {**COMPLETION, "suffix": "end"}, 400, "suffix is not supported"),
    ("completions", {**COMPLETION, "min_tokens": 9}, 400, "min_tokens is 9, over max_tokens 4"),
    ("nothing", {}, 404, "POST /v1/nothing"),
]


async def test_a_bad_body_is_refused_with_the_field_and_the_remedy(two: Cluster) -> None:
    for path, body, status, words in BAD_BODIES:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await two.http.post(f"/v1/{path}", content=content)
        assert response.status_code == status, (path, body, response.text)
        error = response.json()["error"]
        assert words in error["message"], (path, body)
        assert set(error) == {"message", "type", "param", "code"}
    assert not any(worker.requests for worker in two.workers.values())


async def test_a_body_nested_too_deeply_is_400_and_the_connection_lives(two: Cluster) -> None:
    lists, objects = b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    bodies = [
        b'{"a":' * 50_000,
        b"[" * 100_000,
        b'{"prompt": ' + lists + b"}",
        b'{"prompt": "x", "messages": [], "metadata": ' + lists + b"}",
        b'{"messages": [{"role": "user", "content": "x", "audio": ' + objects + b"}]}",
    ]
    parts = urlsplit(two.endpoints[0].http)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port)

    def ask(path: str, body: bytes) -> tuple[int, str]:
        connection.request("POST", f"/v1/{path}", body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())["error"]["message"]

    try:
        connection.connect()
        used = connection.sock
        for path in ("chat/completions", "completions", "explain", "drain", "lora"):
            for body in bodies:
                status, message = await asyncio.to_thread(ask, path, body)
                assert (status, bool(message)) == (400, True), (path, body[:60])
        assert message.startswith("the body is ")
        assert connection.sock is used
    finally:
        connection.close()


async def test_a_body_of_20_mb_is_answered_with_413(two: Cluster) -> None:
    response = await two.http.post("/v1/completions", json={**COMPLETION, "prompt": "x" * (20 << 20)})
    assert response.status_code == 413
    assert "shorten" in response.json()["error"]["message"]
    assert (await two.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_the_wrong_method_is_405_in_openai_s_form(two: Cluster) -> None:
    response = await two.http.get("/v1/completions")
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_every_field_that_a_body_may_have_reaches_the_replica(two: Cluster) -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "n": 2,
        "max_tokens": 5,
        "min_tokens": 2,
        "seed": 9,
        "stop": ["never said"],
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "logprobs": 1,
    }
    body = {
        **sampling,
        "logit_bias": {"5": -1.0},
        "prompt": "p" * 40,
        "cache_salt": "s",
        "priority": 3,
        "retention": [{"tokens": 16, "ttl": "1h", "priority": 1}],
    }
    assert (await two.http.post("/v1/completions", json=body)).status_code == 200
    (request,) = [one for worker in two.workers.values() for one in worker.requests]
    wanted = inference_pb2.SamplingParams(**sampling, logit_bias={5: -1.0})
    assert request.sampling == wanted
    assert (request.cache_salt, request.priority) == ("s", 3)
    assert list(request.retention) == [inference_pb2.Retention(tokens=16, ttl_s=3600, priority=1)]
    chat = {"messages": CHAT["messages"], "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2}
    chat |= {"stop": "never said", "top_k": -1}
    assert (await two.http.post("/v1/chat/completions", json=chat)).status_code == 200
    (told,) = [one.sampling for worker in two.workers.values() for one in worker.requests if one != request]
    assert (told.max_tokens, told.logprobs, list(told.stop), told.top_k) == (3, 2, ["never said"], 0)


async def test_internal_fields_of_a_client_never_reach_a_worker(two: Cluster) -> None:
    internal = {"request_id": "x", "generation": "g", "synthetic": True, "tenant": "t", "num_prior_output_tokens": 5}
    response = await two.http.post(
        "/v1/completions", json={**COMPLETION, **internal}, headers={"x-warmfront-tenant": "evil"}
    )
    assert response.status_code == 200
    (request,) = [one for worker in two.workers.values() for one in worker.requests]
    assert (request.synthetic, request.tenant, request.num_prior_output_tokens) == (False, "", 0)
    assert request.request_id == response.headers["x-request-id"] != "x"


async def test_harmless_fields_of_openai_s_are_let_through(two: Cluster) -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "tools": []}
    harmless |= {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    assert (await two.http.post("/v1/chat/completions", json={**CHAT, **harmless})).status_code == 200


async def test_choices_stop_strings_and_several_prompts(two: Cluster) -> None:
    body = {**COMPLETION, "prompt": ["first prompt", "second prompt"], "n": 2, "return_token_ids": True}
    answer = (await two.http.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(len(choice["token_ids"]) == 4 for choice in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == len("first prompt") + len("second prompt")
    assert answer["usage"]["completion_tokens"] == 16
    text = answer["choices"][0]["text"]
    cut = (
        await two.http.post("/v1/completions", json={**COMPLETION, "prompt": "first prompt", "stop": text[2]})
    ).json()
    assert cut["choices"][0]["text"] == text[:2]
    assert cut["choices"][0]["finish_reason"] == "stop"
    async with two.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = [json.loads(line[6:]) async for line in response.aiter_lines() if line and "[DONE]" not in line]
    texts = dict.fromkeys(range(4), "")
    for line in lines:
        texts[line["choices"][0]["index"]] += line["choices"][0]["text"]
    assert texts == {choice["index"]: choice["text"] for choice in answer["choices"]}


async def test_one_bad_prompt_of_several_fails_them_all_and_leaves_no_load(two: Cluster) -> None:
    body = {**COMPLETION, "prompt": [[1, 2, 3], [999_999]]}
    assert (await two.http.post("/v1/completions", json=body)).status_code == 400
    await until(lambda: two.load == 0)


async def test_token_ids_text_and_chat_share_one_cache(two: Cluster) -> None:
    text = "a prompt that is long enough for some blocks of sixteen tokens each"
    await two.http.post("/v1/completions", json={**COMPLETION, "prompt": text})
    ids = two.workers["w0"].tokenizer.encode(text, add_special_tokens=False).ids
    response = await two.http.post("/v1/completions", json={**COMPLETION, "prompt": ids})
    matched = int(response.headers["x-warmfront-matched-tokens"])
    assert matched == (len(ids) - 1) // 16 * 16
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == matched


async def test_logprobs_have_openai_s_form(two: Cluster) -> None:
    chat = (await two.http.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 0})).json()
    assert set(chat["choices"][0]["logprobs"]["content"][0]) == {"token", "logprob", "bytes", "top_logprobs"}
    plain = (await two.http.post("/v1/completions", json={**COMPLETION, "logprobs": 0})).json()
    logprobs = plain["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == plain["choices"][0]["text"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    sampled = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert logprobs["top_logprobs"] == [{token: logprob} for token, logprob in sampled]


async def test_the_next_turn_is_predicted_exactly_at_once(two: Cluster) -> None:
    """Prompt and answer of one turn are the front of the next; the router knows before any event has come."""
    for worker in two.workers.values():
        worker.faults.is_reporting_paused = True  # leases stop as well, but not for as long as one lasts
    messages = [{"role": "user", "content": "tell me a story " * 3}]
    for turn in range(4):
        body = {**CHAT, "messages": messages, "max_tokens": 40}
        response = await two.http.post("/v1/chat/completions", json=body)
        usage = response.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert int(response.headers["x-warmfront-matched-tokens"]) == cached
        assert (cached > 0) is (turn > 0)
        messages.append({"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": f"and then? {turn}"})


async def test_without_prefix_caching_nothing_is_predicted_and_load_is_balanced(cluster: Cluster) -> None:
    for name in ("w0", "w1"):
        await cluster.add_worker(name, prefix_caching=False)
    await cluster.add_router()
    for _ in range(20):
        response = await cluster.http.post("/v1/completions", json=COMPLETION)
        assert response.headers["x-warmfront-matched-tokens"] == "0"
    assert all(2 <= len(worker.requests) <= 18 for worker in cluster.workers.values())  # by lot: 1 in 20,000 fails


async def test_hints_of_the_body_give_sessions_a_home_where_no_header_does(cluster: Cluster) -> None:
    for number in range(4):
        await cluster.add_worker(f"w{number}")
    await cluster.add_router(policy="session")

    async def homes(headers: dict[str, str] | None = None, **hints: str) -> set[str]:
        body = {**COMPLETION, **hints}
        answers = [
            await cluster.http.post("/v1/completions", json={**body, "prompt": f"{n} " * 40}, headers=headers)
            for n in range(8)  # without a home all go to one in 1 of 16,000
        ]
        return {answer.headers["x-warmfront-replica"] for answer in answers}

    (home,) = await homes({"x-warmfront-session": "a"})
    assert await homes(prompt_cache_key="a") == await homes(session_id="a") == {home}
    for other in "bcdefghijklmnop":
        if await homes(session_id=other) != {home}:
            break
    assert await homes(session_id="a", prompt_cache_key=other) == {home}
    assert await homes({"x-warmfront-session": "a"}, session_id=other) == {home}


async def test_a_tenant_header_counts_only_where_it_is_trusted(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router(trust_tenant_header=True)
    await cluster.http.post("/v1/completions", json=COMPLETION, headers={"x-warmfront-tenant": "acme"})
    assert worker.requests[0].tenant == "acme"


async def test_two_small_writes_reach_the_client_one_by_one(two: Cluster) -> None:
    for worker in two.workers.values():
        worker.spec.decode_s = 0.05
    body = {**COMPLETION, "stream": True}
    clock = asyncio.get_running_loop().time
    async with two.http.stream("POST", "/v1/completions", json=body) as response:
        times = [clock() async for line in response.aiter_lines() if line]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times[:4])]
    assert all(gap > 0.02 for gap in gaps), "events were held back and came together"


async def test_an_accepted_connection_sends_small_writes_at_once() -> None:
    options: list[int] = []

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        options.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind("127.0.0.1", 0, reuse_port=False)
    async with await asyncio.start_server(accepted, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        await until(lambda: bool(options))
        writer.close()
    assert options[0], "Nagle's algorithm holds the second of two small writes for 40 ms"


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"


def raw_request(body: dict[str, Any], more: bytes = b"") -> tuple[bytes, bytes]:
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%s\r\n" % (len(data), more)
    return head, data


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return head, await reader.readexactly(length)


@pytest.mark.parametrize("apart", [False, True])
async def test_a_request_that_offers_an_upgrade_is_answered_in_http_1(two: Cluster, apart: bool) -> None:
    """Java's HTTP client offers HTTP/2 with every request that it sends unencrypted."""
    address = urlsplit(two.endpoints[0].http)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    for more in (UPGRADE, b"", UPGRADE.replace(b"h2c", b"websocket")):
        for part in raw_request(COMPLETION, more) if apart else [b"".join(raw_request(COMPLETION, more))]:
            writer.write(part)
            await asyncio.sleep(0.05)
        head, body = await read_answer(reader)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert json.loads(body)["usage"]["completion_tokens"] == 4
    writer.write(
        raw_request(COMPLETION, UPGRADE.replace(b"Upgrade,", b"close, Upgrade,"))[0] + raw_request(COMPLETION)[1]
    )
    assert b"connection: close" in (await read_answer(reader))[0]
    assert await reader.read() == b""
    writer.close()


async def test_requests_of_one_connection_are_answered_in_their_order(two: Cluster) -> None:
    address = urlsplit(two.endpoints[0].http)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    counts = [3, 1, 2]
    for count in counts:
        writer.write(b"".join(raw_request({**COMPLETION, "max_tokens": count})))
    found = [json.loads((await read_answer(reader))[1])["usage"]["completion_tokens"] for _ in counts]
    assert found == counts
    writer.close()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"GET /v1/models HTTP/1.1\r\nx: " + b"a" * 70_000, b"HTTP/1.1 431 "),
        (b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET / HTTP/1.1\r\n" + UPGRADE + b"\r\n" + b"GET / HTTP/1.1\r\n" + UPGRADE + b"\r\n", b"HTTP/1.1 400 "),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"HTTP/1.1 400 "),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"HTTP/1.1 400 "),
    ],
    ids=["endless", "connect", "upgrades", "http2", "tls"],
)
async def test_what_is_no_request_is_answered_and_ends_its_connection(two: Cluster, sent: bytes, answer: bytes) -> None:
    address = urlsplit(two.endpoints[0].http)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(sent)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).startswith(answer)
    writer.close()
    assert (await two.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_a_packed_body_is_refused_by_that_name(two: Cluster) -> None:
    packed = gzip.compress(json.dumps(COMPLETION).encode())
    response = await two.http.post("/v1/completions", content=packed, headers={"content-encoding": "gzip"})
    assert response.status_code == 400
    assert "content-encoding 'gzip' is not supported" in response.json()["error"]["message"]


async def test_no_page_of_another_origin_may_call(two: Cluster) -> None:
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    preflight = await two.http.options("/v1/completions", headers=asked)
    answer = await two.http.post("/v1/completions", json=COMPLETION, headers=asked)
    assert preflight.status_code == 405
    for response in (preflight, answer):
        assert not [name for name in response.headers if name.startswith("access-control")]


async def test_the_operator_s_paths(two: Cluster) -> None:
    listed = (await two.http.get("/v1/replicas")).json()
    assert [one["id"] for one in listed["replicas"]] == ["w0", "w1"]
    assert listed["replicas"][0]["state"] == "READY"
    assert (await two.http.get("/healthz")).status_code == 200
    assert (await two.http.get("/readyz")).status_code == 200
    assert (await two.http.get("/health")).status_code == 200
    assert (await two.http.get("/version")).json() == {"version": version("warmfront")}
    # The figure is renewed with each look at the leases, and may tell of the start for a moment.
    await until(lambda: b'warmfront_router_index_mode{mode="live"} 1.0' in two.router.metrics.text())
    assert "warmfront_router_index_mode" in (await two.http.get("/metrics")).text
    assert (await two.http.post("/v1/drain", json={"replica": "w0"})).json() == {"replica": "w0", "running": 0}
    await until(lambda: len(two.router.fleet.ready) == 1)
    assert (await two.http.post("/v1/drain", json={"replica": "no"})).status_code == 404
    assert (await two.http.post("/v1/drain", json={})).status_code == 400
    assert (await two.http.get("/v1/models/simulated")).json()["id"] == "simulated"
    assert (await two.http.get("/v1/models/other")).status_code == 404


async def test_each_answered_request_is_counted_once_by_its_code(two: Cluster) -> None:
    bodies = [
        COMPLETION,
        {**COMPLETION, "prompt": ["a", "b", "c"]},
        {**COMPLETION, "stream": True},
        {**COMPLETION, "stream": None, "model": None},
        {**COMPLETION, "echo": True},
        {**COMPLETION, "temperature": "hot"},
        {**COMPLETION, "temperature": -1},
        {**COMPLETION, "model": "gpt-9"},
    ]
    for body in bodies:
        await two.http.post("/v1/completions", json=body)
    text = (await two.http.get("/metrics")).text
    counted = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("warmfront_router_requests_t"))
    assert counted == {
        'warmfront_router_requests_total{code="OK"}': "4.0",
        'warmfront_router_requests_total{code="UNIMPLEMENTED"}': "1.0",
        'warmfront_router_requests_total{code="INVALID_ARGUMENT"}': "2.0",
        'warmfront_router_requests_total{code="NOT_FOUND"}': "1.0",
    }


async def test_errors_that_openai_has_a_code_for_carry_it(two: Cluster) -> None:
    for path, more, status, code, param in (
        ("completions", {**COMPLETION, "prompt": "x" * 5000}, 400, "context_length_exceeded", "prompt"),
        ("completions", {**COMPLETION, "max_tokens": 5000}, 400, "context_length_exceeded", "max_tokens"),
        ("chat/completions", {**CHAT, "model": "gpt-9"}, 404, "model_not_found", "model"),
    ):
        response = await two.http.post(f"/v1/{path}", json=more)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (status, code, param)
        assert error["type"] == "invalid_request_error"
    assert (await two.http.get("/v1/models/gpt-9")).json()["error"]["code"] == "model_not_found"


async def test_an_assistant_s_turn_without_content_is_an_empty_one(two: Cluster) -> None:
    turns = [*CHAT["messages"], {"role": "assistant", "content": None}, *CHAT["messages"]]
    response = await two.http.post("/v1/chat/completions", json={**CHAT, "messages": turns})
    assert response.status_code == 200
    turns[1] = {"role": "assistant", "content": ""}
    same = await two.http.post("/v1/chat/completions", json={**CHAT, "messages": turns})
    assert same.json()["usage"]["prompt_tokens"] == response.json()["usage"]["prompt_tokens"]
