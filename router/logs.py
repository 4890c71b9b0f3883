"""One line per event: ``level time module message key=value ...``, or the same as JSON. Never a prompt."""

import json
import logging
import sys
import time


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(*, as_json: bool, level: str) -> None:
    """Send the log to standard error in the chosen form."""
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        handler.setFormatter(_JsonFormatter())
    else:
        formatter = logging.Formatter("time=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s")
        formatter.default_time_format = "%Y-%m-%dT%H:%M:%S"
        handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("uvicorn.access", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)  # each request has its one line already
