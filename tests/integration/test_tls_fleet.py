"""Routers call workers over TLS: who believes whom, and what happens when certificates change."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from warmfront_pb.v1 import worker_pb2, worker_pb2_grpc

from router.config import RouterConfig
from router.main import Router
from tests.fakes.authority import Authority
from tests.fakes.redis_servers import Server, servers
from tests.support import free_port
from worker.config import WorkerConfig
from worker.main import EXIT_WRONG_USE, Worker
from worker.simulated import BYTES

TOKEN = "the-token-of-the-fleet"
_fleets = itertools.count()


@pytest.fixture
def config(redis_url: str) -> WorkerConfig:
    return WorkerConfig(
        replica_id="w0",
        redis_url=redis_url,
        fleet=f"tls-{next(_fleets)}",
        engine="simulated",
        model=BYTES,
        kv_blocks=256,
        decode_time_s=0.02,
        heartbeat_s=0.1,
        lease_s=1.0,
        worker_token=TOKEN,
    )


@asynccontextmanager
async def running(config: WorkerConfig) -> AsyncIterator[Worker]:
    worker = Worker(config)
    ready = asyncio.Event()
    task = asyncio.create_task(worker.run(lambda _: ready.set()))
    async with asyncio.timeout(60):
        await ready.wait()
    try:
        yield worker
    finally:
        worker.drain(0.0)
        await task


@asynccontextmanager
async def router_of(config: WorkerConfig, **more: Any) -> AsyncIterator[tuple[Router, httpx.AsyncClient]]:
    timing = {"heartbeat_s": 0.1, "lease_s": 1.0, "drain_deadline_s": 5.0}
    where = {"redis_url": config.redis_url, "fleet": config.fleet, "http_port": 0, "grpc_port": 0}
    router = Router(RouterConfig(**where, **timing, worker_token=TOKEN, **more))
    client = httpx.AsyncClient(base_url=(await router.start()).http, timeout=60)
    try:
        yield router, client
    finally:
        await client.aclose()
        await router.stop()


async def until_ready(router: Router) -> None:
    async with asyncio.timeout(60):
        while router.fleet.why_not_ready():
            await asyncio.sleep(0.02)


async def complete(client: httpx.AsyncClient, max_tokens: int = 3) -> int:
    body = {"prompt": "Once upon a time", "max_tokens": max_tokens}
    return (await client.post("/v1/completions", json=body)).status_code


async def test_router_and_worker_prove_themselves_to_each_other(config: WorkerConfig, authority: Authority) -> None:
    server, client_pair = authority.issue("worker"), authority.issue("router", "router.example")
    config = replace(config, tls_cert=server.cert, tls_key=server.key, tls_client_ca=authority.ca)
    shown = {"worker_client_cert": client_pair.cert, "worker_client_key": client_pair.key}
    async with running(config), router_of(config, worker_ca=authority.ca, **shown) as (router, client):
        await until_ready(router)
        assert await complete(client) == 200
        assert (await client.post("/v1/cache/reset")).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert 'tls_certificate_expiry_timestamp_seconds{certificate="worker_client"}' in metrics
        drained = await client.post("/v1/drain", json={"replica": "w0"})
        assert drained.json() == {"replica": "w0", "running": 0}


async def test_workers_may_share_a_certificate_that_carries_a_name(config: WorkerConfig, authority: Authority) -> None:
    server = authority.issue("worker", "workers.example")
    config = replace(config, tls_cert=server.cert, tls_key=server.key)
    named = {"worker_ca": authority.ca, "worker_server_name": "workers.example"}
    async with running(config), router_of(config, **named) as (router, client):
        await until_ready(router)
        assert await complete(client) == 200


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("authority", "does not come from --worker-ca"),
        ("name", "carries another name: is it --worker-server-name?"),
        ("plain text", "does it want TLS (--worker-ca)"),
        ("client certificate", "or --worker-client-cert?"),
        ("no client certificate", "or --worker-client-cert?"),
    ],
)
async def test_a_router_that_cannot_prove_itself_or_does_not_believe_the_worker_is_not_ready(
    config: WorkerConfig, authority: Authority, tmp_path: Path, wrong: str, hint: str
) -> None:
    strangers = Authority(tmp_path, "strangers")
    server = authority.issue("worker", "workers.example") if wrong == "name" else authority.issue("worker")
    asks = authority.ca if "client" in wrong else None
    config = replace(config, tls_cert=server.cert, tls_key=server.key, tls_client_ca=asks)
    stranger = strangers.issue("stranger", "client")
    settings: dict[str, Any] = {
        "authority": {"worker_ca": strangers.ca},
        "name": {"worker_ca": authority.ca},
        "plain text": {},
        "client certificate": {
            "worker_ca": authority.ca,
            "worker_client_cert": stranger.cert,
            "worker_client_key": stranger.key,
        },
        "no client certificate": {"worker_ca": authority.ca},
    }
    async with running(config), router_of(config, **settings[wrong]) as (_router, client):
        async with asyncio.timeout(60):
            while hint not in (await client.get("/readyz")).text:
                await asyncio.sleep(0.05)
        assert await complete(client) == 503


async def test_a_router_of_tls_does_not_fall_back_to_plain_text(config: WorkerConfig, authority: Authority) -> None:
    async with running(config), router_of(config, worker_ca=authority.ca) as (_router, client):
        async with asyncio.timeout(60):
            while "it speaks no TLS, and --worker-ca wants that" not in (await client.get("/readyz")).text:
                await asyncio.sleep(0.05)
        assert await complete(client) == 503


async def test_certificates_of_both_sides_change_under_a_running_stream(
    config: WorkerConfig, authority: Authority, tmp_path: Path
) -> None:
    """The authority too: its successor is added first, then the pairs change, then it goes."""
    successor = Authority(tmp_path, "successor")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.ca.read_bytes())
    server, shown = authority.issue("worker"), authority.issue("router", "router.example")
    config = replace(config, tls_cert=server.cert, tls_key=server.key, tls_client_ca=trusted)
    own = {"worker_client_cert": shown.cert, "worker_client_key": shown.key}
    async with running(config) as worker, router_of(config, worker_ca=trusted, **own) as (router, client):
        await until_ready(router)
        body = {"prompt": "Once upon a time", "max_tokens": 100, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            first_channel = router.fleet.members["w0"].client._channel
            for new in (
                lambda: trusted.write_bytes(authority.ca.read_bytes() + successor.ca.read_bytes()),
                lambda: (successor.issue("worker"), successor.issue("router", "router.example")),
                lambda: trusted.write_bytes(successor.ca.read_bytes()),
            ):
                before = router.fleet.members["w0"].client._channel
                new()
                async with asyncio.timeout(60):
                    while router.fleet.members["w0"].client._channel is before:
                        await asyncio.sleep(0.02)
                assert await complete(client) == 200
            assert "data: [DONE]" in [line async for line in lines]
        assert router.fleet.members["w0"].client._channel is not first_channel
        assert worker.replica.state_name == "READY"
        async with asyncio.timeout(60):
            while router.fleet.members["w0"].client._old:
                await asyncio.sleep(0.02)


async def test_certificates_change_while_redis_is_away(
    config: WorkerConfig, authority: Authority, tmp_path: Path
) -> None:
    with servers() as started:
        server = Server(tmp_path)
        started.append(server)
        server_pair, shown = authority.issue("worker"), authority.issue("router", "router.example")
        config = replace(
            config,
            redis_url=f"redis://127.0.0.1:{server.port}/0",
            tls_cert=server_pair.cert,
            tls_key=server_pair.key,
            tls_client_ca=authority.ca,
        )
        own = {"worker_client_cert": shown.cert, "worker_client_key": shown.key}
        async with running(config), router_of(config, worker_ca=authority.ca, **own) as (router, client):
            await until_ready(router)
            server.kill()
            async with asyncio.timeout(60):
                while router.fleet._registry.online:
                    await asyncio.sleep(0.02)
                before = router.fleet.members["w0"].client._channel
                authority.issue("router", "router.example")
                while router.fleet.members["w0"].client._channel is before:
                    await asyncio.sleep(0.02)
            assert await complete(client) == 200


async def test_tls_takes_the_place_of_insecure_listen_beyond_loopback(config: WorkerConfig) -> None:
    files = {"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")}
    assert RouterConfig(redis_url="redis://r", listen="0.0.0.0", **files).tls_files is not None
    assert replace(config, listen="0.0.0.0", advertise="w0.example", **files).tls_files is not None


async def test_a_worker_asks_for_its_token_over_tls_too(config: WorkerConfig, authority: Authority) -> None:
    server = authority.issue("worker")
    config = replace(config, tls_cert=server.cert, tls_key=server.key)
    credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    async with running(config) as worker, grpc.aio.secure_channel(worker.replica.address, credentials) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetModel(worker_pb2.GetModelRequest())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_metrics_port_answers_probes_in_plain_text(config: WorkerConfig, authority: Authority) -> None:
    server = authority.issue("worker")
    config = replace(config, tls_cert=server.cert, tls_key=server.key, metrics_port=free_port())
    async with (
        running(config) as worker,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{config.metrics_port}") as probe,
    ):
        assert (await probe.get("/readyz")).text == "ok\n"
        assert 'expiry_timestamp_seconds{certificate="server"}' in (await probe.get("/metrics")).text
        worker.replica.state = 4
        answer = await probe.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "DRAINING\n")
        assert (await probe.get("/healthz")).status_code == 200


async def test_a_worker_with_an_ended_certificate_does_not_start(
    config: WorkerConfig, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    ended = authority.issue("worker", ends_in=timedelta(minutes=-1))
    code = await Worker(replace(config, tls_cert=ended.cert, tls_key=ended.key)).run()
    assert code == EXIT_WRONG_USE
    assert f"--tls-cert {ended.cert} ended on " in caplog.text
