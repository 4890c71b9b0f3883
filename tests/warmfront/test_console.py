from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console
from rich.text import Text

from warmfront.console import Grid, Progress


def test_the_line_of_progress_leaves_the_standard_streams_to_whoever_changes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = io.StringIO()
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back after the test
    shown = io.StringIO()
    with Progress(Console(file=shown, force_terminal=True)) as progress:
        progress.update("starting Ray")
        sys.stdout = elsewhere
    assert sys.stdout is elsewhere
    assert "starting Ray (0s)" in shown.getvalue()


def test_the_seconds_go_on_by_themselves_and_begin_anew_with_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    console = Console(file=io.StringIO(), force_terminal=True)

    def line(progress: Progress) -> str:
        with console.capture() as captured:
            console.print(progress._line())
        return captured.get()

    with Progress(console) as progress:
        progress.update("starting Ray")
        now = 113.0
        assert "starting Ray (13s)" in line(progress)
        progress.update("draining")
        assert "draining (0s)" in line(progress)


def test_what_is_no_terminal_gets_plain_columns_no_wider_than_their_cells() -> None:
    table = Grid(("name", "tokens", "why"), "name", left=("name", "why"), title="two rows")
    table.rows += [("w0", "1,200", Text("warm", style="green")), ("long-name", "7", "")]
    out = io.StringIO()
    Console(file=out, width=10, soft_wrap=True).print(table)
    assert out.getvalue() == "two rows\nname       tokens  why\nw0          1,200  warm\nlong-name       7\n"
