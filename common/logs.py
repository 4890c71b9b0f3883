"""One line per event: ``time=... level=... logger=... message key=value ...``, or the same as JSON. Never a prompt."""

import json
import logging
import sys
import time

_FORMAT = "time=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"


class _JsonFormatter(logging.Formatter):
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
    formatter: logging.Formatter = _JsonFormatter() if as_json else logging.Formatter(_FORMAT)
    formatter.converter = time.gmtime
    formatter.default_time_format, formatter.default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # No line tells its caller, thread or process: not looking for them halves what a line costs.
    logging._srcfile = None  # the way the logging HOWTO names
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for name in ("uvicorn.access", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)  # each request has its one line already
