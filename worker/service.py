"""The Worker gRPC service: what routers may ask of this replica.

Every call but health carries the fleet's token. Errors become status codes in one table. A request's pieces arrive
from the engine once per step; whatever has gathered for one choice when its turn to be written comes goes out as one
message, so a slow reader costs messages and not tokens.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import socket
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from warmfront_pb.v1 import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc

from cache.prefix_cache import Explanation
from common.grpc_text import sendable
from common.tls import Certificates, grpc_server_credentials
from common.trace import MAX_METADATA_BYTES, trace_of
from worker.adapters import (
    AdapterConflictError,
    Adapters,
    AdaptersOffError,
    LoadedAdapter,
    UnknownAdapterError,
)
from worker.batch import TokenLogprobs
from worker.detokenizer import TokenTable
from worker.engine import Engine, EngineStoppedError
from worker.engine_core import CacheInUseError
from worker.intake import InvalidRequestError, read_request, read_token_ids
from worker.metrics import WorkerMetrics
from worker.peft import AdapterError
from worker.replica import Replica
from worker.request import Ending, Failure, Piece, Request
from worker.scheduler import QueueFullError

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20  # 16 M token ids; a large tokenizer.json on the way out
MAX_OUTPUT_KEYS = 512  # trailing metadata must stay under gRPC's 8 KiB

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


class NotReadyError(Exception):
    """This replica takes no such request in its state. Another one may."""


class WrongGenerationError(Exception):
    """The caller means another boot of this replica."""


class RequestFailedError(Exception):
    """The engine ended a request without its whole answer."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(f"{failure.value}: {detail}" if detail else failure.value)
        self.failure = failure


_STATUS: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    AdapterError: grpc.StatusCode.INVALID_ARGUMENT,
    AdaptersOffError: grpc.StatusCode.UNIMPLEMENTED,
    AdapterConflictError: grpc.StatusCode.FAILED_PRECONDITION,
    UnknownAdapterError: grpc.StatusCode.NOT_FOUND,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotReadyError: grpc.StatusCode.UNAVAILABLE,
    EngineStoppedError: grpc.StatusCode.UNAVAILABLE,
    WrongGenerationError: grpc.StatusCode.FAILED_PRECONDITION,
    CacheInUseError: grpc.StatusCode.FAILED_PRECONDITION,
}
_FAILURE_STATUS = {
    Failure.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Failure.POISONED: grpc.StatusCode.INTERNAL,
    Failure.STOPPED: grpc.StatusCode.UNAVAILABLE,
}


def status_of(error: Exception) -> grpc.StatusCode:
    """The status code of an error that a handler may raise."""
    return _FAILURE_STATUS[error.failure] if isinstance(error, RequestFailedError) else _STATUS[type(error)]


