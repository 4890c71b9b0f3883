"""What an error says, so that it can be sent: gRPC puts it into a header."""

from __future__ import annotations

MAX_BYTES = 1200  # gRPC writes three for one that is no ASCII, and refuses headers from 8 KiB on
_END_BYTES = 400  # what a caller can do stands there


def sendable(text: str) -> str:
    """``text`` with what UTF-8 cannot hold escaped, and without its middle where it is too long.

    An abort with any other text raises, and its call would never end.
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_BYTES:
        return data.decode()
    cut = " [...] "
    begin, end = data[: MAX_BYTES - _END_BYTES - len(cut)], data[-_END_BYTES:]
    return begin.decode(errors="ignore") + cut + end.decode(errors="ignore")
