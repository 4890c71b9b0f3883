"""W3C trace context: what a caller traces a request by, passed on as it came to whoever serves it.

Nothing here makes spans. Names and forms: https://www.w3.org/TR/trace-context/ and https://www.w3.org/TR/baggage/.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

MAX_METADATA_BYTES = 32 << 10
"""What a server takes with a call. gRPC's own limit is 8 KiB, and baggage alone may have so many."""

_NAMES = ("traceparent", "tracestate", "baggage")
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_SENDABLE = re.compile(r"[\x20-\x7e]{1,8192}")


class Trace(NamedTuple):
    """``metadata`` goes with every call that serves the request; ``suffix`` ends a log line about it."""

    metadata: tuple[tuple[str, str], ...] = ()
    suffix: str = ""


NO_TRACE = Trace()


def trace_of(headers: Iterable[tuple[str, object]]) -> Trace:
    """The trace of a request with these headers, names in lower case; a header may come in several parts.

    What is not of the right form is left out, and a ``tracestate`` with its ``traceparent``.
    """
    found: dict[str, str] = {}
    for name, value in headers:
        if name in _NAMES and isinstance(value, str):
            found[name] = f"{found[name]},{value}" if name in found else value
    if not found:
        return NO_TRACE
    parent = _PARENT.fullmatch(found.get("traceparent", ""))
    if parent is None:
        found = {name: value for name, value in found.items() if name == "baggage"}
    metadata = tuple((name, value) for name, value in found.items() if _SENDABLE.fullmatch(value))
    return Trace(metadata, f" trace={parent[1]}" if parent is not None else "")
