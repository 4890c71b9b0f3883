"""What a client sees when replicas fail: before the first token, in mid-stream, by hanging, by dying."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from tests.router.conftest import Cluster
from tests.router.reflective import ReflectiveClient
from tests.router.test_grpc import GENERATE
from tests.support import until

BODY: dict[str, Any] = {"prompt": "once upon a time " * 4, "max_tokens": 20, "seed": 7}


async def answer(cluster: Cluster, **more: Any) -> dict[str, Any]:
    response = await cluster.http.post("/v1/completions", json={**BODY, **more})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
async def test_a_replica_that_fails_before_the_first_token_costs_the_client_nothing(
    two: Cluster, status: grpc.StatusCode
) -> None:
    for _ in range(4):
        failing = min(two.workers.values(), key=lambda worker: len(worker.requests))
        failing.faults.statuses = [status]
        assert len((await answer(two))["choices"][0]["text"]) == 20
        failing.faults.statuses = []
    assert two.load == 0


async def test_client_errors_of_a_worker_are_never_retried(two: Cluster) -> None:
    for worker in two.workers.values():
        worker.faults.statuses = [grpc.StatusCode.INVALID_ARGUMENT]
    response = await two.http.post("/v1/completions", json=BODY)
    assert response.status_code == 400
    assert sum(len(worker.requests) for worker in two.workers.values()) == 1
    assert two.load == 0


async def test_a_request_is_tried_three_times_at_most(cluster: Cluster) -> None:
    for number in range(5):
        worker = await cluster.add_worker(f"w{number}")
        worker.faults.statuses = [grpc.StatusCode.UNAVAILABLE] * 9
    await cluster.add_router()
    response = await cluster.http.post("/v1/completions", json=BODY)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"
    assert sum(len(worker.requests) for worker in cluster.workers.values()) == 3
    assert cluster.load == 0


async def test_a_dead_replica_s_address_stays_in_the_log(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router()
    worker.faults.is_reporting_paused = True
    address = cluster.router.fleet.members["w0"].client.address
    await worker._server.stop(None)
    response = await cluster.http.post("/v1/completions", json=BODY)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the only ready replica failed: retry soon"
    assert address in caplog.text


async def test_full_queues_everywhere_are_429_with_retry_after(two: Cluster) -> None:
    for worker in two.workers.values():
        worker.spec.max_queue = 0
    response = await two.http.post("/v1/completions", json=BODY)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert two.load == 0


async def test_a_stream_that_breaks_goes_on_elsewhere_and_equals_an_uninterrupted_one(two: Cluster) -> None:
    whole = await answer(two)
    for worker in two.workers.values():
        worker.faults.cut_after_tokens = 5
        worker.spec.decode_s = 0.01

    async def mend_the_other() -> None:
        await until(lambda: any(worker.running for worker in two.workers.values()))
        for worker in two.workers.values():
            if not worker.running:
                worker.faults.cut_after_tokens = None

    mending = asyncio.create_task(mend_the_other())
    continued = await answer(two, logprobs=0)
    await mending
    assert continued["choices"][0]["text"] == whole["choices"][0]["text"]
    assert continued["choices"][0]["finish_reason"] == "length"
    assert len(continued["choices"][0]["logprobs"]["tokens"]) == 20
    assert continued["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert continued["usage"]["completion_tokens"] == 20
    assert two.load == 0


async def test_a_stream_goes_on_once_and_then_fails_with_a_clean_error(two: Cluster) -> None:
    for worker in two.workers.values():
        worker.faults.cut_after_tokens = 5
    async with two.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert response.status_code == 200
    assert lines[-1] == "[DONE]"
    error = json.loads(lines[-2])["error"]
    assert error["code"] == "unavailable" and "middle of the answer" in error["message"]
    assert len(lines) == 5 + 5 + 2
    assert two.load == 0


async def test_what_breaks_inside_the_router_in_mid_stream_ends_in_an_error_event_and_a_line_with_the_request(
    two: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    for worker in two.workers.values():
        worker.faults.nonsense_after_tokens = 3
    for prompts in (BODY["prompt"], [BODY["prompt"], "another"]):
        headers = {"x-request-id": f"odd-{len(prompts)}"}
        body = {**BODY, "prompt": prompts, "stream": True}
        async with two.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        assert response.status_code == 200 and lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["error"]["message"] == "the router failed; its log has the reason"
        assert f"request={headers['x-request-id']}" in caplog.text
        whole = await two.http.post("/v1/completions", json={**body, "stream": False}, headers=headers)
        assert (whole.status_code, whole.headers["x-request-id"]) == (500, headers["x-request-id"])
    assert 'warmfront_router_requests_total{code="INTERNAL"} 4.0' in two.router.metrics.text().decode()
    await until(lambda: two.load == 0)


async def test_a_stream_of_two_choices_cannot_move_and_says_so(two: Cluster) -> None:
    for worker in two.workers.values():
        worker.faults.cut_after_tokens = 5
    async with two.http.stream("POST", "/v1/completions", json={**BODY, "n": 2, "stream": True}) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert "cannot go on elsewhere" in json.loads(lines[-2])["error"]["message"]
    assert two.load == 0


async def test_a_stream_with_log_probabilities_of_its_prompt_cannot_move_and_says_so(two: Cluster) -> None:
    for worker in two.workers.values():
        worker.faults.cut_after_tokens = 5
    client = ReflectiveClient(two.endpoints[0].grpc)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await client.call(GENERATE, {"text": BODY["prompt"], "sampling": {"maxTokens": 20, "promptLogprobs": 0}})
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "cannot go on elsewhere" in str(raised.value.details())
    assert sum(len(worker.requests) for worker in two.workers.values()) == 1
    await client.channel.close()


async def test_where_streams_may_not_move_one_that_breaks_says_so(cluster: Cluster) -> None:
    for name in ("w0", "w1"):
        worker = await cluster.add_worker(name)
        worker.faults.cut_after_tokens = 5
    await cluster.add_router(continue_streams=False)
    async with cluster.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert "cannot go on elsewhere" in json.loads(lines[-2])["error"]["message"]
    assert len(lines) == 5 + 2
    assert sum(len(worker.requests) for worker in cluster.workers.values()) == 1
    assert cluster.load == 0


async def test_a_whole_answer_of_two_choices_begins_anew_elsewhere_once(two: Cluster) -> None:
    whole = await answer(two, n=2)
    for worker in two.workers.values():
        worker.faults.cut_after_tokens = 5
    response = await two.http.post("/v1/completions", json={**BODY, "n": 2})
    assert response.status_code == 503
    assert "cannot go on elsewhere" in response.json()["error"]["message"]
    for worker in two.workers.values():  # whichever is asked first breaks off, and the other does not
        worker.faults.cut_after_tokens = 5
        other = next(one for one in two.workers.values() if one is not worker)
        other.faults.cut_after_tokens = None
        anew = await answer(two, n=2)
        assert [one["text"] for one in anew["choices"]] == [one["text"] for one in whole["choices"]]
        assert anew["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 40
    assert two.load == 0


async def test_a_hung_replica_costs_one_lease_and_no_answer(two: Cluster) -> None:
    hung = two.workers["w0"]
    hung.faults.is_hung = True
    pending = []
    while not hung.requests:
        pending.append(asyncio.create_task(answer(two, prompt=f"{len(pending)} " * 30)))
        await asyncio.sleep(0.05)
    hung.faults.is_silent = True  # a stopped process writes no lease either
    answers = await asyncio.gather(*pending)
    assert all(len(one["choices"][0]["text"]) == 20 for one in answers)
    assert "w0" not in two.router.fleet.members
    assert two.router.fleet.index.num_blocks("w0") == 0
    assert two.load == 0


async def faults(cluster: Cluster) -> dict[str, str]:
    """What the router says against each replica."""
    listed = (await cluster.http.get("/v1/replicas")).json()["replicas"]
    return {one["id"]: one["fault"] for one in listed}


async def test_an_open_breaker_keeps_requests_away_and_closes_again(two: Cluster) -> None:
    bad = two.workers["w0"]
    bad.faults.statuses = [grpc.StatusCode.UNAVAILABLE] * 100
    for number in range(12):
        await answer(two, prompt=f"{number} " * 30)
    assert len(bad.requests) < 6
    told = await faults(two)
    assert ("the last call to it from this router failed" in told["w0"], told["w1"]) == (True, "")
    bad.faults.statuses = []
    seen = len(bad.requests)
    number = 100
    while len(bad.requests) < seen + 3:
        number += 1
        assert number < 2000
        await answer(two, prompt=f"{number} " * 30)
        await asyncio.sleep(0.01)
    assert await faults(two) == {"w0": "", "w1": ""}


@pytest.mark.parametrize(
    ("status", "opens_after"),
    [
        (grpc.StatusCode.UNAVAILABLE, 1),
        (grpc.StatusCode.UNAUTHENTICATED, 1),
        (grpc.StatusCode.INTERNAL, 3),
        (grpc.StatusCode.UNKNOWN, 3),
        (grpc.StatusCode.INVALID_ARGUMENT, 9),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 9),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 9),
    ],
)
async def test_a_replica_that_is_not_there_or_errs_three_times_opens_its_breaker_and_what_clients_ask_for_does_not(
    cluster: Cluster, status: grpc.StatusCode, opens_after: int
) -> None:
    worker = await cluster.add_worker("w0")
    router = await cluster.add_router()
    worker.faults.statuses = [status] * 4
    for number in range(1, 5):
        assert (await cluster.http.post("/v1/completions", json=BODY)).status_code >= 400
        assert router.fleet.members["w0"].breaker.is_troubled == (number >= opens_after), number


async def test_a_client_that_leaves_while_a_failed_replica_is_tried_makes_room_for_the_next_try(two: Cluster) -> None:
    bad = two.workers["w0"]
    numbers = iter(range(2000))

    def ask() -> asyncio.Task[dict[str, Any]]:
        return asyncio.create_task(answer(two, prompt=f"{next(numbers)} " * 30))

    async def asked_there() -> asyncio.Task[dict[str, Any]]:
        """The first request that the replica gets from now on, under way there."""
        seen = len(bad.requests)
        while True:
            task = ask()
            await until(lambda task=task: task.done() or len(bad.requests) > seen)  # type: ignore[misc]
            if len(bad.requests) > seen:
                return task

    bad.faults.statuses = [grpc.StatusCode.UNAVAILABLE]
    await (await asked_there())  # its breaker opens
    assert (await faults(two))["w0"]
    bad.faults.gate = asyncio.Event()
    (await asked_there()).cancel()
    await until(lambda: bad.running == 0 and two.load == 0)
    bad.faults.gate.set()
    await (await asked_there())
    assert (await faults(two))["w0"] == ""


@contextmanager
def worker_process(cluster: Cluster, replica: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.fakes.simulated_worker", "--redis", cluster.redis_url]
    process = subprocess.Popen(
        [*command, "--id", replica, "--fleet", cluster.fleet, *flags],
        env={"PYTHONPATH": ".:proto", "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def test_a_killed_process_loses_no_stream_and_its_blocks_leave_the_index(cluster: Cluster) -> None:
    with worker_process(cluster, "victim", "--decode-s", "0.02") as process:
        router = await cluster.add_router()
        stream = asyncio.create_task(answer(cluster, max_tokens=60))
        await until(lambda: router.fleet.loads.of("victim").in_flight == 1)
        await until(lambda: router.fleet.index.num_blocks("victim") > 0)
        await cluster.add_worker("w1")
        await until(lambda: len(router.fleet.ready) == 2)
        process.kill()
        continued = await stream
        assert len(continued["choices"][0]["text"]) == 60
        whole = await answer(cluster, max_tokens=60)
        assert whole["choices"][0]["text"] == continued["choices"][0]["text"]
        await until(lambda: "victim" not in router.fleet.members)
        assert router.fleet.index.num_blocks("victim") == 0
        assert cluster.load == 0


async def test_a_client_error_in_the_middle_of_chaos_leaves_no_load(cluster: Cluster) -> None:
    """Failures, retries, cut streams and leaving clients: every charge is released exactly once."""
    for number in range(3):
        await cluster.add_worker(f"w{number}", decode_s=0.001)
    await cluster.add_router()
    bad = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT]

    async def one(number: int) -> int:
        worker = cluster.workers[f"w{number % 3}"]
        if number % 3 == 0:
            worker.faults.statuses.append(bad[number // 3 % 3])
        worker.faults.cut_after_tokens = 7 if number % 5 == 0 else None
        body = {**BODY, "prompt": f"{number % 10} " * 40, "n": 1 + number % 2}
        call = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
        if number % 7 == 0:
            await asyncio.sleep(0.02)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return 0
        return (await call).status_code

    codes = []
    for start in range(0, 120, 12):
        codes += await asyncio.gather(*(one(number) for number in range(start, start + 12)))
    assert set(codes) <= {0, 200, 400, 429, 503}
    assert codes.count(200) > 40
    await until(lambda: cluster.load == 0)
    for name in cluster.router.fleet.members:
        load = cluster.router.fleet.loads.of(name)
        assert load.in_flight == load.waiting_requests == load.waiting_tokens == 0
    await until(lambda: all(not cluster.router.fleet.loads.of(name).pending for name in cluster.router.fleet.members))
    await until(cluster.index_is_true)
