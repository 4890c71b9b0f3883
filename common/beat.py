"""Whether an event loop still turns, and what it says of itself: a task of it notes both, anybody reads that.

A process whose loop hangs keeps its ports, its threads and its place in every list: only what runs in the loop itself
can tell.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

_PERIOD_S = 0.5
_LATE_S = 3.0


class Beat:
    """Of the loop that runs ``run``. ``file`` gets what ``tell`` says, for whoever watches from another process."""

    def __init__(self, file: Path | None = None, tell: Callable[[], str] = str) -> None:
        self._file = file
        self._tell = tell
        self._at_s = time.monotonic()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._at_s = time.monotonic()
            if self._file is not None:
                with contextlib.suppress(OSError):  # no place left, say: whoever watches sees an old file
                    _replace(self._file, self._tell())
            await asyncio.sleep(_PERIOD_S)

    def why_dead(self) -> str:
        """Empty while the loop turns."""
        return _late(time.monotonic() - self._at_s)


def why_dead(file: Path) -> str:
    """The same by the file of a beat. Raises ``OSError`` while there is none."""
    return _late(time.time() - file.stat().st_mtime)


def _replace(file: Path, text: str) -> None:
    """In one step: nobody reads half of it."""
    temporary = file.with_name(f".{file.name}")
    temporary.touch(mode=0o600)
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def _late(age_s: float) -> str:
    return f"its event loop has not turned for {age_s:.0f} s" if age_s > _LATE_S else ""
