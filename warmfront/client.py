"""A client of the router's HTTP API, as small as the commands that need it: JSON calls and one streamed answer."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import click

from warmfront.errors import DeadlinePassed, Failure, WrongUse
from warmfront.options import ENV_PREFIX
from warmfront.run_dir import all_run_dirs


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer and what it cost. Times in seconds, as this client saw them."""

    replica: str = ""
    matched_tokens: int | None = None  # what the router predicted
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed for this answer."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed after the first token; None for an answer of one."""
        decode_s = self.total_s - self.ttft_s
        return (self.completion_tokens - 1) / decode_s if self.completion_tokens > 1 and decode_s > 0 else None


class Client:
    """Calls one router. Every failure is a ``Failure`` that says what to do."""

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WrongUse(f"{url!r} is no HTTP address: write http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._timeout_s = parts.hostname, parts.port, timeout_s

    def get(self, path: str) -> Any:
        """The JSON object at ``path``."""
        return self._json("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to ``body``."""
        return self._json("POST", path, body)

    def is_ready(self) -> bool:
        """Whether ``/readyz`` says yes; False too when nobody answers."""
        try:
            connection, response = self._request("GET", "/readyz", None)
        except Failure:
            return False
        with connection_closed(connection):
            return response.status == 200

    def generate(self, path: str, body: dict[str, Any], on_text: Callable[[str], None] = lambda text: None) -> Answer:
        """Streams one answer; ``on_text`` gets each piece of text as it comes."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        start = time.monotonic()
        connection, response = self._request("POST", path, body)
        with connection_closed(connection):
            if response.status != 200:
                raise _error(response, self.url)
            answer = Answer(replica=response.getheader("x-warmfront-replica", ""))
            matched = response.getheader("x-warmfront-matched-tokens")
            answer.matched_tokens = int(matched) if matched else None
            try:
                for event in _events(response):
                    _take(answer, event, start, on_text)
            except (OSError, http.client.HTTPException) as error:
                raise Failure(f"{self.url} closed the connection in mid-answer: {error}") from error
        answer.total_s = time.monotonic() - start
        return answer

    def _json(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        connection, response = self._request(method, path, body)
        with connection_closed(connection):
            if response.status not in (200, 207):  # 207: done in part, and the object says which
                raise _error(response, self.url)
            try:
                return json.loads(response.read())
            except ValueError as error:
                raise Failure(f"{self.url}{path} answers something that is no JSON: is this a warmfront?") from error

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connection_type(self._host, self._port, timeout=self._timeout_s)
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            return connection, connection.getresponse()
        except TimeoutError as error:
            connection.close()
            raise DeadlinePassed(f"no answer from {self.url} within {self._timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise WrongUse(f"no cluster answers at {self.url} ({error}); start one with: warmfront up") from error


class connection_closed:  # noqa: N801
    """Closes a connection at the end of a block (``http.client`` has no context manager of its own)."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self._connection.close()


def url_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--url``; without it the one cluster that runs on this machine, else port 8000."""
    return click.option(
        "--url",
        envvar=ENV_PREFIX + "URL",
        callback=lambda ctx, param, url: url or default_url(),
        help="Address of the cluster. Default: the one on this machine.",
    )(function)


def default_url() -> str:
    """The HTTP address of the only cluster here. Raises ``WrongUse`` when there are several."""
    urls = [run_dir.cluster["http"] for run_dir in all_run_dirs() if run_dir.owner() and "http" in run_dir.cluster]
    if len(urls) > 1:
        raise WrongUse(f"several clusters run here; choose one with --url: {', '.join(sorted(urls))}")
    return urls[0] if urls else "http://127.0.0.1:8000"


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to its [DONE]."""
    for line in response:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise ConnectionError("it was not complete")


def _take(answer: Answer, event: dict[str, Any], start: float, on_text: Callable[[str], None]) -> None:
    if "error" in event:
        raise Failure(f"the answer broke off: {event['error'].get('message', event['error'])}")
    for choice in event.get("choices", ()):
        answer.ttft_s = answer.ttft_s or time.monotonic() - start
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if text:
            answer.text += text
            on_text(text)
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _error(response: http.client.HTTPResponse, url: str) -> Failure:
    text = response.read(65536).decode("utf-8", "replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = text.strip()[:300] or response.reason
    message = f"{url} answers {response.status}: {text}"
    if response.status in (408, 504):
        return DeadlinePassed(message)
    return WrongUse(message) if response.status < 500 and response.status != 429 else Failure(message)
