"""uvicorn's HTTP protocol with the limits it lacks: for heads that do not come or do not end, and for answers that
nobody takes.

A client that reads slowly makes the transport's buffer full: then nothing more is taken from the replica either. If it
stays full for the stall limit the connection is cut, and with it the request in the replica. Costs nothing per message.

A request that offers to go on in another protocol is answered in this one: Java's HTTP client offers HTTP/2 with each.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_MAX_HEAD_BYTES = 64 << 10


class GuardedProtocol(HttpToolsProtocol):
    """See the module; ``guarded`` makes the class that uvicorn is given."""

    head_timeout_s: float
    stall_timeout_s: float
    on_stall: Callable[[], None]
    is_leaving: Callable[[], bool]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        self._is_in_head = False
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: its first request's head must come in time."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left, or was cut."""
        self._stop(self._head_timer)
        self._stop(self._stall_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a client. As uvicorn's own, but for upgrades, which it takes for the end, and for long heads."""
        self._unset_keepalive_if_required()
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                head, self.parser = self._head_without_upgrade(), httptools.HttpRequestParser(self)
                self.parser.feed_data(head + data[upgrade.args[0] :])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # the latter: CONNECT, or two in one go
            self.logger.warning("a client sent what is no HTTP")
            self.send_400_response("what came is no HTTP/1.1 request")
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def _head_without_upgrade(self) -> bytes:
        """Of the request behind whose head the parser has stopped, because it offers an upgrade."""
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", self.parser.get_http_version().encode(), b"\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                kept = [one for one in value.lower().split(b",") if one.strip() not in (b"upgrade", b"http2-settings")]
                value = b",".join(kept)
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        return b"".join([*head, b"\r\n"])

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._has_begun = self._is_in_head = True
        self._head_bytes = 0
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is here; the body has a limit of its own."""
        self._stop(self._head_timer)
        self._is_in_head = False
        if self.parser.should_upgrade():  # until it is read again
            return
        super().on_headers_complete()
        if type(self).is_leaving() and self.cycle is not None:  # the next request of this client goes elsewhere
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """Its body is here."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def pause_writing(self) -> None:
        """The client takes less than is written."""
        self._stop(self._stall_timer)
        self._stall_timer = self.loop.call_later(self.stall_timeout_s, self._stalled)
        super().pause_writing()

    def resume_writing(self) -> None:
        """It has taken most of it."""
        self._stop(self._stall_timer)
        super().resume_writing()

    def _await_head(self) -> None:
        self._stop(self._head_timer)
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            if self._has_begun and (self.cycle is None or self.cycle.response_complete):
                self.transport.write(_TOO_LATE)
            self.transport.close()

    def _stalled(self) -> None:
        type(self).on_stall()
        self.transport.abort()  # a mere close would wait for the buffer to empty

    def _stop(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def guarded(
    head_timeout_s: float, stall_timeout_s: float, on_stall: Callable[[], None], is_leaving: Callable[[], bool]
) -> type[GuardedProtocol]:
    """The protocol with its limits; ``on_stall`` is told of each connection that is cut.

    ``is_leaving``: answers are the last ones of their connections.
    """

    class Protocol(GuardedProtocol):
        pass

    Protocol.head_timeout_s = head_timeout_s
    Protocol.stall_timeout_s = stall_timeout_s
    Protocol.on_stall = staticmethod(on_stall)
    Protocol.is_leaving = staticmethod(is_leaving)
    return Protocol
