"""One line per event: ``time=... level=... logger=... message key=value ...``, or the same as JSON. Never a prompt.

As JSON each ``key=value`` of a line's format is a field beside the whole ``message``, read from the format and its
arguments, not from the text: no value, whatever it holds, passes for a field.
"""

import json
import logging
import math
import re
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

_CONVERSION = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[diouxXeEfFgGcrsa%]")
_NAMED = re.compile(rf"(?:^|(?<= ))(\w+)=(?:({_CONVERSION.pattern})|([^\s%]+))")
_DECIMAL = re.compile(r"\d+\.\d+")
_SUFFIX = re.compile(r"(?: \w+=\S+)+")  # an argument without a name that is fields itself, as a trace's


class _Formatter(logging.Formatter):
    """A line of text. The whole seconds of the last one are kept: a router writes hundreds of lines in each."""

    _second, _text = -1, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        second = int(record.created)
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._text}.{int(record.msecs):03d}Z"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return f"time={self.formatTime(record)} level={record.levelname} logger={record.name} {record.message}"


class JsonFormatter(_Formatter):
    """A line as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, however long."""
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields(record):
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    args = record.args if isinstance(record.args, tuple) else ()
    named, literal = _named(str(record.msg))
    yield from literal
    for number, arg in enumerate(args):
        if number in named:
            name, conversion = named[number]
            yield name, _value(name, conversion, arg)
        elif arg and isinstance(arg, str) and _SUFFIX.fullmatch(arg):
            yield from (tuple(field.split("=", 1)) for field in arg.split())  # type: ignore[misc]


@lru_cache(maxsize=512)
def _named(form: str) -> tuple[dict[int, tuple[str, str]], list[tuple[str, str]]]:
    """Of a line's format: its arguments' names and conversions by their numbers, and what is said outright."""
    starts = [match.start() for match in _CONVERSION.finditer(form) if match[0] != "%%"]
    named, literal = {}, []
    for match in _NAMED.finditer(form):
        if match[2] is None:
            literal.append((match[1], match[3].rstrip(":,;")))
        elif match[2] != "%%":
            named[starts.index(match.start(2))] = (match[1], match[2])
    return named, literal


def _value(name: str, conversion: str, arg: object) -> Any:
    """As exact as the text is. Seconds that may be absent come as text already, and what is absent as "-"."""
    if isinstance(arg, str):
        if arg == "-":
            return None
        return float(arg) if name.endswith("_s") and _DECIMAL.fullmatch(arg) else arg
    if isinstance(arg, int):
        return arg
    text = conversion % (arg,)
    if isinstance(arg, float):
        return float(text) if math.isfinite(arg) else None  # JSON knows no others
    return text


def configure_logging(*, as_json: bool, level: str) -> None:
    """Send the log to standard error in the chosen form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else _Formatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # No line tells its caller, thread or process: not looking for them halves what a line costs.
    logging._srcfile = None  # the way the logging HOWTO names
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for name in ("uvicorn.access", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)  # each request has its one line already
