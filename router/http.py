"""The HTTP front: OpenAI's API, health, metrics and the operator's paths, over Starlette and uvicorn."""

import asyncio
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as Path
from warmfront_pb.v1 import admin_pb2, inference_pb2

from common.grpc_text import sendable
from common.tls import Certificates, ServerContext
from common.trace import trace_of
from router import openai_api
from router.admin import Admin
from router.config import RouterConfig
from router.dispatch import Dispatcher, Route
from router.errors import (
    BodyTooLargeError,
    BodyTooSlowError,
    ClientLeftError,
    InvalidRequestError,
    RouterError,
)
from router.explain import as_json, explain
from router.explain_cache import explain_past
from router.fleet import Fleet
from router.http_answer import Answer, error_response, json_response
from router.http_protocol import guarded
from router.lora_admin import LoraAdmin
from router.metrics import RouterMetrics
from router.request import model_not_found
from router.service import hint_of, request_id_of

log = logging.getLogger(__name__)

_TIMEOUT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|ms)?")
_MAX_DRAINED_BODIES = 4  # a body too long is read and dropped up to so many limits, so that the client sees the answer


class HttpFront:
    """The public HTTP server."""

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
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._admin = admin
        self._lora = LoraAdmin(fleet)
        self._metrics = metrics
        self._is_draining = False
        self._started_at = int(time.time())
        self._task: asyncio.Task[None] | None = None
        routes = [
            Path("/v1/chat/completions", self._chat, methods=["POST"]),
            Path("/v1/completions", self._completions, methods=["POST"]),
            Path("/v1/models", self._models, methods=["GET"]),
            Path("/v1/models/{name:path}", self._model, methods=["GET"]),
            Path("/v1/replicas", self._replicas, methods=["GET"]),
            Path("/v1/drain", self._drain, methods=["POST"]),
            Path("/v1/explain", self._explain, methods=["POST"]),
            Path("/v1/cache/reset", self._reset_cache, methods=["POST"]),
            Path("/v1/lora", self._list_loras, methods=["GET"]),
            Path("/v1/lora", self._load_lora, methods=["POST"]),
            Path("/v1/lora/{name:path}", self._unload_lora, methods=["DELETE"]),
            Path("/healthz", self._healthz, methods=["GET"]),
            Path("/readyz", self._readyz, methods=["GET"]),
            Path("/metrics", self._metrics_text, methods=["GET"]),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={RouterError: _on_router_error, HTTPException: _on_http_error, Exception: _on_fault},
        )
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,  # nobody asks for a client's address
            http=guarded(config.body_timeout_s, config.stall_timeout_s, self._stalled, lambda: self._is_draining),
            ws="none",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, int(config.drain_deadline_s)),
        )
        settings.load()
        settings.ssl = ServerContext.of(certificates) if certificates is not None else None
        self._server = _Server(settings, config.handshake_timeout_s)

    async def start(self) -> int:
        """Listen; the port. Raises ``OSError`` when the port cannot be had."""
        listener = bind(self._config.listen, self._config.http_port, self._config.reuse_port)
        port: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        await self._server.listening.wait()
        return port

    def why_not_ready(self) -> str:
        """Empty while requests can be answered."""
        return "draining" if self._is_draining else self._fleet.why_not_ready()

    def begin_drain(self) -> None:
        """Say that this router takes no more requests; those that come all the same are still answered."""
        self._is_draining = True

    async def stop(self) -> None:
        """Close the port, let running answers end within the drain timeout, cut the rest."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task

    # Inference

    async def _chat(self, http: Request) -> Response | Answer:
        return await self._complete(http, _read_chat, is_chat=True)

    async def _completions(self, http: Request) -> Response | Answer:
        return await self._complete(http, _read_completion, is_chat=False)

    async def _complete(self, http: Request, read: Callable[[bytes], "_Asked"], *, is_chat: bool) -> Response | Answer:
        pairs = http.headers.items()
        headers, trace = dict(pairs), trace_of(pairs)
        request_id = request_id_of(headers.get("x-request-id"))
        try:
            body, requests = read(await self._body(http))
            timeout_s = _timeout_s(headers, bool(body.stream))
            dispatch = (self._config, self._fleet, self._dispatcher)
            return Answer(*dispatch, headers, trace, request_id, body, requests, timeout_s, is_chat=is_chat)
        except RouterError as error:
            self._dispatcher.count(error.status)
            self._dispatcher.ended(request_id, error.status, None, Route(trace=trace))
            return error_response(error, {"x-request-id": request_id})

    async def _body(self, http: Request) -> bytes:
        limit = self._config.max_body_bytes
        chunks: list[bytes] = []
        size = 0
        timeout_s = self._config.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                async for chunk in http.stream():
                    size += len(chunk)
                    if size <= limit:
                        chunks.append(chunk)
                    elif size > _MAX_DRAINED_BODIES * limit:
                        break
        except TimeoutError:
            raise BodyTooSlowError(
                f"the body was not whole within {timeout_s:g} s, {size} bytes had come: send it faster"
            ) from None
        except ClientDisconnect:
            raise ClientLeftError(f"the client left before its body was whole, {size} bytes had come") from None
        if size > limit:
            raise BodyTooLargeError(f"the body is longer than {limit} bytes: shorten the prompt")
        return b"".join(chunks)

    def _stalled(self) -> None:
        self._metrics.stalled.inc()
        log.warning("a client took nothing of its answer and was cut off after_s=%g", self._config.stall_timeout_s)

    # The rest

    async def _models(self, http: Request) -> Response:
        adapters = [self._model_json(name) for name in self._fleet.adapters.names]
        return json_response({"object": "list", "data": [self._model_json(), *adapters]})

    async def _model(self, http: Request) -> Response:
        name = http.path_params["name"]
        served, adapters = self._fleet.profile.name, self._fleet.adapters
        if name != served and adapters.named(name) is None:
            raise model_not_found(name, served, adapters.names)
        return json_response(self._model_json("" if name == served else name))

    def _model_json(self, adapter: str = "") -> dict[str, Any]:
        model = self._fleet.profile
        return {
            "id": adapter or model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "warmfront",
            "parent": model.name if adapter else None,
            "max_model_len": model.max_model_len,
        }

    async def _replicas(self, http: Request) -> Response:
        return json_response(self._admin.replicas_json())

    async def _drain(self, http: Request) -> Response:
        try:
            body = openai_api.decode(await self._body(http), _DrainBody)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f'the body is not {{"replica": NAME, "deadline_ms": N}}: {error}') from None
        running = await self._admin.drain(body.replica, body.deadline_ms)
        return json_response({"replica": body.replica, "running": running})

    async def _explain(self, http: Request) -> Response:
        """The newest decisions, that for one request, or the one that a body of a completion would have now."""
        asked = openai_api.parse_explain(await self._body(http))
        recent = self._dispatcher.recent
        if isinstance(asked, int):
            return json_response(as_json(admin_pb2.ExplainResponse(explanations=map(explain, recent.last(asked)))))
        if isinstance(asked, str):
            return json_response(as_json(explain(await explain_past(self._fleet, recent, asked))))
        request, session = asked
        record = await self._dispatcher.explain(request, hint_of(http.headers) or session)
        return json_response(as_json(explain(record)))

    async def _reset_cache(self, http: Request) -> Response:
        reset = await self._admin.reset_cache()
        return json_response(as_json(reset), status=200 if reset.complete else 207)

    async def _list_loras(self, http: Request) -> Response:
        return json_response(as_json(await self._lora.listed()))

    async def _load_lora(self, http: Request) -> Response:
        try:
            body = openai_api.decode(await self._body(http), _LoraBody)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f'the body is not {{"name": NAME, "path": FOLDER}}: {error}') from None
        loaded = await self._lora.load(body.name, body.path, body.replica)
        return json_response(as_json(loaded), status=200 if loaded.complete else 207)

    async def _unload_lora(self, http: Request) -> Response:
        unloaded = await self._lora.unload(http.path_params["name"], http.query_params.get("replica", ""))
        return json_response(as_json(unloaded), status=200 if unloaded.complete else 207)

    async def _healthz(self, http: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def _readyz(self, http: Request) -> Response:
        reason = self.why_not_ready()
        return Response(f"{reason or 'ok'}\n", 503 if reason else 200, media_type="text/plain")

    async def _metrics_text(self, http: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


_Asked: TypeAlias = tuple[openai_api.ChatBody | openai_api.CompletionBody, list[inference_pb2.GenerateRequest]]


def _read_chat(data: bytes) -> _Asked:
    body = openai_api.parse(data, openai_api.ChatBody)
    return body, [openai_api.chat_request(body)]


def _read_completion(data: bytes) -> _Asked:
    body = openai_api.parse(data, openai_api.CompletionBody)
    return body, openai_api.completion_requests(body)


def _timeout_s(headers: Mapping[str, str], is_stream: bool) -> float | None:
    """How long the client waits, from its headers; None: it does not say. Raises ``InvalidRequestError``.

    OpenAI's clients tell their read time-out, which for a whole answer is how long they wait for it.
    """
    given = headers.get("x-request-timeout")
    if given is not None:
        match = _TIMEOUT.fullmatch(given)
        if match is None or not (timeout_s := float(match[1]) * (0.001 if match[2] == "ms" else 1)) > 0:
            raise InvalidRequestError(
                f"x-request-timeout {given!r} is no time: give seconds, such as 30, 2.5s or 500ms",
                param="x-request-timeout",
            )
        return timeout_s
    match = None if is_stream else _TIMEOUT.fullmatch(headers.get("x-stainless-read-timeout", ""))
    return float(match[1]) or None if match is not None and not match[2] else None


class _DrainBody(msgspec.Struct):
    replica: str
    deadline_ms: openai_api.Count = 0


class _LoraBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    path: str
    replica: str = ""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process that embeds it has its own."""

    def __init__(self, config: uvicorn.Config, handshake_timeout_s: float) -> None:
        super().__init__(config)
        self._handshake_timeout_s = handshake_timeout_s if config.ssl is not None else None
        self.listening = asyncio.Event()

    def capture_signals(self) -> Any:
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvicorn's own leaves a half-open TLS connection open for a minute, and has no setting for it."""
        await self.lifespan.startup()
        made = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                partial(self.config.http_protocol_class, **made),
                sock=listener,
                ssl=self.config.ssl,
                backlog=self.config.backlog,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
            for listener in sockets or ()
        ]
        self.started = True
        self.listening.set()


def bind(address: str, port: int, reuse_port: bool) -> socket.socket:
    """A listening socket. Raises ``OSError`` naming the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # With the protocol named: asyncio turns Nagle's algorithm off for accepted sockets only where it reads TCP here.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {address}:{port} for HTTP: {error.strerror}") from error
    listener.setblocking(False)
    return listener


async def _on_router_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)
    return error_response(error, {"x-request-id": request_id_of(http.headers.get("x-request-id"))})


async def _on_http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = sendable(f"{http.method} {http.url.path}: {error.detail}")
    body = {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}}
    return json_response(body, dict(error.headers or {}), error.status_code)


async def _on_fault(http: Request, error: Exception) -> Response:
    log.error("a request failed inside the router path=%s", http.url.path, exc_info=error)
    return error_response(RouterError("the router failed; its log has the reason"))
