"""A client of the router's HTTP API, as small as the commands that need it: JSON calls and one streamed answer."""

from __future__ import annotations

import functools
import http.client
import json
import os
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from warmfront.console import say
from warmfront.errors import DeadlinePassed, Failure, WrongUse
from warmfront.flags import ENV_PREFIX
from warmfront.run_dir import all_run_dirs

_PEM_END = "-----END CERTIFICATE-----"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A router, and the PEM files that TLS to it takes. They are read for each connection: they may change."""

    url: str
    ca: str | None = None  # authority of the router; None: the system's
    cert: str | None = None  # shown to a router that asks for one
    key: str | None = None
    pinned: str | None = None  # without ``ca``: the router's own certificate, whatever name it carries

    def context(self) -> ssl.SSLContext:
        """How to speak TLS to it. Raises ``WrongUse`` for a file that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.ca is None and self.pinned is not None:
                leaf = Path(self.pinned).read_text(encoding="ascii").partition(_PEM_END)
                context.load_verify_locations(cadata=leaf[0] + leaf[1])
                context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
                context.check_hostname = False
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ValueError) as error:
            files = ", ".join(path for path in (self.ca, self.pinned, self.cert, self.key) if path is not None)
            raise WrongUse(f"TLS to {self.url}: {files} cannot be used: {error}") from error
        return context


class Client:
    """Calls one router. Every failure is a ``Failure`` that says what to do."""

    def __init__(self, address: str | Address, *, timeout_s: float = 600.0) -> None:
        self._address = address if isinstance(address, Address) else Address(url=address)
        url = self._address.url
        no_address = WrongUse(f"{url!r} is no HTTP address: write http://127.0.0.1:8000")
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
        except ValueError:  # a port over 65,535, half of a bracket
            raise no_address from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise no_address
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._speaks_tls = parts.scheme == "https"
        self._host, self._port, self._timeout_s = parts.hostname, port, timeout_s

    def get(self, path: str) -> Any:
        """The JSON object at ``path``."""
        return self._json("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to ``body``."""
        return self._json("POST", path, body)

    def delete(self, path: str) -> Any:
        """The JSON answer to a DELETE of ``path``."""
        return self._json("DELETE", path, None)

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
                raise Failure(f"the answer of {self.url} broke off: {error}") from error
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
        connection = self._connection()
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            return connection, connection.getresponse()
        except TimeoutError as error:
            connection.close()
            raise DeadlinePassed(f"no answer from {self.url} within {self._timeout_s:g} s") from error
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise WrongUse(
                f"the certificate of {self.url} is not trusted ({error.verify_message}): name its authority with --ca"
            ) from error
        except ssl.SSLError as error:
            connection.close()
            raise WrongUse(
                f"{self.url} refuses this connection ({error.reason}): does it speak TLS, and does it ask for --cert?"
            ) from error
        except (ConnectionResetError, BrokenPipeError) as error:
            connection.close()
            asked = "a client's --cert and --key" if self._speaks_tls else "TLS: an https:// address"
            raise WrongUse(f"{self.url} closes the connection ({error}): perhaps it wants {asked}") from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise WrongUse(f"no cluster answers at {self.url} ({error}); start one with: warmfront up") from error

    def _connection(self) -> http.client.HTTPConnection:
        if not self._speaks_tls:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        context = self._address.context()
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)


class connection_closed:  # noqa: N801
    """Closes a connection at the end of a block (``http.client`` has no context manager of its own)."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self._connection.close()


def address_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--url`` and what TLS takes, as one ``Address``; by default the one cluster on this machine, else port 8000."""
    return _with_address(function, lambda url: None)


def changed_address_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a command that changes the cluster: it says which one that is where nobody has named it."""
    return _with_address(function, say_which)


def say_which(url: str) -> None:
    """Before a cluster that nobody has named is changed."""
    say(f"no cluster is named: this is about {url} (another one by --url or {ENV_PREFIX}URL)")


def _with_address(function: Callable[..., Any], on_default: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_address(
        *args: Any, url: str | None, ca: str | None, cert: str | None, key: str | None, **params: Any
    ) -> Any:
        if (cert is None) != (key is None):
            raise WrongUse("--cert and --key come together")
        if not url:
            url = default_url()
            on_default(url)
        address = Address(url=url, ca=ca, cert=cert, key=key, pinned=_certificate_here(url))
        return function(*args, address=address, **params)

    texts = {
        "url": f"Address of the cluster. Default: {ENV_PREFIX}URL, else the one on this machine.",
        "ca": "Certificate authority of an https:// cluster (PEM). Default: the system's.",
        "cert": "Certificate to show to a cluster that asks for one (PEM).",
        "key": "Its key.",
    }
    decorated: Callable[..., Any] = with_address
    for name, text in reversed(texts.items()):
        decorated = click.option(f"--{name}", envvar=ENV_PREFIX + name.upper(), help=text)(decorated)
    return decorated


def shown_by_environment() -> tuple[str | None, str | None]:
    """The certificate and key that every command shows to a cluster which asks for them."""
    return os.environ.get(ENV_PREFIX + "CERT"), os.environ.get(ENV_PREFIX + "KEY")


def _certificate_here(url: str) -> str | None:
    """The certificate of a cluster of this user on this machine: no authority need vouch for it."""
    for run_dir in all_run_dirs():
        if run_dir.cluster.get("http") == url.rstrip("/") and run_dir.owner():
            certificate: str | None = run_dir.cluster.get("tls_cert")
            return certificate
    return None


def default_url() -> str:
    """The HTTP address of the only cluster here. Raises ``WrongUse`` when there are several."""
    urls = [run_dir.cluster["http"] for run_dir in all_run_dirs() if run_dir.owner() and "http" in run_dir.cluster]
    if len(urls) > 1:
        raise several_clusters(urls)
    return urls[0] if urls else "http://127.0.0.1:8000"


def several_clusters(urls: list[str]) -> WrongUse:
    """What a command says that cannot know which of them is meant."""
    return WrongUse(f"several clusters run here; choose one with --url or {ENV_PREFIX}URL: {', '.join(sorted(urls))}")


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to its [DONE]."""
    for line in response:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                yield json.loads(data)
            except ValueError:
                raise ConnectionError(f"it sent an event that is no JSON: {data[:80]!r}") from None
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
