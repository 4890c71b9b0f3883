"""Clients that send or read too slowly, over both fronts: each ends with a clear answer and holds nothing."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio
import pytest
from warmfront_pb.v1 import inference_pb2

from router.segments import pack_ids
from tests.fakes.simulated_worker import SimulatedWorker
from tests.router.conftest import Cluster
from tests.support import until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
LONG = {"max_model_len": 30_000, "num_blocks": 4096}
# What the client's transport takes although nobody reads is kept small, so that the answer backs up soon.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384))


def address(cluster: Cluster) -> tuple[str, int]:
    parts = urlsplit(cluster.endpoints[0].http)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


async def idle(cluster: Cluster, worker: SimulatedWorker) -> None:
    await until(lambda: worker.running == cluster.load == worker.cache.num_used_blocks == 0)


async def test_a_body_that_does_not_come_gets_408_and_the_connection_ends(cluster: Cluster) -> None:
    await cluster.add_worker("w0")
    router = await cluster.add_router(body_timeout_s=0.5)
    reader, writer = await asyncio.open_connection(*address(cluster))
    writer.write(HEAD % 1000 + b'{"prompt"')
    drip = asyncio.create_task(_drip(writer))
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readuntil(b"}}")
    with suppress(ConnectionResetError):  # a byte of the drip may meet the closed connection
        assert await reader.read() == b""
    drip.cancel()
    assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head
    assert b"send it faster" in body
    writer.close()
    assert 'warmfront_router_requests_total{code="ABORTED"} 1.0' in router.metrics.text().decode()


async def test_a_client_that_breaks_off_its_upload_is_counted_and_leaves_no_traceback(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.add_worker("w0")
    router = await cluster.add_router()
    for path in (b"/v1/completions", b"/v1/drain", b"/v1/lora"):
        _, writer = await asyncio.open_connection(*address(cluster))
        writer.write((HEAD % 15_000_000).replace(b"/v1/completions", path) + b'{"prompt": "' + b"x" * 60_000)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    await until(lambda: 'requests_total{code="CANCELLED"} 1.0' in router.metrics.text().decode())
    assert (await cluster.http.get("/healthz")).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def _drip(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(0.1)
        writer.write(b" ")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"])
async def test_a_head_that_does_not_come_ends_the_connection(cluster: Cluster, sent: bytes) -> None:
    await cluster.add_worker("w0")
    await cluster.add_router(body_timeout_s=0.5)
    reader, writer = await asyncio.open_connection(*address(cluster))
    writer.write(sent)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""
    writer.close()


async def test_a_message_that_does_not_come_is_aborted_over_grpc(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router(body_timeout_s=0.5)
    async with grpc.aio.insecure_channel(cluster.endpoints[0].grpc) as channel:
        call: Any = channel.stream_stream("/warmfront.v1.Inference/Generate")()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.ABORTED
        empty: Any = channel.stream_stream("/warmfront.v1.Inference/Generate")()
        await empty.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await empty.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not worker.requests


async def test_a_client_that_does_not_read_is_cut_off_over_http(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0", **LONG)
    router = await cluster.add_router(stall_timeout_s=0.5)
    body: dict[str, Any] = {"prompt": "x" * 50, "max_tokens": 20_000, "stream": True, "logprobs": 1}
    raw = cluster.http.build_request("POST", "/v1/completions", json=body).content
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, address(cluster))
        await loop.sock_sendall(client, HEAD % len(raw) + raw)
        await until(lambda: b"stalled_total 1.0" in router.metrics.text(), guard_s=60)
        await idle(cluster, worker)
    assert worker.num_answered == 0


async def test_a_client_that_does_not_read_is_cut_off_over_grpc(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0", **LONG)
    router = await cluster.add_router(stall_timeout_s=0.5)
    request = inference_pb2.GenerateRequest(
        token_ids=pack_ids(list(range(1, 60))), sampling=inference_pb2.SamplingParams(max_tokens=20_000, logprobs=1)
    )
    async with grpc.aio.insecure_channel(cluster.endpoints[0].grpc, options=SMALL_WINDOW) as channel:
        call: Any = channel.unary_stream("/warmfront.v1.Inference/Generate")(request.SerializeToString())
        assert await call.read() is not grpc.aio.EOF
        await until(lambda: b"stalled_total 1.0" in router.metrics.text(), guard_s=60)
        await idle(cluster, worker)
        assert worker.num_answered == 0
        with pytest.raises(grpc.aio.AioRpcError) as error:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert error.value.code() in (grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)


@pytest.mark.slow
async def test_a_client_that_pauses_for_less_than_the_limit_gets_it_all(cluster: Cluster) -> None:
    await cluster.add_worker("w0", **LONG)
    router = await cluster.add_router(stall_timeout_s=20.0)
    body = {"prompt": "x" * 50, "max_tokens": 8_000, "stream": True, "logprobs": 1}
    raw = cluster.http.build_request("POST", "/v1/completions", json=body).content
    reader, writer = await asyncio.open_connection(*address(cluster), limit=4096)
    writer.write(HEAD % len(raw) + raw)
    await asyncio.sleep(1.0)
    answer = bytearray()
    while b"data: [DONE]" not in answer[-64:]:
        piece = await reader.read(65_536)
        assert piece
        answer += piece
    writer.close()
    assert answer.count(b"text_completion") == 8_000
    assert b"stalled_total 0.0" in router.metrics.text()


@pytest.mark.parametrize(
    ("headers", "stream", "forwarded_s"),
    [
        ({"x-request-timeout": "30"}, True, 30),
        ({"x-request-timeout": "2500ms"}, False, 2.5),
        ({"x-stainless-read-timeout": "40"}, False, 40),
        ({"x-stainless-read-timeout": "40"}, True, 600),
        ({"x-request-timeout": "99999"}, False, 600),
        ({}, False, 600),
    ],
)
async def test_the_client_s_patience_is_the_worker_s_deadline(
    cluster: Cluster, headers: dict[str, str], stream: bool, forwarded_s: float
) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router()
    body = {"prompt": "x" * 50, "max_tokens": 1, "stream": stream}
    assert (await cluster.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    (given_s,) = worker.deadlines_s
    assert given_s is not None and forwarded_s / 2 < given_s <= forwarded_s + 1


async def test_a_request_whose_time_is_over_gets_504_over_http(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router()
    worker.faults.is_hung = True
    body = {"prompt": "x" * 50, "max_tokens": 1}
    answer = await cluster.http.post("/v1/completions", json=body, headers={"x-request-timeout": "0.3"})
    assert answer.status_code == 504
    for wrong in ("soon", "-1", "0", "1h", ""):
        answer = await cluster.http.post("/v1/completions", json=body, headers={"x-request-timeout": wrong})
        assert answer.status_code == 400 and "x-request-timeout" in answer.json()["error"]["message"]
