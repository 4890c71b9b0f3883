"""One line per event: ``time=... level=... logger=... message key=value ...``, or the same as JSON. Never a prompt."""

import json
import logging
import sys
import time


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


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(*, as_json: bool, level: str) -> None:
    """Send the log to standard error in the chosen form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else _Formatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # No line tells its caller, thread or process: not looking for them halves what a line costs.
    logging._srcfile = None  # the way the logging HOWTO names
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for name in ("uvicorn.access", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)  # each request has its one line already