Context = grpc.aio.ServicerContext[Any, Any]
_EXPECTED: tuple[type[Exception], ...] = (*_STATUS, RequestFailedError)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Answers for one replica. ``open`` gives it the engine once the model is loaded."""

    def __init__(self, replica: Replica, drain: Callable[[float | None], None]) -> None:
        self._replica = replica
        self._drain = drain
        self._engine: Engine | None = None
        self._table: TokenTable | None = None
        self._metrics: WorkerMetrics | None = None
        self._adapters: Adapters | None = None
        self.num_requests = 0  # being answered
        self._mailboxes: set[Mailbox] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, engine: Engine, table: TokenTable, metrics: WorkerMetrics, adapters: Adapters) -> None:
        """From here on requests reach the engine, as far as the replica's state allows."""
        self._engine, self._table, self._metrics, self._adapters = engine, table, metrics, adapters

    async def Generate(self, message: worker_pb2.WorkerGenerateRequest, context: Context) -> None:  # noqa: N802
        """Stream an answer; see the .proto."""
        self.num_requests += 1
        self._idle.clear()
        try:
            engine, request = self._accept(message, context)
            await self._answer(engine, request, context)
        except _EXPECTED as error:
            status = status_of(error)
            if status is grpc.StatusCode.INTERNAL:
                trace = trace_of(context.invocation_metadata() or ())
                logger.error("request=%s failed: %s%s", message.request_id, error, trace.suffix)
            await _abort(context, error)
        finally:
            self.num_requests -= 1
            if not self.num_requests:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Until no request is being answered."""
        await self._idle.wait()

    async def GetModel(  # noqa: N802
        self, message: worker_pb2.GetModelRequest, context: Context
    ) -> worker_pb2.GetModelResponse:
        """Tokenizer, template and limits; see the .proto."""
        if self._replica.card is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still loading")
        return self._replica.model_response()

    async def GetReplica(  # noqa: N802
        self, message: worker_pb2.GetReplicaRequest, context: Context
    ) -> worker_pb2.GetReplicaResponse:
        """The lease as it would be written now."""
        return worker_pb2.GetReplicaResponse(lease=self.lease())

    async def Drain(  # noqa: N802
        self, message: worker_pb2.DrainWorkerRequest, context: Context
    ) -> worker_pb2.DrainWorkerResponse:
        """Stop taking requests; see the .proto."""
        self._drain(message.deadline_ms / 1000 if message.deadline_ms else None)
        return worker_pb2.DrainWorkerResponse(running=self.num_requests)

    async def ResetCache(  # noqa: N802
        self, message: worker_pb2.ResetWorkerCacheRequest, context: Context
    ) -> worker_pb2.ResetWorkerCacheResponse:
        """Forget every cached block; see the .proto."""
        try:
            if self._engine is None:
                raise NotReadyError(self._not_ready())
            blocks = await asyncio.wrap_future(self._engine.reset_cache())
        except _EXPECTED as error:
            await _abort(context, error)
        return worker_pb2.ResetWorkerCacheResponse(blocks=blocks)

    async def LoadLora(  # noqa: N802
        self, message: worker_pb2.LoadWorkerLoraRequest, context: Context
    ) -> worker_pb2.LoadWorkerLoraResponse:
        """Read an adapter and serve it; see the .proto."""
        try:
            loaded, was_loaded = await self._open_adapters().load(message.name, message.path)
        except _EXPECTED as error:
            await _abort(context, error)
        logger.info("lora=%s version=%s loaded from path=%r", message.name, loaded.adapter.version[:12], message.path)
        return worker_pb2.LoadWorkerLoraResponse(lora=_lora(loaded), was_loaded=was_loaded)

    async def UnloadLora(  # noqa: N802
        self, message: worker_pb2.UnloadWorkerLoraRequest, context: Context
    ) -> worker_pb2.UnloadWorkerLoraResponse:
        """Refuse new requests of an adapter; see the .proto."""
        try:
            loaded, num_running = await self._open_adapters().unload(message.name)
        except _EXPECTED as error:
            await _abort(context, error)
        logger.info("lora=%s version=%s unloaded", message.name, loaded.adapter.version[:12])
        return worker_pb2.UnloadWorkerLoraResponse(lora=_lora(loaded), running=num_running)

    def _open_adapters(self) -> Adapters:
        if self._adapters is None or self._replica.state not in (common_pb2.WARMING, common_pb2.READY):
            raise NotReadyError(self._not_ready())
        return self._adapters

    async def ExplainCache(  # noqa: N802
        self, message: worker_pb2.ExplainCacheRequest, context: Context
    ) -> common_pb2.CacheExplanation:
        """Why the cache has what it has of a prompt; see the .proto."""
        try:
            if self._engine is None or self._adapters is None or self._replica.card is None:
                raise NotReadyError(self._not_ready())
            if message.WhichOneof("of") == "missing_key":
                eviction = await asyncio.wrap_future(self._engine.eviction_of(message.missing_key))
                found = Explanation("never_seen" if eviction is None else "evicted", 0, 0, eviction)
            else:
                adapter = self._adapters.find(message.lora, message.lora_version) if message.lora else None
                token_ids = read_token_ids(message.token_ids, self._replica.card)
                salt = message.cache_salt or None
                found = await asyncio.wrap_future(self._engine.explain_cache(token_ids, adapter, salt))
        except _EXPECTED as error:
            await _abort(context, error)
        return _explanation(found, time.monotonic())

    def cut(self, detail: str) -> None:
        """End every request that is being answered: the engine will not."""
        for mailbox in self._mailboxes:
            mailbox.put(
                Ending(
                    num_cached_tokens=None,
                    num_output_tokens=0,
                    last_event_seq=0,
                    output_keys=array("Q"),
                    failure=Failure.STOPPED,
                    detail=detail,
                )
            )

    def lease(self, heartbeat: int = 0) -> common_pb2.ReplicaLease:
        """The replica's lease with the latest load."""
        if self._engine is None or self._metrics is None or self._adapters is None:
            return self._replica.lease(heartbeat=heartbeat)
        hit_rates = self._metrics.hit_rates(time.monotonic())
        lease = self._replica.lease(self._engine.snapshot(), hit_rates, heartbeat)
        lease.load.hung_s = self._engine.hung_s()
        lease.loras.extend(map(_lora, self._adapters.listed))
        return lease

    def _accept(self, message: worker_pb2.WorkerGenerateRequest, context: Context) -> tuple[Engine, Request]:
        replica = self._replica
        if message.generation and message.generation != replica.generation:
            raise WrongGenerationError(
                f"this is {replica.config.replica_id} of generation {replica.generation}, not {message.generation}"
            )
        takes = replica.state == common_pb2.READY or (replica.state == common_pb2.WARMING and message.synthetic)
        if not takes or self._engine is None or self._adapters is None or replica.card is None:
            raise NotReadyError(self._not_ready())
        adapter = self._adapters.find(message.lora, message.lora_version) if message.lora else None
        remaining_s = context.time_remaining()
        deadline_s = math.inf if remaining_s is None else time.monotonic() + remaining_s
        request = read_request(message, replica.card, deadline_s, adapter)
        if request.num_choices > replica.config.max_queue:  # nowhere would it ever find room
            raise InvalidRequestError(f"n is {request.num_choices}: at most {replica.config.max_queue} wait here")
        return self._engine, request

    def _not_ready(self) -> str:
        reason = f": {self._replica.fault}" if self._replica.fault else ""
        return f"replica {self._replica.config.replica_id} is {self._replica.state_name}{reason}"

    async def _answer(self, engine: Engine, request: Request, context: Context) -> None:
        assert self._table is not None
        mailbox = Mailbox()
        number = engine.submit(request, mailbox.put)
        self._mailboxes.add(mailbox)
        try:
            while (ending := mailbox.ending) is None or mailbox.pieces:
                if not mailbox.pieces:
                    await mailbox.wait()
                    continue
                messages = [_message(piece, self._table) for piece in mailbox.take()]
                if mailbox.ending is not None and mailbox.ending.failure is None:
                    messages[-1].usage.CopyFrom(_usage(request, mailbox.ending))
                for message in messages:
                    await context.write(message)
        finally:
            self._mailboxes.remove(mailbox)
            engine.cancel(number)
        context.set_trailing_metadata(trailing_metadata(ending))
        if ending.failure is not None:
            raise RequestFailedError(ending.failure, ending.detail)


