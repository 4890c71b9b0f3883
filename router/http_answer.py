"""A completion's way through dispatch, and its answer in OpenAI's form over HTTP: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from warmfront_pb.v1 import inference_pb2

from router import openai_api
from router.config import RouterConfig
from router.dispatch import Dispatcher, Route
from router.errors import HTTP_STATUS, BodyTooSlowError, RouterError
from router.explain import as_json, explain
from router.fleet import Fleet
from router.request import Work
from router.service import EXPLAIN_HEADER, hint_of

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_DONE = b"data: [DONE]\n\n"


class Answer:
    """One HTTP request's way through dispatch, and its answer in OpenAI's form, whole or as events."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        dispatcher: Dispatcher,
        http: Request,
        request_id: str,
        body: openai_api.ChatBody | openai_api.CompletionBody,
        requests: list[inference_pb2.GenerateRequest],
        timeout_s: float | None,
        *,
        is_chat: bool,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._timeout_s = timeout_s
        self._http = http
        self._body = body
        self._requests = requests
        self._is_chat = is_chat
        self._request_id = request_id
        self._session = hint_of(http.headers) or body.prompt_cache_key or ""
        trusts = config.trust_tenant_header
        self._tenant = http.headers.get("x-warmfront-tenant", "") if trusts else ""
        self._route = Route()  # of the first prompt: what the headers tell
        self._wants_explanation = http.headers.get(EXPLAIN_HEADER) == "1"
        self._status = "CANCELLED"  # until it is known what becomes of it
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
            return json_response(self._whole(choices), self._headers())
        except RouterError as error:
            return error_response(error, self._headers())
        except _ClientLeftError:
            return Response(status_code=499)
        except Exception:
            return error_response(self._fault(), self._headers())
        finally:
            await stack.aclose()

    def _fault(self) -> RouterError:
        """For an exception that is our own mistake: the log gets all of it, the client a clear end."""
        self._status = "INTERNAL"
        log.exception("a request failed inside the router request=%s", self._request_id)
        return RouterError("the router failed; its log has the reason")

    def _headers(self) -> dict[str, str]:
        return dict(self._route.headers(self._request_id, self._config.policy))

    async def _messages(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The messages of all prompts; when they end, however that is, the request is counted, once."""
        try:
            async with aclosing(self._merged()) as messages:
                async for message in messages:
                    yield message
            self._status = "OK"
        except RouterError as error:
            self._status = error.status
            raise
        except Exception:
            self._status = "INTERNAL"
            raise
        finally:
            self._dispatcher.count(self._status)

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
            except Exception as error:
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
        dispatcher = self._dispatcher
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
        except Exception:
            yield _event(_error_json(self._fault()))
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
        model = self._body.model or self._fleet.profile.name
        return {"id": self._id, "object": kind, "created": self._created, "model": model}

    def _logprobs_json(self, logprobs: Any, offset: int) -> dict[str, Any] | None:
        if not self._requests[0].sampling.HasField("logprobs") or not logprobs:
            return None
        if self._is_chat:
            return openai_api.chat_logprobs_json(logprobs)
        return openai_api.completion_logprobs_json(logprobs, offset)


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


class _ClientLeftError(Exception):
    pass


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


def json_response(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    """A body of JSON."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _error_json(error: RouterError) -> dict[str, Any]:
    _, kind = HTTP_STATUS[error.status]
    return {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code},
    }


def error_response(error: RouterError, headers: dict[str, str] | None = None) -> Response:
    """An error as OpenAI's object, with the status and headers that go with it."""
    status, _ = HTTP_STATUS[error.status]
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, BodyTooSlowError):
        headers["connection"] = "close"  # what may still come of the body is nobody's
    return json_response(_error_json(error), headers, status)
