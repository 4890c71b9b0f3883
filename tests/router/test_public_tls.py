"""The public servers over TLS: who gets in, and what happens when certificates change."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from warmfront_pb.v1 import inference_pb2, inference_pb2_grpc

from common.tls import certificates_ends_s
from router.config import RouterConfig
from router.main import Endpoints, run_router
from tests.fakes.authority import Authority, Pair
from tests.router.conftest import Cluster

CHAT: Any = {"model": "sim", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "seed": 1}


async def serve(cluster: Cluster, server: Pair, **more: Any) -> Endpoints:
    """A router with one replica behind these certificates."""
    await cluster.add_worker("w0", decode_s=more.pop("decode_s", 0.0))
    await cluster.add_router(tls_cert=server.cert, tls_key=server.key, **more)
    return cluster.endpoints[0]


def context_of(ca: Path, shown: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    return context


def channel_to(address: str, ca: Path, shown: Pair | None = None) -> grpc.aio.Channel:
    key, cert = (shown.key.read_bytes(), shown.cert.read_bytes()) if shown is not None else (None, None)
    options = (("grpc.use_local_subchannel_pool", 1),)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca.read_bytes(), key, cert), options)


async def knock(channel: grpc.aio.Channel) -> Any:
    """The answer of the health service. Raises ``AioRpcError`` where one is not let in."""
    async with channel:
        return await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)


async def shown_end_s(address: str, ca: Path, alpn: str) -> float:
    """When the certificate ends that a new connection is shown."""
    context = context_of(ca)
    context.set_alpn_protocols([alpn])
    host, port = address.rsplit(":", 1)
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return certificates_ends_s(ssl.DER_cert_to_PEM_cert(der).encode())[0]


async def test_openais_client_and_grpc_speak_tls(cluster: Cluster, authority: Authority) -> None:
    at = await serve(cluster, authority.issue("server"))
    assert at.http.startswith("https://")
    async with (
        httpx.AsyncClient(verify=context_of(authority.ca)) as transport,
        openai.AsyncOpenAI(base_url=f"{at.http}/v1", api_key="none", http_client=transport, max_retries=0) as client,
    ):
        CHAT["model"] = (await client.models.list()).data[0].id
        whole = await client.chat.completions.create(**CHAT)
        stream = await client.chat.completions.create(**CHAT, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content != ""
    async with channel_to(at.grpc, authority.ca) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="Hello", sampling={"max_tokens": 4})
        assert len([message async for message in stub.Generate(request)]) == 4


async def test_who_asks_in_plain_text_is_not_answered_and_disturbs_nobody(
    cluster: Cluster, authority: Authority
) -> None:
    at = await serve(cluster, authority.issue("server"))
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"http{at.http.removeprefix('https')}/healthz")
    with pytest.raises(grpc.aio.AioRpcError):
        await knock(grpc.aio.insecure_channel(at.grpc))
    assert await knock(channel_to(at.grpc, authority.ca))


@pytest.mark.parametrize("port", ["http", "grpc"])
async def test_who_never_ends_its_handshake_is_let_go(cluster: Cluster, authority: Authority, port: str) -> None:
    at = await serve(cluster, authority.issue("server"), body_timeout_s=0.2)
    address = at.http.removeprefix("https://") if port == "http" else at.grpc
    host, number = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    async with asyncio.timeout(30):  # the libraries' own limits are one minute and two
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("port", ["http", "grpc"])
async def test_nothing_older_than_tls_1_2_is_spoken(cluster: Cluster, authority: Authority, port: str) -> None:
    at = await serve(cluster, authority.issue("server"))
    host, number = getattr(at, port).removeprefix("https://").rsplit(":", 1)

    def shake_hands(version: ssl.TLSVersion) -> str | None:
        context = context_of(authority.ca)
        context.set_alpn_protocols(["h2", "http/1.1"])
        context.minimum_version = context.maximum_version = version
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with socket.create_connection((host, int(number)), timeout=20) as plain:
            return context.wrap_socket(plain, server_hostname=host).version()

    assert await asyncio.to_thread(shake_hands, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    assert await asyncio.to_thread(shake_hands, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    with pytest.warns(DeprecationWarning), pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.to_thread(shake_hands, ssl.TLSVersion.TLSv1_1)


async def test_only_clients_with_a_certificate_of_the_right_authority_get_in(
    cluster: Cluster, authority: Authority, tmp_path: Path
) -> None:
    clients, strangers = Authority(tmp_path, "clients"), Authority(tmp_path, "strangers")
    at = await serve(cluster, authority.issue("server"), tls_client_ca=clients.ca, metrics_port=0)
    known, stranger = clients.issue("known", "client"), strangers.issue("stranger", "client")

    async with httpx.AsyncClient(verify=context_of(authority.ca, known)) as client:
        assert (await client.get(f"{at.http}/readyz")).status_code == 200
    assert await knock(channel_to(at.grpc, authority.ca, known))
    for shown in (None, stranger):
        async with httpx.AsyncClient(verify=context_of(authority.ca, shown)) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"{at.http}/readyz")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await knock(channel_to(at.grpc, authority.ca, shown))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    async with httpx.AsyncClient() as probe:  # a kubelet has no certificate
        base = str(at.metrics).removesuffix("/metrics")
        assert (await probe.get(f"{base}/healthz")).text == "ok\n"
        assert (await probe.get(f"{base}/readyz")).status_code == 200
        cluster.router._http.begin_drain()
        assert ((answer := await probe.get(f"{base}/readyz")).status_code, answer.text) == (503, "draining\n")


async def test_a_new_certificate_serves_the_next_connection_and_cuts_no_stream(
    cluster: Cluster, authority: Authority
) -> None:
    server = authority.issue("server")
    at = await serve(cluster, server, decode_s=0.02)
    http_address = at.http.removeprefix("https://")
    old_end_s = certificates_ends_s(server.cert.read_bytes())[0]
    request = inference_pb2.GenerateRequest(text="Once", sampling={"max_tokens": 100})
    body = {"prompt": "Once", "max_tokens": 100, "stream": True}
    async with (
        httpx.AsyncClient(verify=context_of(authority.ca), timeout=60) as client,
        channel_to(at.grpc, authority.ca) as channel,
        client.stream("POST", f"{at.http}/v1/completions", json=body) as http_stream,
    ):
        lines = http_stream.aiter_lines()
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        grpc_stream = stub.Generate(request)
        await anext(lines)
        messages = aiter(grpc_stream)
        await anext(messages)

        authority.issue("server", ends_in=timedelta(days=200))
        for address, alpn in ((http_address, "http/1.1"), (at.grpc, "h2")):
            assert await shown_end_s(address, authority.ca, alpn) > old_end_s + 100 * 86400

        assert "data: [DONE]" in [line async for line in lines]
        assert len([message async for message in messages]) == 99


async def test_another_authority_of_clients_counts_from_the_next_connection(
    cluster: Cluster, authority: Authority, tmp_path: Path
) -> None:
    before, after = Authority(tmp_path, "before"), Authority(tmp_path, "after")
    trusted = tmp_path / "clients.pem"
    trusted.write_bytes(before.ca.read_bytes())
    at = await serve(cluster, authority.issue("server"), tls_client_ca=trusted)
    old, new = before.issue("old", "client"), after.issue("new", "client")

    async def is_let_in(pair: Pair) -> tuple[bool, bool]:
        async with httpx.AsyncClient(verify=context_of(authority.ca, pair)) as client:
            over_http = await _succeeds(lambda: client.get(f"{at.http}/healthz"), httpx.TransportError)
        shown = channel_to(at.grpc, authority.ca, pair)
        return over_http, await _succeeds(lambda: knock(shown), grpc.aio.AioRpcError)

    assert (await is_let_in(old), await is_let_in(new)) == ((True, True), (False, False))
    trusted.write_bytes(after.ca.read_bytes() + b"\n")
    assert (await is_let_in(old), await is_let_in(new)) == ((False, False), (True, True))


async def test_rubbish_in_the_place_of_a_certificate_changes_nothing(
    cluster: Cluster, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    server = authority.issue("server")
    at = await serve(cluster, server)
    server.cert.write_text("rubbish")
    for _ in range(3):
        assert await knock(channel_to(at.grpc, authority.ca))
        async with httpx.AsyncClient(verify=context_of(authority.ca)) as client:
            assert (await client.get(f"{at.http}/healthz")).status_code == 200
    assert caplog.text.count("the certificate in use stays") == 1


async def test_the_figures_tell_when_the_certificate_ends(cluster: Cluster, authority: Authority) -> None:
    server = authority.issue("server")
    at = await serve(cluster, server)

    async def told() -> float:
        async with httpx.AsyncClient(verify=context_of(authority.ca)) as client:
            text = (await client.get(f"{at.http}/metrics")).text
        name = r'warmfront_router_tls_certificate_expiry_timestamp_seconds\{certificate="server"\} (\S+)'
        found = re.search(name, text)
        assert found is not None
        return float(found[1])

    assert await told() == certificates_ends_s(server.cert.read_bytes())[0]
    renewed = authority.issue("server", ends_in=timedelta(days=77))
    assert await told() == certificates_ends_s(renewed.cert.read_bytes())[0]


def test_a_router_without_a_usable_certificate_ends_with_2_and_one_line(
    authority: Authority, capfd: pytest.CaptureFixture[str]
) -> None:
    server = authority.issue("server")
    server.key.unlink()
    files = {"tls_cert": server.cert, "tls_key": server.key}
    config = RouterConfig(redis_url="redis://127.0.0.1:1/0", http_port=0, grpc_port=0, **files)
    assert run_router(config) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"--tls-key {server.key} cannot be read: No such file or directory" in line


async def _succeeds(call: Callable[[], Awaitable[Any]], failure: type[Exception]) -> bool:
    try:
        await call()
    except failure:
        return False
    return True
