"""The HTTP front: OpenAI's API, health, metrics and the operator's paths, over Starlette and uvicorn."""

import asyncio
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from typing import Any, TypeAlias, TypeVar

import msgspec
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.routing import Router as Paths
from starlette.types import ASGIApp, Receive, Scope, Send
from warmfront_pb.v1 import admin_pb2, inference_pb2

from common.address import family_of, host_port
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
    UnsupportedError,
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
_T = TypeVar("_T")
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
            Path("/v1/chat/completions", _Direct(partial(self._complete, _read_chat, True)), methods=["POST"]),
            Path("/v1/completions", _Direct(partial(self._complete, _read_completion, False)), methods=["POST"]),
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
            Path("/health", self._readyz, methods=["GET"]),
            Path("/version", self._version, methods=["GET"]),
            Path("/metrics", self._metrics_text, methods=["GET"]),
        ]
        settings = uvicorn.Config(
            _App(routes),
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

    async def _complete(
        self, read: Callable[[bytes], "_Asked"], is_chat: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        headers, trace = dict(pairs), trace_of(pairs)
        request_id = request_id_of(headers.get("x-request-id"))
        answer: Answer | Response
        try:
            data = await self._body(receive)
            try:
                body, requests = read(data)
            except InvalidRequestError:
                _refuse_encoding(headers)
                raise
            timeout_s = _timeout_s(headers, bool(body.stream))
            dispatch = (self._config, self._fleet, self._dispatcher)
            answer = Answer(*dispatch, headers, trace, request_id, body, requests, timeout_s, is_chat=is_chat)
        except RouterError as error:
            self._dispatcher.count(error.status)
            self._dispatcher.ended(request_id, error.status, None, Route(trace=trace))
            answer = error_response(error, {"x-request-id": request_id})
        await answer(scope, receive, send)

    async def _body(self, receive: Receive) -> bytes:
        limit = self._config.max_body_bytes
        chunks: list[bytes] = []
        size, has_more = 0, True
        timeout_s = self._config.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while has_more and size <= _MAX_DRAINED_BODIES * limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeftError(f"the client left before its body was whole, {size} bytes had come")
                    size += len(message["body"])
                    if size <= limit:
                        chunks.append(message["body"])
                    has_more = message["more_body"]
        except TimeoutError:
            raise BodyTooSlowError(
                f"the body was not whole within {timeout_s:g} s, {size} bytes had come: send it faster"
            ) from None
        if size > limit:
            raise BodyTooLargeError(f"the body is longer than {limit} bytes: shorten the prompt")
        return b"".join(chunks)

    async def _object(self, http: Request, kind: type[_T], form: str) -> _T:
        """The body of an order, read. Raises ``InvalidRequestError`` that shows the ``form`` it should have."""
        try:
            return openai_api.decode(await self._body(http.receive), kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"the body is not {form}: {error}") from None

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
        body = await self._object(http, _DrainBody, '{"replica": NAME, "deadline_ms": N}')
        running = await self._admin.drain(body.replica, body.deadline_ms)
        return json_response({"replica": body.replica, "running": running})

    async def _explain(self, http: Request) -> Response:
        """The newest decisions, that for one request, or the one that a body of a completion would have now."""
        asked = openai_api.parse_explain(await self._body(http.receive))
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
        body = await self._object(http, _LoraBody, '{"name": NAME, "path": FOLDER}')
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

    async def _version(self, http: Request) -> Response:
        return json_response({"version": version("warmfront")})

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


def _refuse_encoding(headers: Mapping[str, str]) -> None:
    """Where a body made no sense: whether it was sent packed. Raises ``UnsupportedError``."""
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise UnsupportedError(
            f"content-encoding {encoding[:64]!r} is not supported: send the body as it is", param="content-encoding"
        )


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
    # With the protocol named: asyncio turns Nagle's algorithm off for accepted sockets only where it reads TCP here.
    listener = socket.socket(family_of(address), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host_port(address, port)} for HTTP: {error.strerror}") from error
    listener.setblocking(False)
    return listener


class _Direct:
    """An endpoint that Starlette calls as it is, without making a request object first."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._app(scope, receive, send)


class _App:
    """Starlette's routing, with one place where what goes wrong becomes an answer."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = Paths(paths, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # so that Starlette raises errors of its own instead of putting them into words
        try:
            await self._paths(scope, receive, send)
        except RouterError as error:
            await error_response(error, _own_id(scope))(scope, receive, send)
        except HTTPException as error:
            await self._refuse(scope, error)(scope, receive, send)
        except Exception:
            log.exception("a request failed inside the router path=%s", scope["path"])
            failure = RouterError("the router failed; its log has the reason")
            await error_response(failure, _own_id(scope))(scope, receive, send)

    def _refuse(self, scope: Scope, error: HTTPException) -> Response:
        """No such path, or not with this method."""
        method, path = scope["method"], scope["path"]
        known = {one.path for one in self._paths.routes if isinstance(one, Path)}
        text = f"{method} {path}: {error.detail}"
        if path.rstrip("/") in known and error.status_code == 404:
            text += f": leave the slash at the end out, as in {path.rstrip('/')}"
        elif "/v1" + path in known:
            text += f": OpenAI's API is under /v1, as in base_url=http://{{host}}:{{port}}/v1 and /v1{path}"
        elif path.startswith("/v1/v1/") and path.removeprefix("/v1") in known:
            text += f": one /v1 is enough, as in {path.removeprefix('/v1')}"
        elif allowed := (error.headers or {}).get("Allow"):
            text += f": use {allowed}"
        elif f"{path}s" in known:
            text += f": is {path}s meant?"
        elif path.startswith("/v1/"):
            text += ": answers come by OpenAI's /v1/chat/completions and /v1/completions; no other API is offered"
        body = {"error": {"message": sendable(text), "type": "invalid_request_error", "param": None, "code": None}}
        return json_response(body, {**(error.headers or {}), **_own_id(scope)}, error.status_code)


def _own_id(scope: Scope) -> dict[str, str]:
    return {"x-request-id": request_id_of(Request(scope).headers.get("x-request-id"))}
