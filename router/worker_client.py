"""The router's side of the Worker service: one channel per replica generation, messages passed on as bytes."""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from warmfront_pb.v1 import common_pb2, worker_pb2

from common.limits import MAX_MESSAGE_BYTES
from common.tls import Certificates, Identity, TlsFiles, grpc_channel_credentials
from router.errors import NoReplicaReadyError, RouterError, error_of_status

_SERVICE = "/warmfront.v1.Worker"
_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.enable_retries", 0),  # what is sent again, and where to, is decided by dispatch
    ("grpc.use_local_subchannel_pool", 1),  # a new generation behind an old address starts afresh
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
_OLD_CHANNEL_S = 3600.0  # for the calls that run when certificates or address change; longer than any request
_Reply = TypeVar("_Reply", bound=Message)

# The answers of a worker that say nothing against it: another replica would answer the same.
CLIENT_STATUSES = frozenset({"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "OUT_OF_RANGE", "DEADLINE_EXCEEDED"})

REFUSES_ROUTER = "refuses this router's token: do both read the same --worker-token-file?"

# What gRPC says of a handshake that failed, and what may be set differently.
_TLS_HINTS = (
    ("CERTIFICATE_VERIFY_FAILED", "its certificate does not come from --worker-ca"),
    ("Hostname Verification", "its certificate carries another name: is it --worker-server-name?"),
    ("WRONG_VERSION_NUMBER", "it speaks no TLS, and --worker-ca wants that"),
    ("Socket closed", "it closes connections: does it want TLS (--worker-ca), or --worker-client-cert?"),
)


class WorkerError(Exception):
    """A call to a replica ended with a status."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    @property
    def is_broken(self) -> bool:
        """Whether the replica cannot be used: its breaker opens at once."""
        return self.status in ("UNAVAILABLE", "UNAUTHENTICATED")

    @property
    def is_error(self) -> bool:
        """Whether the replica itself failed, or this request made it fail: its breaker opens after several."""
        return self.status in ("INTERNAL", "UNKNOWN", "DATA_LOSS")

    @property
    def is_refusal(self) -> bool:
        """Whether the worker does not know this router's token."""
        return self.status in ("UNAUTHENTICATED", "PERMISSION_DENIED")

    @property
    def reason(self) -> str:
        """The status, and what it may come from where a handshake failed. Has no addresses in it."""
        hint = next((hint for sign, hint in _TLS_HINTS if sign in self.message), "")
        return f"{self.status}: {hint}" if self.status == "UNAVAILABLE" and hint else self.status

    def as_router_error(self, who: str) -> RouterError:
        """What the client is told when nothing more can be tried; ``who`` failed.

        What the transport says has addresses in it: that is for the log.
        """
        if self.is_refusal:
            return RouterError(f"{who} {REFUSES_ROUTER}")
        if self.status in ("UNAVAILABLE", "UNKNOWN", "DATA_LOSS", "CANCELLED", "ABORTED", "FAILED_PRECONDITION"):
            return NoReplicaReadyError(f"{who} failed: retry soon", retry_after_s=1)
        return error_of_status(self.status, self.message)


class HungError(WorkerError):
    """The replica's engine stands still, by its own word: the call was given up for another replica."""

    def __init__(self, detail: str) -> None:
        super().__init__("UNAVAILABLE", detail)

    @property
    def is_broken(self) -> bool:
        """Its lease tells when it goes on: nobody has to try."""
        return False


class WorkerStream:
    """One Generate call: read messages until None, then the trailing metadata says how it went."""

    __slots__ = ("_call", "_client", "_given_up")

    def __init__(self, call: "grpc.aio.UnaryStreamCall[bytes, bytes]", client: "WorkerClient") -> None:
        self._call = call
        self._client = client
        self._given_up: WorkerError | None = None

    async def read(self) -> bytes | None:
        """The next message, None after the last. Raises ``WorkerError``."""
        try:
            message: Any = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _worker_error(error) from None
        except asyncio.CancelledError:
            failure = self._given_up or self._client.failure
            if failure is None or _is_cancelled():
                raise
            raise failure from None
        if message is grpc.aio.EOF:
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                raise WorkerError(code.name, await self._call.details() or "")
            return None
        result: bytes = message
        return result

    async def trailing_metadata(self) -> dict[str, str | bytes]:
        """After the last message."""
        return {str(key): value for key, value in await self._call.trailing_metadata() or ()}

    def give_up(self, failure: WorkerError) -> None:
        """End it now; whoever reads gets ``failure``."""
        self._given_up = failure
        self._call.cancel()

    def cancel(self) -> None:
        """End it now, at the worker too. Harmless when it has ended."""
        self._call.cancel()


class WorkerTls:
    """Whom this router believes and what it shows when it calls workers. The newest files serve the next channel."""

    def __init__(self, files: TlsFiles, server_name: str | None) -> None:
        self.certificates = Certificates(files)
        self._options = (("grpc.ssl_target_name_override", server_name),) if server_name is not None else ()

    def channel(self, address: str, identity: Identity) -> grpc.aio.Channel:
        """A channel that checks the worker's certificate against its address, or against the name that all have."""
        credentials = grpc_channel_credentials(identity)
        return grpc.aio.secure_channel(address, credentials, options=(*_OPTIONS, *self._options))


class WorkerClient:
    """Calls to one replica generation."""

    def __init__(self, address: str, token: str, tls: WorkerTls | None = None) -> None:
        self.address = address
        self.is_closed = False
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._tls = tls
        self._identity = tls.certificates.current() if tls is not None else None
        self._old: dict[asyncio.Task[None], grpc.aio.Channel] = {}  # given up, but for the calls that still run there
        self._open()

    @property
    def failure(self) -> WorkerError | None:
        """How calls end once the client is closed."""
        return WorkerError("UNAVAILABLE", "the replica left the fleet") if self.is_closed else None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now; there is none either before the first call, or after long silence."""
        return bool(self._channel.get_state() is grpc.ChannelConnectivity.READY)

    def renew(self, identity: Identity) -> None:
        """Use these certificates, if they are new, from the next call on; calls that run end on the old channel."""
        if identity is not self._identity:
            self._identity = identity
            self._reopen()

    def move(self, address: str) -> None:
        """The replica has another address from the next call on; calls that run end at the old one."""
        if address != self.address:
            self.address = address
            self._reopen()

    def generate(
        self, request: bytes, timeout_s: float | None, metadata: Sequence[tuple[str, str]] = ()
    ) -> WorkerStream:
        """Start a Generate call with a serialised WorkerGenerateRequest. Raises ``WorkerError`` once it is closed."""
        if (failure := self.failure) is not None:
            raise failure
        return WorkerStream(self._generate(request, timeout=timeout_s, metadata=(*self._metadata, *metadata)), self)

    async def get_model(self, timeout_s: float) -> worker_pb2.GetModelResponse:
        """The model's tokenizer, template and limits. Raises ``WorkerError``."""
        return await self._ask("GetModel", worker_pb2.GetModelRequest(), worker_pb2.GetModelResponse, timeout_s)

    async def drain(self, deadline_ms: int, timeout_s: float) -> int:
        """Tell the replica to drain; how many requests it is still answering. Raises ``WorkerError``."""
        request = worker_pb2.DrainWorkerRequest(deadline_ms=deadline_ms)
        return (await self._ask("Drain", request, worker_pb2.DrainWorkerResponse, timeout_s)).running

    async def reset_cache(self, timeout_s: float) -> int:
        """Let the replica forget its cached blocks; how many. Raises ``WorkerError``: FAILED_PRECONDITION when busy."""
        request = worker_pb2.ResetWorkerCacheRequest()
        return (await self._ask("ResetCache", request, worker_pb2.ResetWorkerCacheResponse, timeout_s)).blocks

    async def explain_cache(
        self, request: worker_pb2.ExplainCacheRequest, timeout_s: float
    ) -> common_pb2.CacheExplanation:
        """Why the replica's cache has what it has of a prompt. Raises ``WorkerError``."""
        return await self._ask("ExplainCache", request, common_pb2.CacheExplanation, timeout_s)

    async def load_lora(self, name: str, path: str, timeout_s: float) -> worker_pb2.LoadWorkerLoraResponse:
        """Let the replica load an adapter from its disk. Raises ``WorkerError``."""
        request = worker_pb2.LoadWorkerLoraRequest(name=name, path=path)
        return await self._ask("LoadLora", request, worker_pb2.LoadWorkerLoraResponse, timeout_s)

    async def unload_lora(self, name: str, timeout_s: float) -> worker_pb2.UnloadWorkerLoraResponse:
        """Let the replica give an adapter up. Raises ``WorkerError``: NOT_FOUND where it has none of that name."""
        request = worker_pb2.UnloadWorkerLoraRequest(name=name)
        return await self._ask("UnloadLora", request, worker_pb2.UnloadWorkerLoraResponse, timeout_s)

    async def close(self) -> None:
        """Close every channel; calls that are still running, and later ones, fail as UNAVAILABLE."""
        self.is_closed = True
        for channel in (*self._old.values(), self._channel):
            await channel.close()

    async def _ask(self, name: str, request: Message, reply: type[_Reply], timeout_s: float) -> _Reply:
        if (failure := self.failure) is not None:
            raise failure
        call: Any = self._channel.unary_unary(
            f"{_SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        try:
            answer: _Reply = await call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _worker_error(error) from None
        except asyncio.CancelledError:
            if (failure := self.failure) is None or _is_cancelled():
                raise
            raise failure from None
        return answer

    def _reopen(self) -> None:
        closing = asyncio.create_task(self._channel.close(_OLD_CHANNEL_S))
        self._old[closing] = self._channel
        closing.add_done_callback(self._old.pop)
        self._open()

    def _open(self) -> None:
        if self._tls is not None and self._identity is not None:
            self._channel = self._tls.channel(self.address, self._identity)
        else:
            self._channel = grpc.aio.insecure_channel(self.address, options=_OPTIONS)
        self._generate: Any = self._channel.unary_stream(f"{_SERVICE}/Generate")


def is_serving(address: str, timeout_s: float) -> bool:
    """Whether the server there says, by the standard health call, that it serves. Blocks for up to ``timeout_s``."""
    with grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        try:
            request = health_pb2.HealthCheckRequest()
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _worker_error(error: grpc.aio.AioRpcError) -> WorkerError:
    return WorkerError(error.code().name, error.details() or error.code().name)


def _is_cancelled() -> bool:
    """Whether it is the running task that is cancelled, and not only the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
