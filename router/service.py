"""The gRPC front: Inference and Admin, with the standard health and reflection services.

An answer's messages pass through as the bytes that the replica sent; a router neither parses nor copies them.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from warmfront_pb.v1 import admin_pb2, inference_pb2

from common.grpc_port import listen
from common.limits import MAX_MESSAGE_BYTES
from common.tls import Certificates
from common.trace import MAX_METADATA_BYTES, trace_of
from router.admin import Admin
from router.config import RouterConfig
from router.dispatch import Dispatcher, Route
from router.errors import BodyTooSlowError, InvalidRequestError, RouterError, StalledError
from router.explain import as_metadata, explain
from router.explain_cache import explain_past
from router.fleet import Fleet
from router.lora_admin import LoraAdmin
from router.metrics import RouterMetrics

log = logging.getLogger(__name__)

INFERENCE_SERVICE = "warmfront.v1.Inference"
ADMIN_SERVICE = "warmfront.v1.Admin"
EXPLAIN_HEADER = "x-warmfront-explain"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_CUT_OFF_S = 1.0  # for a client that was cut off to hear of it

_T = TypeVar("_T")
Context = grpc.aio.ServicerContext[Any, Any]


def request_id_of(given: str | None) -> str:
    """The client's own id where it has a usable one, else a new one."""
    return given if given and _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


def hint_of(headers: Mapping[str, str]) -> str:
    """What the client says its requests have in common, over HTTP or gRPC: a session, or else a routing key."""
    return headers.get("x-warmfront-session", "") or headers.get("x-warmfront-routing-key", "")


