"""Requests to simulate, and readers of published traces.

Traces do not record tokens; what matters is which prompts begin alike. A prompt is a sequence of
*pieces*, (content, tokens): equal contents are equal tokens.
"""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from kvbaton.errors import ConfigError
from kvbaton.types import TokenIds

MOONCAKE_BLOCK = 512
"""Number of tokens that each of a trace's ``hash_ids`` stands for."""
FORMATS = "Mooncake's (JSON lines) nor Azure's (CSV with TIMESTAMP, ContextTokens, GeneratedTokens)"
MOST_TOKENS = 1 << 24
"""Maximum tokens of a prompt or an answer, each of which takes memory or time; longer than any
context."""
END_TOKEN = 1
"""Ends a sequence; contents are larger numbers."""
FIRST_CONTENT = 2
Piece = tuple[int, int]


@dataclass(frozen=True)
class TraceRequest:
    """One request.

    Attributes:
        at: Seconds since the start of the trace, or with `after`, since the end of that request.
        pieces: Content and tokens of each piece of the prompt.
        output_tokens: Number of tokens that it generates, at least 1.
        output: Content of those; a later prompt may repeat it.
        after: Index of the request whose end it waits for; None if it waits for none.
    """

    at: float
    pieces: tuple[Piece, ...]
    output_tokens: int
    output: int
    after: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return sum(tokens for _, tokens in self.pieces)

    def answer(self) -> tuple[Piece, ...]:
        """Its answer, as pieces of a later prompt."""
        before = self.output_tokens - 1
        return ((self.output, before), (END_TOKEN, 1)) if before else ((END_TOKEN, 1),)


def token_ids(pieces: Sequence[Piece]) -> TokenIds:
    """Tokens of a prompt."""
    ids = array("I")
    for content, tokens in pieces:
        ids += array("I", [content]) * tokens
    return ids


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace: Mooncake's JSON lines, or Azure's CSV.

    Raises:
        ConfigError: It is neither; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--trace", f"{path} can't be read: {error}") from error
    reader = _mooncake if text.lstrip().startswith("{") else _azure
    requests = reader(path, text)
    if not requests:
        raise ConfigError("--trace", f"{path} has no requests: neither {FORMATS}")
    requests.sort(key=lambda request: request.at)
    begin = requests[0].at
    return [replace(request, at=request.at - begin) for request in requests]


def _mooncake(path: Path, text: str) -> list[TraceRequest]:
    """``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` per line."""
    requests: list[TraceRequest] = []
    unique = 1 << 30  # outputs, and ends of prompts, are shared with no other request
    contents: dict[int, int] = {}  # by hash, which may be any number

    def content(name: int) -> int:
        return FIRST_CONTENT + contents.setdefault(name, len(contents))

    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            length, hashes = int(row["input_length"]), [int(h) for h in row["hash_ids"]]
            at, out = float(row["timestamp"]) / 1e3, int(row["output_length"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise _malformed(path, number, error) from error
        whole = length // MOONCAKE_BLOCK
        right = 0 < length and len(hashes) >= whole and 0 <= out <= MOST_TOKENS
        if not (right and math.isfinite(at)):
            told = f"{len(hashes)} hashes, {length} tokens, {out} generated"
            raise _malformed(path, number, ValueError(told))
        pieces = [(content(name), MOONCAKE_BLOCK) for name in hashes[:whole]]
        if rest := length - whole * MOONCAKE_BLOCK:
            end = content(hashes[whole]) if len(hashes) > whole else unique + 2 * number
            pieces.append((end, rest))
        requests.append(TraceRequest(at, tuple(pieces), max(1, out), unique + 2 * number + 1))
    return requests


def _azure(path: Path, text: str) -> list[TraceRequest]:
    """``TIMESTAMP,ContextTokens,GeneratedTokens``; which prompts share prefixes is not recorded."""
    requests: list[TraceRequest] = []
    first: datetime | None = None
    rows = csv.DictReader(text.splitlines())
    while True:
        try:
            if (row := next(rows, None)) is None:
                return requests
            stamp = datetime.fromisoformat(row["TIMESTAMP"].strip())
            stamp = stamp.replace(tzinfo=stamp.tzinfo or UTC)
            length, out = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            if min(length, out) < 0 or max(length, out) > MOST_TOKENS:
                raise ValueError(f"a prompt of {length} tokens, {out} generated")
        except csv.Error as error:  # `line_num` does not count this line
            raise _malformed(path, rows.line_num + 1, error) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _malformed(path, rows.line_num, error) from error
        first = first or stamp
        content = FIRST_CONTENT + 2 * rows.line_num
        pieces = ((content, max(1, length)),)
        seconds = (stamp - first).total_seconds()
        requests.append(TraceRequest(seconds, pieces, max(1, out), content + 1))


def _malformed(path: Path, line: int, error: Exception) -> ConfigError:
    return ConfigError(
        "--trace",
        f"{path}:{line} is neither {FORMATS}: {type(error).__name__}: {error}",
    )


def cut(
    requests: Sequence[TraceRequest],
    *,
    begin: float = 0.0,
    seconds: float = math.inf,
    speed: float = 1.0,
) -> list[TraceRequest]:
    """A part of a trace, with requests coming `speed` times as fast.

    Args:
        requests: Requests in order of their times.
        begin: Seconds of the trace to leave out.
        seconds: Seconds of arrivals to keep, in simulated time.
        speed: Factor of the arrival rate; delays after other requests stay.
    """
    kept: list[TraceRequest] = []
    place: dict[int, int] = {}
    for index, request in enumerate(requests):
        if request.after is None:
            at = (request.at - begin) / speed
            if not 0 <= at < seconds:
                continue
            request = replace(request, at=at)
        elif request.after in place:
            request = replace(request, after=place[request.after])
        else:
            continue
        place[index] = len(kept)
        kept.append(request)
    return kept


Generator = Callable[[int, float, float], list[TraceRequest]]
"""(seed, seconds, requests or sessions per second) -> a trace."""
