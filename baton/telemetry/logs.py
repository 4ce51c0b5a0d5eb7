"""Logs of a process on standard error: lines of text, or one JSON object per line for log collectors."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


_TEXT: Final = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # Not msgspec's encoder: it refuses half surrogates, which paths may have.
        return json.dumps(line)


def configure_logs(level: LogLevel = LogLevel.INFO, form: LogFormat = LogFormat.TEXT) -> None:
    """Log from now on at this level and in this form, in place of what was configured before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form is LogFormat.JSON else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
