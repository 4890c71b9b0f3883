"""Kinds of values that flags and arguments take: each says in its one line of error what it wants."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import click

LONGEST_S = 365 * 24 * 3600.0  # timers and deadlines on the wire end somewhere
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType[float]):
    """Seconds, written as ``60s``, ``200ms``, ``5m`` or ``1h``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds; fails with one line for anything without a unit."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no duration: write 200ms, 60s, 5m or 1h", param, ctx)
        seconds = float(match[1]) * _SECONDS[match[2]]
        if seconds > LONGEST_S:
            self.fail(f"{value!r} is more than a year: at most {format_duration(LONGEST_S)}", param, ctx)
        return seconds


def format_duration(seconds: float) -> str:
    """The shortest spelling that ``Duration`` reads back to the same value."""
    return f"{seconds:.10g}s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.10g}ms"


class Integer(click.IntRange):
    """A whole number within bounds. Click's own name for the kind, "integer range", makes no sentence."""

    name = "integer"


class Number(click.FloatRange):
    """A number within bounds. What is no number lies within none, though no comparison says so."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; fails with one line for nan and infinities too."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


class NamedFolder(click.ParamType[str]):
    """``NAME=PATH``, with the path made absolute: parts run in folders of their own."""

    name = "name=path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The same text; what it must look like is checked by the configuration."""
        name, separator, path = str(value).partition("=")
        return f"{name}={Path(path).absolute()}" if separator and path else str(value)


PORT = Integer(0, 65535)
COUNT = Integer(min=0)
FILE = click.Path(path_type=Path)
THERE = click.Path(exists=True, dir_okay=False, path_type=Path)  # a file that is there


def mask_url(url: str) -> str:
    """The URL without its password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"{url.partition('://')[0]}://***"
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))
