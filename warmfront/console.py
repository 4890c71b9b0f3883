"""What a person sees while they wait: one updating line on a terminal, sparse plain lines elsewhere."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.status import Status
from rich.table import Table
from rich.text import Text

stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)

_AMPLE_WIDTH = 10_000  # characters; no table is that wide


def say(text: str) -> None:
    """One line on standard error; silently nothing when the terminal has been closed meanwhile."""
    with contextlib.suppress(OSError):
        stderr.print(Text(f"warmfront: {text}"))


@dataclass
class Grid:
    """A table whose cells are never cut.

    Where a terminal is too narrow for it, each row becomes its name on one line and the other cells below; what is
    no terminal gets lines as long as they need to be.
    """

    columns: Sequence[str]
    name: str  # the column that names a row
    left: Collection[str] = ()  # columns of words
    title: str = ""
    rows: list[Sequence[str | Text]] = field(default_factory=list)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="italic")
        table = Table(box=None, pad_edge=False)
        for column in self.columns:
            table.add_column(column, justify="left" if column in self.left else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        width = Measurement.get(console, options.update(width=_AMPLE_WIDTH), table).maximum
        if width <= options.max_width or not console.is_terminal:
            yield from console.render(table, options.update(width=width))
            return
        for row in self.rows:
            cells = dict(zip(self.columns, row, strict=True))
            yield Text.assemble(cells.pop(self.name), style="bold")
            # A column and its value stay together: the blank between them is no place to break a line.
            rest = "  ".join(f"{column} {cell}".replace(" ", "\0") for column, cell in cells.items())
            for line in textwrap.wrap(rest, options.max_width - 2, break_long_words=False, break_on_hyphens=False):
                yield Text(f"  {line}".replace("\0", " "))


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
