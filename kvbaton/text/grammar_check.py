"""Checks grammars by compiling them, without a vocabulary, in processes of their own.

Compiling can't be interrupted, and a few bytes may keep `llguidance` busy for hours while its
memory grows (a ``multipleOf`` of a large prime). So a process checks one grammar at a time. If that
takes too long, or too much memory, the process ends, and another one is started for the next.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from subprocess import PIPE, Popen
from typing import Any

from kvbaton.errors import RequestError
from kvbaton.text.structured import check_length

CHECK_S = 10.0
"""Maximum seconds to check a grammar; one that takes longer is refused."""
PATIENCE_S = 4 * CHECK_S
"""Maximum seconds to check a grammar and those before it."""
PROCESSES = 4
"""Maximum number of grammars that are checked at the same time."""
MAX_MEMORY = 2 << 30
"""Bytes of address space of a process that checks grammars."""
KEPT = 64
"""Number of grammars whose error is remembered: these do not wait for others."""

_threads = ThreadPoolExecutor(PROCESSES, "grammar-check")
_idle: SimpleQueue[Popen[bytes]] = SimpleQueue()
_known: dict[str, str] = {}  # errors of the latest grammars


async def checked_grammar(grammar: str, field: str) -> str:
    """Check a grammar, and return it.

    Raises:
        RequestError: It is wrong, too large, or takes too long to compile; or too many others do.
    """
    check_length(grammar, field)
    error = _known.pop(grammar, None)
    if error is None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE_S):
                error = await loop.run_in_executor(_threads, _error, grammar)
        except TimeoutError:
            problem = "too many grammars are waiting to be checked; retry later"
            raise RequestError(problem, param=field, status=429, code="overloaded") from None
    _known[grammar] = error  # as the latest
    if len(_known) > KEPT:
        del _known[next(iter(_known))]
    if error:
        raise RequestError(f"can't be followed: {error}"[:1000], param=field)
    return grammar


def _error(grammar: str) -> str:
    """Error of a grammar; empty if it is right.

    Raises:
        RuntimeError: The process that compiles it ended for another reason than its limits.
    """
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps([grammar, CHECK_S]).encode() + b"\n")
        process.stdin.flush()
    if answer := process.stdout.readline():
        _idle.put(process)
        error: str = json.loads(answer)
        return error
    code = _ended(process)
    if code == -signal.SIGALRM:
        return f"took more than {CHECK_S:g} s to compile"
    if code in (-signal.SIGABRT, -signal.SIGKILL):  # by Rust's allocator, or Linux
        return f"took more than {MAX_MEMORY >> 30} GiB to compile"
    raise RuntimeError(f"the process that checks grammars ended with code {code}")


def _process() -> Popen[bytes]:
    """A process that is idle, or a new one."""
    with suppress(Empty):
        while True:
            process = _idle.get_nowait()
            if process.poll() is None:
                return process
            _ended(process)
    path = os.pathsep.join(path or "." for path in sys.path)
    command, env = [sys.executable, "-m", __name__], os.environ | {"PYTHONPATH": path}
    return Popen(command, stdin=PIPE, stdout=PIPE, env=env)


def _ended(process: Popen[bytes]) -> int:
    """Close the pipes of a process that has ended, and return its code."""
    with suppress(BrokenPipeError), process:
        pass
    return process.wait()


@atexit.register
def _end_all() -> None:
    with suppress(Empty):
        while True:
            process = _idle.get_nowait()
            process.kill()
            _ended(process)


# --- the process ---


def main() -> None:
    """Read grammars, each with its time limit in seconds, and write their errors."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its parent ends
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLTokenizer

    bytes_alone = LLTokenizer("byte")  # a vocabulary of single bytes
    for line in sys.stdin.buffer:
        grammar, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # SIGALRM ends the process
        error = compile_error(grammar, bytes_alone)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(error), flush=True)


def compile_error(grammar: str, vocabulary: Any) -> str:
    """Compile a grammar; returns its error, which is empty if it is right."""
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False)
    is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if is_wrong:
        return "; ".join(messages)
    # A rule that only leads to itself is valid, but no first byte matches it.
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if not matcher.is_error():  # as for special tokens, which this vocabulary lacks
        matcher.compute_bitmask()
        if error := matcher.get_error():
            return "no text fits it" if error.startswith("NoExtensionBias") else str(error)
    return ""


if __name__ == "__main__":
    main()
