"""A caller's trace context reaches the replica, and its id the log."""

from __future__ import annotations

import logging

import grpc
import pytest

from common.trace import NO_TRACE, Trace, trace_of
from tests.router.conftest import Cluster
from tests.router.reflective import ReflectiveClient

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
CONTEXT = {"traceparent": PARENT, "tracestate": "rojo=00f067aa0ba902b7", "baggage": "user=alice,plan=free"}
BODY = {"prompt": ["once", "upon"], "max_tokens": 2}


def of(metadata: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in metadata.items() if name in CONTEXT}


async def test_every_call_of_a_request_carries_its_trace_over_http_a_retry_too(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def lines() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "router.dispatch"]
        caplog.clear()
        return found

    for name in ("w0", "w1"):
        await cluster.add_worker(name)
    await cluster.add_router()
    cluster.workers["w0"].faults.statuses = cluster.workers["w1"].faults.statuses = [grpc.StatusCode.UNAVAILABLE]
    response = await cluster.http.post("/v1/completions", json=BODY, headers=CONTEXT)
    assert response.status_code == 200, response.text
    assert [of(one) for worker in cluster.workers.values() for one in worker.metadata] == 3 * [CONTEXT]
    written = lines()  # of the call that failed, and of two prompts
    assert len(written) == 3 and all(line.endswith(f" trace={TRACE_ID}") for line in written)

    await cluster.http.post("/v1/completions", json={**BODY, "max_tokens": 0}, headers=CONTEXT)
    assert [line.endswith(f" trace={TRACE_ID}") for line in lines()] == [True]
    await cluster.http.post("/v1/completions", json=BODY)
    assert not any("trace=" in line for line in lines())


async def test_a_call_over_grpc_carries_it_too_with_all_the_baggage_there_may_be(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router()
    context = {**CONTEXT, "baggage": "x=" + "y" * 8190}
    client = ReflectiveClient(cluster.endpoints[0].grpc)
    try:
        request = {"text": "once", "sampling": {"maxTokens": 1}}
        await client.call("warmfront.v1.Inference/Generate", request, tuple(context.items()))
    finally:
        await client.channel.close()
    assert of(worker.metadata[0]) == context


def test_parts_of_a_header_are_joined() -> None:
    headers = [("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2"), ("x-other", "c")]
    assert trace_of(headers) == Trace((("traceparent", PARENT), ("tracestate", "a=1,b=2")), f" trace={TRACE_ID}")


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "rubbish",
        PARENT.upper(),
        PARENT[:-1],
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"{PARENT},{PARENT}",
    ],
)
def test_a_parent_of_another_form_is_left_out_and_its_state_with_it(parent: str) -> None:
    assert trace_of([("traceparent", parent), ("tracestate", "a=1")]) == NO_TRACE
    assert trace_of([("traceparent", parent), ("baggage", "a=1")]).metadata == (("baggage", "a=1"),)


@pytest.mark.parametrize("value", ["", "caf\u00e9", "a\nb", "x" * 8193])
def test_what_cannot_be_sent_on_is_left_out(value: str) -> None:
    assert trace_of([("traceparent", PARENT), ("baggage", value)]).metadata == (("traceparent", PARENT),)
