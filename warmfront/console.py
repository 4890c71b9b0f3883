"""What a person sees while they wait: one updating line on a terminal, sparse plain lines elsewhere."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)

_AMPLE_WIDTH = 10_000  # characters; no table is that wide


def counted(number: int, noun: str) -> str:
    """As 1 block, 1,200 blocks."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def say(text: str) -> None:
    """One line on standard error; silently nothing when the terminal has been closed meanwhile."""
    with contextlib.suppress(OSError):
        stderr.print(Text(f"warmfront: {text}"))


def in_columns(head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str]) -> str:
    """Lines of plain columns: those named in ``left`` begin together, the others, of figures, end together."""
    lines = [head, *rows]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]

    def padded(cell: str, name: str, width: int) -> str:
        blanks = " " * (width - cell_len(cell))
        return cell + blanks if name in left else blanks + cell

    return "\n".join("  ".join(map(padded, line, head, widths)).rstrip() for line in lines)


@dataclass
class Grid:
    """A table whose cells are never cut.

    Where a terminal is too narrow for it, each row becomes its name on one line and the other cells below. What is no
    terminal gets plain columns, as wide as their widest cells and with nothing behind the last one.
    """

    columns: Sequence[str]
    name: str  # the column that names a row
    left: Collection[str] = ()  # columns of words
    title: str = ""
    rows: list[Sequence[str | Text]] = field(default_factory=list)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="italic")
        if not console.is_terminal:
            rows = [[cell if isinstance(cell, str) else cell.plain for cell in row] for row in self.rows]
            yield Text(in_columns(self.columns, rows, self.left))
            return
        table = Table(box=None, pad_edge=False)
        for column in self.columns:
            table.add_column(column, justify="left" if column in self.left else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        width = Measurement.get(console, options.update(width=_AMPLE_WIDTH), table).maximum
        if width <= options.max_width:
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
    """Shows what is going on, and for how many seconds it has been, on standard error."""

    def __init__(self, console: Console = stderr) -> None:
        self._console = console
        self._text, self._detail, self._since = "", "", time.monotonic()
        self._spinner = Spinner("dots", style="dim")
        self._live: Live | None = None

    def update(self, text: str, detail: str = "") -> None:
        """Says ``text``, on a plain stream only when it differs from the last; ``detail`` is for terminals alone."""
        is_new = text != self._text
        if is_new:
            self._since = time.monotonic()
        self._text, self._detail = text, detail
        if not self._console.is_terminal:
            if is_new:
                say(text)
        elif self._live is None:
            # It leaves the standard streams as they are: Ray is given another one while this is on, which would go
            # back to the terminal with the rest.
            self._live = Live(
                get_renderable=self._line,
                console=self._console,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            with contextlib.suppress(OSError):
                self._live.start()

    def close(self) -> None:
        """Takes the line away."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def _line(self) -> Spinner:
        self._spinner.update(text=Text(f"{self._detail or self._text} ({time.monotonic() - self._since:.0f}s)"))
        return self._spinner

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
