"""The log as JSON, for collectors of logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
import logging
from kvbaton.log import begin_log
begin_log("info")
logger = logging.getLogger("kvbaton.somewhere")
logger.debug("not this")
logger.warning("request %s: %d\\n%s", "mine", 503, "no node")
try:
    raise ValueError("broken")
except ValueError:
    logger.exception("it broke")
"""


def run(*words: str, log_format: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "KVBATON_LOG_FORMAT": log_format}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=env, timeout=60
    )


def test_each_record_is_one_object() -> None:
    first, second = map(json.loads, run("-c", PROGRAM, log_format="json").stderr.splitlines())
    assert first.pop("time").endswith("Z")
    assert isinstance(first.pop("process"), int)
    assert first == {
        "level": "warning",
        "logger": "kvbaton.somewhere",
        "message": "request mine: 503\nno node",
        "request_id": "mine",
    }
    assert (second["level"], second["message"]) == ("error", "it broke")
    assert second["exception"].endswith("ValueError: broken")


def test_it_is_text_unless_asked_for() -> None:
    said = run("-c", PROGRAM, log_format="").stderr
    assert " WARNING kvbaton.somewhere: request mine: 503\nno node\n" in said


def test_an_unknown_format_is_named() -> None:
    found = run("-m", "kvbaton", "router", "--port", "0", log_format="yaml")
    assert found.returncode == 2
    assert found.stderr == "kvbaton: error: KVBATON_LOG_FORMAT: 'yaml' is neither text nor json\n"
