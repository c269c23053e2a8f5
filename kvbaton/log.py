"""The log on standard error: lines of text, or of JSON for collectors of logs."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

from typing_extensions import override

from kvbaton.errors import ConfigError

VARIABLE = "KVBATON_LOG_FORMAT"
"""Variable with the format, which child processes inherit: ``text`` (the default) or ``json``."""
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
OF_REQUEST = "request %s"
"""Messages about one request begin so, with its id."""


def begin_log(level: str | int) -> None:
    """Send this process's log to standard error.

    Args:
        level: Lowest level to log; names in any case.

    Raises:
        ConfigError: The environment names no such format.
    """
    chosen = os.environ.get(VARIABLE) or "text"
    if chosen not in ("text", "json"):
        raise ConfigError(VARIABLE, f"{chosen!r} is neither text nor json")
    logging.basicConfig(
        level=level.upper() if isinstance(level, str) else level, format=TEXT_FORMAT
    )
    if chosen == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())


class JsonFormatter(logging.Formatter):
    """Makes each record one line: an object with the keys that docs/observability.md names."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        args = record.args
        if str(record.msg).startswith(OF_REQUEST) and isinstance(args, tuple) and args:
            line["request_id"] = args[0]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
