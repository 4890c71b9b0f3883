"""The HTTP front: OpenAI's API, health, metrics and the operator's paths, over Starlette and uvicorn."""

import asyncio
import logging
import re
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, nullcontext
from typing import Any, TypeAlias, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send
from warmfront_pb.v1 import admin_pb2, inference_pb2

from common.tls import Certificates, ServerContext
from router import openai_api
from router.admin import Admin
from router.config import RouterConfig
from router.dispatch import Dispatcher, Route
from router.errors import (
    HTTP_STATUS,
    BodyTooLargeError,
    BodyTooSlowError,
    InvalidRequestError,
    RouterError,
)
from router.explain import as_json, explain
from router.fleet import Fleet
from router.http_protocol import guarded
from router.lora_admin import LoraAdmin
from router.metrics import RouterMetrics
from router.request import Work, model_not_found
from router.service import EXPLAIN_HEADER, hint_of, request_id_of

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_TIMEOUT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|ms)?")
_DONE = b"data: [DONE]\n\n"
_MAX_DRAINED_BODIES = 4  # a body too long is read and dropped up to so many limits, so that the client sees the answer


class _ClientLeftError(Exception):
    pass


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
            http=guarded(config.body_timeout_s, config.stall_timeout_s, self._stalled),
            ws="none",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, int(config.drain_timeout_s)),
        )
        settings.load()
        settings.ssl = ServerContext.of(certificates) if certificates is not None else None
        self._server = _Server(settings)

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

    async def _chat(self, http: Request) -> Response:
        return await self._complete(http, _read_chat, is_chat=True)

    async def _completions(self, http: Request) -> Response:
        return await self._complete(http, _read_completion, is_chat=False)

    async def _complete(self, http: Request, read: Callable[[bytes], "_Asked"], *, is_chat: bool) -> Response:
        request_id = request_id_of(http.headers.get("x-request-id"))
        try:
            body, requests = read(await self._body(http))
            timeout_s = _timeout_s(http, bool(body.stream))
        except RouterError as error:
            self._dispatcher.count(error.status)
            self._dispatcher.ended(request_id, error.status, None, Route())
            return _error_response(error, {"x-request-id": request_id})
        return await _Answer(self, http, request_id, body, requests, timeout_s, is_chat=is_chat).respond()

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
        if size > limit:
            raise BodyTooLargeError(f"the body is longer than {limit} bytes: shorten the prompt")
        return b"".join(chunks)

    def _stalled(self) -> None:
        self._metrics.stalled.inc()
        log.warning("a client took nothing of its answer and was cut off after_s=%g", self._config.stall_timeout_s)

    # The rest

    async def _models(self, http: Request) -> Response:
        adapters = [self._model_json(name) for name in self._fleet.adapters.names]
        return _json({"object": "list", "data": [self._model_json(), *adapters]})

    async def _model(self, http: Request) -> Response:
        name = http.path_params["name"]
        served, adapters = self._fleet.profile.name, self._fleet.adapters
        if name != served and adapters.named(name) is None:
            raise model_not_found(name, served, adapters.names)
        return _json(self._model_json("" if name == served else name))

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
        return _json(self._admin.replicas_json())

    async def _drain(self, http: Request) -> Response:
        try:
            body = msgspec.json.decode(await self._body(http), type=_DrainBody)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f'the body is not {{"replica": NAME, "deadline_ms": N}}: {error}') from None
        running = await self._admin.drain(body.replica, body.deadline_ms)
        return _json({"replica": body.replica, "running": running})

    async def _explain(self, http: Request) -> Response:
        """The newest decisions, that for one request, or the one that a body of a completion would have now."""
        asked = openai_api.parse_explain(await self._body(http))
        recent = self._dispatcher.recent
        if isinstance(asked, int):
            return _json(as_json(admin_pb2.ExplainResponse(explanations=map(explain, recent.last(asked)))))
        if isinstance(asked, str):
            return _json(as_json(explain(await self._dispatcher.explain_past(asked))))
        request, session = asked
        record = await self._dispatcher.explain(request, hint_of(http.headers) or session)
        return _json(as_json(explain(record)))

    async def _reset_cache(self, http: Request) -> Response:
        reset = await self._admin.reset_cache()
        return _json(as_json(reset), status=200 if reset.complete else 207)

    async def _list_loras(self, http: Request) -> Response:
        return _json(as_json(await self._lora.listed()))

    async def _load_lora(self, http: Request) -> Response:
        try:
            body = msgspec.json.decode(await self._body(http), type=_LoraBody)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f'the body is not {{"name": NAME, "path": FOLDER}}: {error}') from None
        loaded = await self._lora.load(body.name, body.path, body.replica)
        return _json(as_json(loaded), status=200 if loaded.complete else 207)

    async def _unload_lora(self, http: Request) -> Response:
        unloaded = await self._lora.unload(http.path_params["name"], http.query_params.get("replica", ""))
        return _json(as_json(unloaded), status=200 if unloaded.complete else 207)

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