async def _abort(context: Context, error: Exception) -> NoReturn:
    await context.abort(status_of(error), sendable(str(error)))


class Mailbox:
    """What the engine has said about one request and nobody has written yet, merged by choice."""

    def __init__(self) -> None:
        self.pieces: dict[int, Piece] = {}
        self.ending: Ending | None = None
        self._news = asyncio.Event()

    def put(self, item: Piece | Ending) -> None:
        """The engine's sink."""
        if isinstance(item, Ending):
            self.ending = item
        elif (waiting := self.pieces.get(item.index)) is None:
            self.pieces[item.index] = item
        else:
            waiting.token_ids += item.token_ids
            waiting.text += item.text
            waiting.logprobs += item.logprobs
            waiting.finish_reason = item.finish_reason
            waiting.stop_reason = item.stop_reason
        self._news.set()

    def take(self) -> Iterable[Piece]:
        """All pieces, in the order of their first tokens."""
        pieces, self.pieces = self.pieces, {}
        self._news.clear()
        return pieces.values()

    async def wait(self) -> None:
        """Until something is put."""
        await self._news.wait()
        self._news.clear()


def trailing_metadata(ending: Ending) -> tuple[tuple[str, str | bytes], ...]:
    """What a router learns when a request that got blocks ends; nothing for one that never did."""
    if ending.num_cached_tokens is None:
        return ()
    entries: list[tuple[str, str | bytes]] = [
        ("wf-cached-tokens", str(ending.num_cached_tokens)),
        ("wf-event-seq", str(ending.last_event_seq)),
    ]
    if ending.output_keys:
        keys = ending.output_keys[:MAX_OUTPUT_KEYS]
        entries.append(("wf-output-keys-bin", b"".join(key.to_bytes(8, "little") for key in keys)))
    return tuple(entries)


