"""``kvbaton up`` at a pseudo-terminal: a live table, and logs that leave it whole."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_chat import ESCAPES, Terminal
from tests.e2e.test_commands import STOP_S, UP
from tests.support.processes import descendants_of, is_alive
from tests.support.servers import completion, poll

pytestmark = pytest.mark.e2e

OWN_LINE = re.compile(r"(\[(router|prefill-0|decode-[01])\]|   ) ")
SHOW_CURSOR = "\x1b[?25h"


def test_up_shows_what_happens_and_starts_again_what_was_killed(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    words = ["up", f"--model={checkpoint()}", "--served-model-name=tiny", *UP]
    nodes = ["--prefill=1", "--decode=2", "--transport=tcp", "--log-level=info"]
    nodes.append("--policy=least-loaded")  # by cost so short a prompt is not worth a hand-over
    terminal = Terminal([*words, *nodes], tmp_path, forked=True)
    up = terminal.process.pid
    try:
        url = terminal.until(r"ready: (http://\S+)/v1")[1]
        terminal.until(r"Node +Role +State +Running +Waiting +Tokens/s +KV sent +KV used")
        terminal.until(r"0 running, 0 waiting · 0 answered")
        body = json.dumps(completion([5] * 100, max_tokens=100)).encode()
        headers = {"Content-Type": "application/json"}
        for _ in range(2):
            asked = urllib.request.Request(f"{url}/v1/completions", body, headers)
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert answer.status == 200
        terminal.until(r"2 answered · \d+\.\d tokens/s")
        terminal.until(r"prefill-0 +prefill +ready +\d+ +\d+ +[\d.]+ +[\d.]+ kB +\d+%")
        terminal.until(r"[1-9][\d.]* kB in all")

        children = descendants_of(up)
        router, *started = map(int, Path(f"/proc/{up}/task/{up}/children").read_text().split())
        assert len(started) == 3
        for pid in (router, *started):
            assert b"tests.support.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        victim = started[-1]
        os.kill(victim, signal.SIGKILL)
        terminal.until(r"decode-1 was killed by signal 9")
        terminal.until(r"decode-1: (unhealthy|gone)")
        terminal.until(r"decode-1 +decode +unhealthy|prefill-0 +prefill +ready")
        terminal.until(r"decode-1: ready in")
        children |= descendants_of(up)
        os.kill(up, signal.SIGINT)
        terminal.until("stopping")
        terminal.read_to_end()
        assert terminal.process.wait(STOP_S) == 0
        assert SHOW_CURSOR in terminal.all
        logged = [
            line for line in re.split(r"[\r\n]+", ESCAPES.sub("", terminal.all)) if "INFO" in line
        ]
        assert len(logged) > 5
        garbled = [line for line in logged if not OWN_LINE.match(line)]
        assert garbled == []
        assert "Traceback" not in terminal.all
        assert "killing" not in terminal.all
        readies = re.findall(r"(\S+-\d): ready in", ESCAPES.sub("", terminal.all))
        assert sorted(readies) == ["decode-0", "decode-1", "decode-1", "prefill-0"]
        poll("no process", lambda: not any(map(is_alive, children)), 5.0, lambda: terminal.all)
    finally:
        terminal.close()