def _timeout_s(http: Request, is_stream: bool) -> float | None:
    """How long the client waits, from its headers; None: it does not say. Raises ``InvalidRequestError``.

    OpenAI's clients tell their read time-out, which for a whole answer is how long they wait for it.
    """
    given = http.headers.get("x-request-timeout")
    if given is not None:
        match = _TIMEOUT.fullmatch(given)
        if match is None or not (timeout_s := float(match[1]) * (0.001 if match[2] == "ms" else 1)) > 0:
            raise InvalidRequestError(
                f"x-request-timeout {given!r} is no time: give seconds, such as 30, 2.5s or 500ms",
                param="x-request-timeout",
            )
        return timeout_s
    match = None if is_stream else _TIMEOUT.fullmatch(http.headers.get("x-stainless-read-timeout", ""))
    return float(match[1]) or None if match is not None and not match[2] else None


class _DrainBody(msgspec.Struct):
    replica: str
    deadline_ms: openai_api.Count = 0


class _LoraBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    path: str
    replica: str = ""


class _Choice:
    """One choice as its pieces come in."""

    __slots__ = ("finish_reason", "has_begun", "logprobs", "num_chars", "stop_reason", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids = bytearray()
        self.logprobs: list[inference_pb2.Logprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None
        self.num_chars = 0
        self.has_begun = False


class _Answer:
    """One HTTP request's way through dispatch, and its answer in OpenAI's form, whole or as events."""

    def __init__(
        self,
        front: HttpFront,
        http: Request,
        request_id: str,
        body: openai_api.ChatBody | openai_api.CompletionBody,
        requests: list[inference_pb2.GenerateRequest],
        timeout_s: float | None,
        *,
        is_chat: bool,
    ) -> None:
        self._front = front
        self._timeout_s = timeout_s
        self._http = http
        self._body = body
        self._requests = requests
        self._is_chat = is_chat
        self._request_id = request_id
        self._session = hint_of(http.headers) or body.prompt_cache_key or ""
        trusts = front._config.trust_tenant_header
        self._tenant = http.headers.get("x-warmfront-tenant", "") if trusts else ""
        self._route = Route()  # of the first prompt: what the headers tell
        self._wants_explanation = http.headers.get(EXPLAIN_HEADER) == "1"
        self._usages: list[inference_pb2.Usage] = []
        self._choices_per_prompt = body.n or 1
        self._created = int(time.time())
        prefix, self._object = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
        self._id = f"{prefix}-{self._request_id}"

    async def respond(self) -> Response:
        """The response, begun when the first token is there, so that it can still be an error until then."""
        stack = AsyncExitStack()
        try:
            messages = await stack.enter_async_context(aclosing(self._messages()))
            if self._body.stream:
                first = await _unless_client_leaves(self._http.receive, anext(messages))
                return _EventStream(self._events(first, messages), self._headers(), stack.pop_all())
            choices = [_Choice() for _ in range(self._choices_per_prompt * len(self._requests))]
            await _unless_client_leaves(self._http.receive, self._collect(messages, choices))
            return _json(self._whole(choices), self._headers())
        except RouterError as error:
            return _error_response(error, self._headers())
        except _ClientLeftError:
            return Response(status_code=499)
        finally:
            await stack.aclose()

    def _headers(self) -> dict[str, str]:
        return dict(self._route.headers(self._request_id, self._front._config.policy))

    async def _messages(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The messages of all prompts; when they end, however that is, the request is counted, once."""
        status = "CANCELLED"
        try:
            async with aclosing(self._merged()) as messages:
                async for message in messages:
                    yield message
            status = "OK"
        except RouterError as error:
            status = error.status
            raise
        except Exception:
            status = "INTERNAL"
            raise
        finally:
            self._front._dispatcher.count(status)

    async def _merged(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The messages of all prompts as they come, with their choices numbered through."""
        if len(self._requests) == 1:
            async with aclosing(self._one(0)) as only:
                async for message in only:
                    yield message
            return
        queue: asyncio.Queue[inference_pb2.GenerateResponse | Exception | None] = asyncio.Queue(maxsize=64)

        async def pump(number: int) -> None:
            try:
                async with aclosing(self._one(number)) as messages:
                    async for message in messages:
                        await queue.put(message)
                await queue.put(None)
            except RouterError as error:
                await queue.put(error)

        pumps = [asyncio.create_task(pump(number)) for number in range(len(self._requests))]
        try:
            left = len(pumps)
            while left:
                item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _one(self, number: int) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        dispatcher = self._front._dispatcher
        request_id = self._request_id if len(self._requests) == 1 else f"{self._request_id}-{number}"
        route = self._route if number == 0 else Route()
        work: Work | None = None
        status = "CANCELLED"
        try:
            work = await dispatcher.prepare(
                self._requests[number],
                request_id=request_id,
                timeout_s=self._timeout_s,
                session=self._session,
                tenant=self._tenant,
            )
            async with aclosing(dispatcher.generate(work, route)) as raw_messages:
                async for raw in raw_messages:
                    message = inference_pb2.GenerateResponse.FromString(raw)
                    message.index += number * self._choices_per_prompt
                    if message.HasField("usage"):
                        self._usages.append(message.usage)
                    yield message
            status = "OK"
        except RouterError as error:
            status = error.status
            raise
        except Exception:
            status = "INTERNAL"
            raise
        finally:
            dispatcher.ended(request_id, status, work, route)

    # Whole answers

    async def _collect(
        self, messages: AsyncGenerator[inference_pb2.GenerateResponse, None], choices: list[_Choice]
    ) -> None:
        async for message in messages:
            choice = choices[message.index]
            choice.texts.append(message.text)
            choice.token_ids += message.token_ids
            choice.logprobs += message.logprobs
            choice.finish_reason = message.finish_reason or choice.finish_reason
            choice.stop_reason = message.stop_reason or choice.stop_reason

    def _whole(self, choices: list[_Choice]) -> dict[str, Any]:
        items = []
        for index, choice in enumerate(choices):
            text = "".join(choice.texts)
            item: dict[str, Any] = {"index": index}
            if self._is_chat:
                item["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                item["text"] = text
            item["logprobs"] = self._logprobs_json(choice.logprobs, 0)
            item["finish_reason"] = choice.finish_reason
            item["stop_reason"] = choice.stop_reason
            if self._body.return_token_ids:
                item["token_ids"] = openai_api.token_ids_json(bytes(choice.token_ids))
            items.append(item)
        usage = openai_api.usage_json(self._usages)
        return {**self._head(self._object), "choices": items, "usage": usage, **self._explanation()}

    # Events

    async def _events(
        self, first: inference_pb2.GenerateResponse, rest: AsyncGenerator[inference_pb2.GenerateResponse, None]
    ) -> AsyncGenerator[bytes, None]:
        choices = [_Choice() for _ in range(self._choices_per_prompt * len(self._requests))]
        options = self._body.stream_options
        tells_usage = options is not None and options.include_usage
        head = self._head(self._object + ".chunk" if self._is_chat else self._object)
        if tells_usage:
            head["usage"] = None
        try:
            for item in self._chunk_choices(first, choices):
                yield _event({**head, "choices": [item]})
            async for message in rest:
                for item in self._chunk_choices(message, choices):
                    yield _event({**head, "choices": [item]})
            last = self._explanation()
            if tells_usage:
                last["usage"] = openai_api.usage_json(self._usages)
            if last:
                yield _event({**head, "choices": [], **last})
        except RouterError as error:
            yield _event(_error_json(error))
        yield _DONE

    def _chunk_choices(self, message: inference_pb2.GenerateResponse, choices: list[_Choice]) -> list[dict[str, Any]]:
        """The chunk's choice for one message; a chat choice opens with its role."""
        choice = choices[message.index]
        items = []
        if self._is_chat and not choice.has_begun:
            items.append(self._chunk_choice(message.index, {"role": "assistant", "content": ""}, None))
        choice.has_begun = True
        is_last = bool(message.finish_reason)
        if message.text or message.logprobs or is_last or (self._body.return_token_ids and message.token_ids):
            delta = {"content": message.text} if message.text or not is_last else {}
            logprobs = self._logprobs_json(message.logprobs, choice.num_chars)
            item = self._chunk_choice(message.index, delta, logprobs, message.text)
            if is_last:
                item["finish_reason"] = message.finish_reason
                item["stop_reason"] = message.stop_reason or None
            if self._body.return_token_ids:
                item["token_ids"] = openai_api.token_ids_json(message.token_ids)
            items.append(item)
        choice.num_chars += len(message.text)
        return items

    def _chunk_choice(
        self, index: int, delta: dict[str, str], logprobs: dict[str, Any] | None, text: str = ""
    ) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": delta} if self._is_chat else {"text": text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": None}

    def _explanation(self) -> dict[str, Any]:
        """Where the header asks for it: why the first prompt went where it went."""
        record = self._route.record
        return {"warmfront": as_json(explain(record))} if self._wants_explanation and record is not None else {}

    def _head(self, kind: str) -> dict[str, Any]:
        model = self._body.model or self._front._fleet.profile.name
        return {"id": self._id, "object": kind, "created": self._created, "model": model}

    def _logprobs_json(self, logprobs: Any, offset: int) -> dict[str, Any] | None:
        if not self._requests[0].sampling.HasField("logprobs") or not logprobs:
            return None
        if self._is_chat:
            return openai_api.chat_logprobs_json(logprobs)
        return openai_api.completion_logprobs_json(logprobs, offset)


class _EventStream(Response):
    """Server-sent events that stop the moment the client leaves. Each event is a write of its own."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str], resources: AsyncExitStack) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._events = events
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _unless_client_leaves(receive, self._send_events(send))
        except _ClientLeftError:
            pass
        finally:
            await self._resources.aclose()

    async def _send_events(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process that embeds it has its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    def capture_signals(self) -> Any:
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
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


async def _unless_client_leaves(receive: Receive, work: Awaitable[_T]) -> _T:
    """The result of ``work``; it is cancelled, and ``_ClientLeftError`` raised, when the client disconnects first."""
    task: asyncio.Future[_T] = asyncio.ensure_future(work if isinstance(work, Coroutine) else _await(work))
    watch = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        both: list[asyncio.Future[Any]] = [task, watch]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            result: _T = task.result()
            return result
        raise _ClientLeftError
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _await(work: Awaitable[_T]) -> _T:
    return await work


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _error_json(error: RouterError) -> dict[str, Any]:
    _, kind = HTTP_STATUS[error.status]
    return {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code},
    }


def _error_response(error: RouterError, headers: dict[str, str] | None = None) -> Response:
    status, _ = HTTP_STATUS[error.status]
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, BodyTooSlowError):
        headers["connection"] = "close"  # what may still come of the body is nobody's
    return _json(_error_json(error), headers, status)


async def _on_router_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)
    return _error_response(error, {"x-request-id": request_id_of(http.headers.get("x-request-id"))})


async def _on_http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{http.method} {http.url.path}: {error.detail}"
    body = {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}}
    return _json(body, dict(error.headers or {}), error.status_code)


async def _on_fault(http: Request, error: Exception) -> Response:
    log.error("a request failed inside the router path=%s", http.url.path, exc_info=error)
    return _error_response(RouterError("the router failed; its log has the reason"))
