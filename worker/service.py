"""The Worker gRPC service: what routers may ask of this replica.

Every call but health carries the fleet's token. Errors become status codes in one table. A request's pieces arrive
from the engine once per step; whatever has gathered for one choice when its turn to be written comes goes out as one
message, so a slow reader costs messages and not tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections.abc import Callable, Iterable
from typing import NoReturn

import grpc
from warmfront_pb.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from cache.prefix_cache import Explanation
from common.grpc_text import sendable
from common.trace import trace_of
from worker.adapters import (
    AdapterConflictError,
    Adapters,
    AdaptersOffError,
    UnknownAdapterError,
)
from worker.detokenizer import TokenTable
from worker.engine import Engine, EngineStoppedError
from worker.engine_core import CacheInUseError
from worker.intake import InvalidRequestError, read_request, read_token_ids
from worker.metrics import WorkerMetrics
from worker.peft import AdapterError
from worker.replica import Replica
from worker.replies import explanation_of, lora_of, message_of, trailing_metadata, usage_of
from worker.request import Ending, Failure, Piece, Request
from worker.scheduler import QueueFullError
from worker.server import Context

logger = logging.getLogger(__name__)


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
        return worker_pb2.LoadWorkerLoraResponse(lora=lora_of(loaded), was_loaded=was_loaded)

    async def UnloadLora(  # noqa: N802
        self, message: worker_pb2.UnloadWorkerLoraRequest, context: Context
    ) -> worker_pb2.UnloadWorkerLoraResponse:
        """Refuse new requests of an adapter; see the .proto."""
        try:
            loaded, num_running = await self._open_adapters().unload(message.name)
        except _EXPECTED as error:
            await _abort(context, error)
        logger.info("lora=%s version=%s unloaded", message.name, loaded.adapter.version[:12])
        return worker_pb2.UnloadWorkerLoraResponse(lora=lora_of(loaded), running=num_running)

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
        return explanation_of(found, time.monotonic())

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
        lease.loras.extend(map(lora_of, self._adapters.listed))
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
                messages = [message_of(piece, self._table) for piece in mailbox.take()]
                if mailbox.ending is not None and mailbox.ending.failure is None:
                    messages[-1].usage.CopyFrom(usage_of(request, mailbox.ending))
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
