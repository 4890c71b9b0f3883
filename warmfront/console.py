"""What a person sees while they wait: one updating line on a terminal, sparse plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text

stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """One line on standard error; silently nothing when the terminal has been closed meanwhile."""
    with contextlib.suppress(OSError):
        stderr.print(Text(f"warmfront: {text}"))


class Progress:
    """Shows what is going on, with the seconds since the start, on standard error."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._text = ""
        self._status: Status | None = None

    def update(self, text: str, detail: str = "") -> None:
        """Says ``text``, on a plain stream only when it differs from the last; ``detail`` is for terminals alone."""
        if stderr.is_terminal:
            if self._status is None:
                self._status = stderr.status("", spinner_style="dim")
                with contextlib.suppress(OSError):
                    self._status.start()
            self._status.update(Text(f"{detail or text} ({time.monotonic() - self._start:.0f}s)"))
        elif text != self._text:
            say(text)
        self._text = text

    def close(self) -> None:
        """Takes the line away."""
        if self._status is not None:
            with contextlib.suppress(OSError):
                self._status.stop()
            self._status = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
