"""A completion's way through dispatch, and its answer in OpenAI's form over HTTP: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from warmfront_pb.v1 import inference_pb2

from common.trace import Trace
from router import openai_api
from router.config import RouterConfig
from router.dispatch import Dispatcher, Route
from router.errors import HTTP_STATUS, BodyTooSlowError, RouterError
from router.explain import as_json, explain
from router.fleet import Fleet
from router.request import Work
from router.segments import unpack_ids
from router.service import EXPLAIN_HEADER, hint_of

log = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)


class Answer:
    """One HTTP request's answer; called as one of Starlette's responses."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        dispatcher: Dispatcher,
        headers: Mapping[str, str],
        trace: Trace,
        request_id: str,
        body: openai_api.ChatBody | openai_api.CompletionBody,
        requests: list[inference_pb2.GenerateRequest],
        timeout_s: float | None,
        *,
        is_chat: bool,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._timeout_s = timeout_s
        self._body = body
        self._requests = requests
        self._is_chat = is_chat
        self._request_id = request_id
        self._session = hint_of(headers) or body.hint
        self._tenant = headers.get("x-warmfront-tenant", "") if config.trust_tenant_header else ""
        self._route = Route(trace=trace)  # of the first prompt: what the headers tell
        self._wants_explanation = headers.get(EXPLAIN_HEADER) == "1"
        self._usages: list[inference_pb2.Usage] = []
        self._choices_per_prompt = body.n or 1
        self._choices = [_Choice() for _ in range(self._choices_per_prompt * len(requests))]
        prefix, kind = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{request_id}",
            "object": kind + ".chunk" if is_chat and body.stream else kind,
            "created": int(time.time()),
            "model": body.model or fleet.profile.name,
        }
        self._tells_usage = body.stream_options is not None and body.stream_options.include_usage
        if self._tells_usage:
            self._head["usage"] = None
        self._before_choice = b"data: " + msgspec.json.encode(self._head)[:-1] + b',"choices":['
        self._has_begun = False  # to send events
        self._client_left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. When the client leaves, its requests are cancelled in the replicas at once.

        A stream begins when the first token is there, so that it can still be an error until then.
        """
        self._send = send
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(self._leave_with_client(receive, task))
        status, error = "CANCELLED", None
        try:
            await self._generate()
            status = "OK"
        except RouterError as failure:
            status, error = failure.status, failure
        except asyncio.CancelledError:
            if not self._client_left:
                raise
            task.uncancel()
            return
        except Exception:
            status, error = "INTERNAL", RouterError("the router failed; its log has the reason")
            log.exception("a request failed inside the router request=%s%s", self._request_id, self._route.trace.suffix)
        finally:
            watch.cancel()
            self._dispatcher.count(status)
        if self._body.stream and (self._has_begun or error is None):
            await self._end_events(error)
        elif error is not None:
            await error_response(error, dict(self._headers()))(scope, receive, send)
        else:
            await json_response(self._whole(), dict(self._headers()))(scope, receive, send)

    async def _leave_with_client(self, receive: Receive, task: asyncio.Task[Any]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_left = True
        task.cancel()

    def _headers(self) -> list[tuple[str, str]]:
        return self._route.headers(self._request_id, self._config.policy)

    async def _generate(self) -> None:
        """All prompts; the first error ends them all."""
        if len(self._requests) == 1:
            return await self._generate_one(0)
        tasks = [asyncio.create_task(self._generate_one(number)) for number in range(len(self._requests))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate_one(self, number: int) -> None:
        """One prompt; its choices are numbered on from those of the prompts before it."""
        dispatcher, streams = self._dispatcher, self._body.stream
        request_id = self._request_id if len(self._requests) == 1 else f"{self._request_id}-{number}"
        route = self._route if number == 0 else Route(trace=self._route.trace)
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
            forget = None if streams else partial(self._forget, number)
            async with aclosing(dispatcher.generate(work, route, forget)) as messages:
                async for data in messages:
                    message = inference_pb2.GenerateResponse.FromString(data)
                    index = message.index + number * self._choices_per_prompt
                    if message.HasField("usage"):
                        self._usages.append(message.usage)
                    if streams:
                        await self._send_events(index, message)
                    else:
                        self._choices[index].take(message)
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

    def _forget(self, number: int) -> None:
        """What has come of one prompt's choices: they begin anew."""
        first = number * self._choices_per_prompt
        self._choices[first : first + self._choices_per_prompt] = [_Choice() for _ in range(self._choices_per_prompt)]

    def _whole(self) -> dict[str, Any]:
        items = []
        for index, choice in enumerate(self._choices):
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
                item["token_ids"] = unpack_ids(bytes(choice.token_ids))
            items.append(item)
        usage = openai_api.usage_json(self._usages)
        return {**self._head, "choices": items, "usage": usage, **self._explanation()}

    # Events

    async def _begin_events(self) -> None:
        self._has_begun = True
        raw = [*_STREAM_HEADERS, *((name.encode(), value.encode("latin-1")) for name, value in self._headers())]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _send_events(self, index: int, message: inference_pb2.GenerateResponse) -> None:
        """What one message brings, in one write."""
        items = self._chunk_choices(index, message)
        if not self._has_begun:
            await self._begin_events()
        if items:
            body = b"".join([self._before_choice + msgspec.json.encode(item) + b"]}\n\n" for item in items])
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end_events(self, error: RouterError | None) -> None:
        """The last ones, in one write."""
        if not self._has_begun:
            await self._begin_events()
        last: dict[str, Any] = {}
        if error is not None:
            last = _error_json(error)
        elif extra := self._explanation() | self._usage_json():
            last = {**self._head, "choices": [], **extra}
        body = (_event(last) if last else b"") + _DONE
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _chunk_choices(self, index: int, message: inference_pb2.GenerateResponse) -> list[dict[str, Any]]:
        """The chunk's choice for one message; a chat choice opens with its role."""
        choice = self._choices[index]
        items = []
        if self._is_chat and not choice.has_begun:
            items.append(self._chunk_choice(index, {"role": "assistant", "content": ""}, None))
        choice.has_begun = True
        is_last = bool(message.finish_reason)
        if message.text or message.logprobs or is_last or (self._body.return_token_ids and message.token_ids):
            delta = {"content": message.text} if message.text or not is_last else {}
            logprobs = self._logprobs_json(message.logprobs, choice.num_chars)
            item = self._chunk_choice(index, delta, logprobs, message.text)
            if is_last:
                item["finish_reason"] = message.finish_reason
                item["stop_reason"] = message.stop_reason or None
            if self._body.return_token_ids:
                item["token_ids"] = unpack_ids(message.token_ids)
            items.append(item)
        choice.num_chars += len(message.text)
        return items

    def _chunk_choice(
        self, index: int, delta: dict[str, str], logprobs: dict[str, Any] | None, text: str = ""
    ) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": delta} if self._is_chat else {"text": text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": None}

    def _usage_json(self) -> dict[str, Any]:
        return {"usage": openai_api.usage_json(self._usages)} if self._tells_usage else {}

    def _explanation(self) -> dict[str, Any]:
        """Where the header asks for it: why the first prompt went where it went."""
        record = self._route.record
        return {"warmfront": as_json(explain(record))} if self._wants_explanation and record is not None else {}

    def _logprobs_json(self, logprobs: Any, offset: int) -> dict[str, Any] | None:
        if not logprobs or not self._requests[0].sampling.HasField("logprobs"):
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

    def take(self, message: inference_pb2.GenerateResponse) -> None:
        """A piece of a whole answer."""
        self.texts.append(message.text)
        self.token_ids += message.token_ids
        self.logprobs += message.logprobs
        self.finish_reason = message.finish_reason or self.finish_reason
        self.stop_reason = message.stop_reason or self.stop_reason


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
