"""The gRPC server around a worker's service: its port, TLS, who is let in, and the standard health service."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from warmfront_pb.v1 import worker_pb2_grpc

from common.grpc_port import listen
from common.limits import MAX_MESSAGE_BYTES
from common.tls import Certificates
from common.trace import MAX_METADATA_BYTES

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two workers on one port would answer each other's requests
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class TokenGuard(grpc.aio.ServerInterceptor):
    """Lets in who knows one of the fleet's tokens, and anybody who asks for health."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._known = [f"Bearer {token}".encode() for token in tokens]

        async def refuse(request: Any, context: Context) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "authorization is missing or wrong: send Bearer and the worker token"
            )

        self._refuse: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Pass on or refuse one call."""
        if handler_call_details.method.startswith("/grpc.health.v1.Health/"):
            return await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata).get("authorization", "")
        shown = given.encode() if isinstance(given, str) else given
        if not sum(hmac.compare_digest(shown, known) for known in self._known):  # none cuts it short
            return self._refuse
        return await continuation(handler_call_details)


class WorkerServer:
    """The listening server with the service and its health."""

    def __init__(self, service: worker_pb2_grpc.WorkerServicer, tokens: Sequence[str]) -> None:
        self._server = grpc.aio.server(interceptors=[TokenGuard(tokens)] if tokens else [], options=SERVER_OPTIONS)
        self._health = health_aio.HealthServicer()
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, host: str, port: int, certificates: Certificates | None = None) -> int:
        """Listen, with TLS where there are certificates; the port. Raises ``OSError`` when that is not possible."""
        await self.set_serving(False)
        bound = listen(self._server, host, port, certificates)
        await self._server.start()
        return bound

    async def set_serving(self, serving: bool) -> None:
        """What the standard health service answers, for the server and for the Worker service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", "warmfront.v1.Worker"):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s`` seconds, then cut them."""
        await self._server.stop(grace_s)