def _usage(request: Request, ending: Ending) -> inference_pb2.Usage:
    prompt_tokens = len(request.token_ids) - request.num_prior_output_tokens
    return inference_pb2.Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=ending.num_output_tokens,
        cached_tokens=min(ending.num_cached_tokens or 0, prompt_tokens),
    )


def _explanation(found: Explanation, now: float) -> common_pb2.CacheExplanation:
    explanation = common_pb2.CacheExplanation(
        reason=found.reason, cached_tokens=found.num_matched_tokens, coming_tokens=found.num_pending_tokens
    )
    if (eviction := found.eviction) is not None:
        explanation.evicted_ago_s = max(0.0, now - eviction.time_s)
        explanation.idle_s = eviction.idle_s
        explanation.removal_reason = eviction.reason.name.lower()
        explanation.evicted_for = str(eviction.culprit).rsplit("#", 1)[0]  # a choice's id
    return explanation


def _message(piece: Piece, table: TokenTable) -> inference_pb2.GenerateResponse:
    message = inference_pb2.GenerateResponse(
        index=piece.index,
        token_ids=b"".join([token_id.to_bytes(4, "little") for token_id in piece.token_ids]),
        text=piece.text,
        finish_reason=piece.finish_reason,
        stop_reason=piece.stop_reason,
    )
    if piece.logprobs:
        message.logprobs.extend(_logprobs(one, table) for one in piece.logprobs)
    if piece.prompt_logprobs:
        message.prompt_logprobs.extend(_logprobs(one, table) for one in piece.prompt_logprobs)
    return message


def _lora(loaded: LoadedAdapter) -> common_pb2.LoadedLora:
    return common_pb2.LoadedLora(name=loaded.adapter.name, version=loaded.adapter.version, rank=loaded.rank)


def _logprobs(one: TokenLogprobs, table: TokenTable) -> inference_pb2.Logprobs:
    return inference_pb2.Logprobs(
        token_id=one.token_id,
        logprob=one.logprob,
        text=table.text_of(one.token_id),
        utf8=table.bytes_of(one.token_id),
        top=[
            inference_pb2.TopLogprob(
                token_id=token_id, logprob=logprob, text=table.text_of(token_id), utf8=table.bytes_of(token_id)
            )
            for token_id, logprob in one.top
        ],
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

    def __init__(self, service: WorkerService, tokens: Sequence[str]) -> None:
        self._server = grpc.aio.server(interceptors=[TokenGuard(tokens)] if tokens else [], options=SERVER_OPTIONS)
        self._health = health_aio.HealthServicer()
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, host: str, port: int, certificates: Certificates | None = None) -> int:
        """Listen, with TLS where there are certificates; the port. Raises ``OSError`` when that is not possible."""
        await self.set_serving(False)
        try:
            if port:  # gRPC writes a page of its own about a taken port
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                with socket.create_server((host, port), family=family):
                    pass
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if certificates is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, grpc_server_credentials(certificates))
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise OSError(f"cannot listen on {host}:{port}: {reason}") from error
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