class GrpcFront:
    """The public gRPC server."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        dispatcher: Dispatcher,
        admin: Admin,
        metrics: RouterMetrics,
        certificates: Certificates | None,
    ) -> None:
        self._config = config
        self._certificates = certificates
        self._metrics = metrics
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._admin = admin
        self._lora = LoraAdmin(fleet)
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", config.max_body_bytes),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.so_reuseport", int(config.reuse_port)),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.server_handshake_timeout_ms", int(config.handshake_timeout_s * 1000)),
            )
        )
        inference = {
            # The wire of unary_stream; the message is read by hand, so that its arrival has a limit.
            "Generate": grpc.stream_stream_rpc_method_handler(self._generate),
            "ListModels": _unary(self._list_models, inference_pb2.ListModelsRequest),
        }
        operators = {
            "ListReplicas": _unary(self._list_replicas, admin_pb2.ListReplicasRequest),
            "DrainReplica": _unary(self._drain_replica, admin_pb2.DrainReplicaRequest),
            "Explain": _unary(self._explain, admin_pb2.ExplainRequest),
            "ResetCache": _unary(self._reset_cache, admin_pb2.ResetCacheRequest),
            "LoadLora": _unary(self._load_lora, admin_pb2.LoadLoraRequest),
            "UnloadLora": _unary(self._unload_lora, admin_pb2.UnloadLoraRequest),
            "ListLoras": _unary(self._list_loras, admin_pb2.ListLorasRequest),
        }
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(INFERENCE_SERVICE, inference),
                grpc.method_handlers_generic_handler(ADMIN_SERVICE, operators),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (INFERENCE_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Listen; the port. Raises ``OSError`` when the port cannot be had."""
        config = self._config
        port = listen(self._server, config.listen, config.grpc_port, self._certificates, is_shared=config.reuse_port)
        await self.set_ready(False)
        await self._server.start()
        return port

    async def set_ready(self, is_ready: bool) -> None:
        """What the health service answers."""
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", INFERENCE_SERVICE):
            await self._health.set(name, serving if is_ready else not_serving)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, let the running ones end within ``grace_s``."""
        await self._server.stop(grace_s)

    async def _generate(self, _messages: object, context: Context) -> None:
        metadata = _text_metadata(context)
        request_id = request_id_of(metadata.get("x-request-id"))
        route = Route(trace=trace_of(context.invocation_metadata() or ()))
        work, status = None, "CANCELLED"
        stall_timeout_s = self._config.stall_timeout_s
        patience = _Patience()
        try:
            work = await self._dispatcher.prepare(
                _parsed(await self._read(context, patience)),
                request_id=request_id,
                timeout_s=context.time_remaining(),
                session=hint_of(metadata),
                tenant=metadata.get("x-warmfront-tenant", "") if self._config.trust_tenant_header else "",
            )
            async with aclosing(self._dispatcher.generate(work, route)) as messages:
                async for message in messages:
                    patience.begin(stall_timeout_s)
                    await context.write(message)
                    patience.end()
            trailing = route.headers(request_id, self._config.policy)
            if metadata.get(EXPLAIN_HEADER) == "1" and route.record is not None:
                trailing.append((EXPLAIN_HEADER, as_metadata(explain(route.record))))
            context.set_trailing_metadata(trailing)
            status = "OK"
        except RouterError as error:
            status = error.status
            await _abort(context, error, route.headers(request_id, self._config.policy))
        except asyncio.CancelledError:
            if not patience.forgive():
                raise
            status = "ABORTED"
            self._stalled(request_id)
            await self._cut_off(context)
        except Exception:
            status = "INTERNAL"
            log.exception("a request failed inside the router request=%s%s", request_id, route.trace.suffix)
            await _abort(context, RouterError("the router failed; its log has the reason"))
        finally:
            patience.stop()
            self._dispatcher.count(status)
            self._dispatcher.ended(request_id, status, work, route)

    async def _read(self, context: Context, patience: "_Patience") -> bytes:
        """The call's message. Raises ``RouterError`` where it does not come, or not in time."""
        timeout_s = self._config.body_timeout_s
        patience.begin(timeout_s)
        try:
            data: Any = await context.read()
        except asyncio.CancelledError:
            if not patience.forgive():
                raise
            raise BodyTooSlowError(f"the message was not whole within {timeout_s:g} s: send it faster") from None
        patience.end()
        if data is grpc.aio.EOF:
            raise InvalidRequestError("the call has no message: send one warmfront.v1.GenerateRequest")
        message: bytes = data
        return message

    def _stalled(self, request_id: str) -> None:
        self._metrics.stalled.inc()
        limit_s = self._config.stall_timeout_s
        log.warning("a client took nothing of its answer request=%s after_s=%g", request_id, limit_s)

    async def _cut_off(self, context: Context) -> None:
        """Say so to a client that may never hear it: the status waits behind the messages that it does not take."""
        try:
            async with asyncio.timeout(_CUT_OFF_S):
                await _abort(context, StalledError("nothing of the answer was taken for --stall-timeout: read faster"))
        except (TimeoutError, grpc.aio.InternalError):
            pass  # it reads no more, or has gone meanwhile

    async def _list_models(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        try:
            model = self._fleet.profile
        except RouterError as error:
            await _abort(context, error)
            raise
        models = [inference_pb2.Model(name=model.name, max_model_len=model.max_model_len)]
        models += [
            inference_pb2.Model(name=name, max_model_len=model.max_model_len, lora_base=model.name)
            for name in self._fleet.adapters.names
        ]
        return inference_pb2.ListModelsResponse(models=models)

    async def _list_replicas(
        self, request: admin_pb2.ListReplicasRequest, context: Context
    ) -> admin_pb2.ListReplicasResponse:
        return self._admin.replicas()

    async def _drain_replica(
        self, request: admin_pb2.DrainReplicaRequest, context: Context
    ) -> admin_pb2.DrainReplicaResponse:
        running = await _or_abort(context, self._admin.drain(request.replica, request.deadline_ms))
        return admin_pb2.DrainReplicaResponse(running=running)

    async def _explain(self, request: admin_pb2.ExplainRequest, context: Context) -> admin_pb2.ExplainResponse:
        recent = self._dispatcher.recent
        try:
            match request.WhichOneof("of"):
                case "request":
                    session = hint_of(_text_metadata(context))
                    records = [await self._dispatcher.explain(request.request, session)]
                case "request_id":
                    records = [await explain_past(self._fleet, recent, request.request_id)]
                case "last":
                    records = recent.last(request.last)
                case _:
                    raise InvalidRequestError("give a request, a request_id or last")
        except RouterError as error:
            await _abort(context, error)
            raise
        return admin_pb2.ExplainResponse(explanations=map(explain, records))

    async def _reset_cache(
        self, request: admin_pb2.ResetCacheRequest, context: Context
    ) -> admin_pb2.ResetCacheResponse:
        return await _or_abort(context, self._admin.reset_cache())

    async def _load_lora(self, request: admin_pb2.LoadLoraRequest, context: Context) -> admin_pb2.LoraResponse:
        return await _or_abort(context, self._lora.load(request.name, request.path, request.replica))

    async def _unload_lora(self, request: admin_pb2.UnloadLoraRequest, context: Context) -> admin_pb2.LoraResponse:
        return await _or_abort(context, self._lora.unload(request.name, request.replica))

    async def _list_loras(self, request: admin_pb2.ListLorasRequest, context: Context) -> admin_pb2.ListLorasResponse:
        return await _or_abort(context, self._lora.listed())


def _unary(
    answer: Callable[[Any, Context], Awaitable[Message]], request: type[Message]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """One message in, one out: ``answer`` returns the one that the .proto names."""
    return grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=request.FromString, response_serializer=lambda message: message.SerializeToString()
    )


async def _or_abort(context: Context, answer: Awaitable[_T]) -> _T:
    try:
        return await answer
    except RouterError as error:
        await _abort(context, error)
        raise


class _Patience:
    """Cancels the task that made it when one read or write takes longer than its limit. One timer for all of them."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._until_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def begin(self, limit_s: float) -> None:
        self._until_s = until_s = self._loop.time() + limit_s
        if self._timer is None or until_s < self._timer.when():
            self.stop()
            self._timer = self._loop.call_at(until_s, self._check)

    def end(self) -> None:
        self._until_s = None

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def forgive(self) -> bool:
        """Whether it was this that has cancelled the task, which may go on then."""
        if self._is_over and self._task is not None:
            self._task.uncancel()
        return self._is_over

    def _check(self) -> None:
        self._timer = None
        if self._until_s is None:
            return
        if self._loop.time() < self._until_s:
            self._timer = self._loop.call_at(self._until_s, self._check)
        elif self._task is not None:
            self._is_over = True
            self._task.cancel()


def _parsed(data: bytes) -> inference_pb2.GenerateRequest:
    try:
        return inference_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        raise InvalidRequestError("the message is no warmfront.v1.GenerateRequest") from None


def _text_metadata(context: Context) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


async def _abort(context: Context, error: RouterError, metadata: Sequence[tuple[str, str]] = ()) -> None:
    trailing = list(metadata)
    if error.retry_after_s is not None:
        trailing.append(("retry-after", f"{error.retry_after_s:g}"))
    await context.abort(grpc.StatusCode[error.status], error.message, tuple(trailing))
