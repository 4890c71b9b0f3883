"""What an error says, so that gRPC can send it."""

from __future__ import annotations


def sendable(text: str) -> str:
    """``text`` with what UTF-8 cannot hold escaped. An abort with such a text raises, and its call would never end."""
    return text.encode("utf-8", "backslashreplace").decode()
