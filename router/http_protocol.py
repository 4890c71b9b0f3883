"""uvicorn's HTTP protocol with two limits it lacks: for heads that do not come, and for answers that nobody takes.

A client that reads slowly makes the transport's buffer full: then nothing more is taken from the replica either. If it
stays full for the stall limit the connection is cut, and with it the request in the replica. Costs nothing per message.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: its first request's head must come in time."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left, or was cut."""
        self._stop(self._head_timer)
        self._stop(self._stall_timer)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._has_begun = True
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is here; the body has a limit of its own."""
        self._stop(self._head_timer)
        super().on_headers_complete()
        if type(self).is_leaving() and self.cycle is not None:  # the next request of this client goes elsewhere
            self.cycle.keep_alive = False

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
