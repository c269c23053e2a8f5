"""Where the time of one prompt went, as stages made from the marks of its nodes and endpoint.

The stages on the *critical path* to a token follow each other without gap or overlap, from the
arrival of the client's request until the token was written; so they add up to the whole time. The
path to the first token leads through the node that prefills. The path to the second token of a
hand-over goes on through the wire, the check of the digests and the first step of the decode node.

All times are seconds on this machine's monotonic clock (`EngineClient` converts them). Times of
other machines are only known within the latency of a message, so each border is clamped between
its neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from kvbaton.messages.engine import Mark
from kvbaton.messages.openai import RequestTimings

Token = Literal["first_token", "second_token"]


ARRIVAL = (
    ("wire", "landed"),
    ("verify", "verified"),
    ("wire", "load_failed"),
    ("recompute", "first_token"),
)
"""Stages of a prompt's KV on its way to the decode node, as (stage, mark that ends it)."""
BESIDE = {
    "source": (("queue", "scheduled"), ("prefill", "first_token")),
    "alone": (("queue", "scheduled"), ("prefill", "first_token")),
    "encoder": (("queue", "scheduled"), ("encode", "first_token")),
    "target": (("queue", "loading"), ("reserve", "accepted"), *ARRIVAL[:2]),
}
"""By part of a node: stages that are shown even if no token waits for them."""


@dataclass
class NodePart:
    """The part of a node in serving the prompt.

    Attributes:
        node: Id of the node; empty for the node that the client asked itself.
        part: ``source``, ``target``, ``alone``, ``successor`` of a target or ``encoder``
            (``encoder-1`` for the second item).
        attempt: Number of the router's attempt.
        marks: By name of a mark, when it first happened.
    """

    node: str
    part: str
    attempt: int
    marks: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """A named stretch of time.

    Attributes:
        name: Name of the stage.
        start: Start in seconds.
        end: End in seconds.
        part: Node where it took place; None for the endpoint that the client asked.
        paths: Tokens on whose critical path it is.
    """

    name: str
    start: float
    end: float
    part: NodePart | None = None
    paths: tuple[Token, ...] = ()


class RequestTimeline:
    """Times of one prompt, in seconds on the monotonic clock.

    Args:
        arrived: When the head of the client's request arrived.
        role: Part of a node that the client asked itself: ``source``, ``target``, ``encoder`` or
            ``alone``. On a router marks name the parts.

    Attributes:
        submitted: When the parsed and tokenized prompt was given to the source.
        written: When the first and the second token were written.
        num_written: Number of tokens written, of all choices.
        ended: When the answer was complete, or failed.
        parts: Parts of nodes, in the order in which the nodes were asked.
    """

    def __init__(self, arrived: float, role: str = "") -> None:
        self.arrived = arrived
        self.submitted: float | None = None
        self.written: dict[Token, float] = {}
        self.num_written = 0
        self.ended: float | None = None
        self._role = role
        self._parts: dict[tuple[str, str, int], NodePart] = {}

    def submit(self) -> None:
        """Note that the prompt is given to the source now."""
        self.submitted = time.monotonic()

    def add(self, marks: Iterable[Mark]) -> None:
        """Add marks; of marks with equal names the first counts."""
        for mark in marks:
            key = mark.node, mark.part or self._role, mark.attempt
            part = self._parts.get(key)
            if part is None:
                part = self._parts[key] = NodePart(*key)
            part.marks.setdefault(mark.name, mark.at)

    def wrote(self, num_tokens: int, choice: int = 0) -> None:
        """Note that tokens of a choice were written now."""
        self.num_written += num_tokens
        if choice or len(self.written) == 2 or not num_tokens:
            return
        now = time.monotonic()
        if self.written or num_tokens > 1:
            self.written["second_token"] = now
        self.written.setdefault("first_token", now)

    @property
    def parts(self) -> list[NodePart]:
        """Parts of nodes."""
        return list(self._parts.values())

    # --- stages ---

    def path(self, token: Token) -> list[Stage]:
        """Stages on the critical path to a token; empty if the token was not written."""
        end = self.written.get(token)
        if end is None or self.submitted is None:
            return []
        at, stages = self.arrived, []
        for name, border, part in self._borders(token, end):
            until = min(max(border, at), end)
            stages.append(Stage(name, at, until, part))
            at = until
        return [*stages, Stage("respond", at, end)]

    def _borders(self, token: Token, end: float) -> Iterator[tuple[str, float, NodePart | None]]:
        """Yield (stage, end, node) in order of time, as far as marks are known."""
        assert self.submitted is not None
        yield "tokenize", self.submitted, None
        begun = [part for part in self.parts if part.marks.get("asked", 0.0) <= end]
        attempt = max((part.attempt for part in begun), default=0)
        # A request that moved has two targets; the later one has no part in these tokens.
        last = {part.part: part for part in reversed(begun) if part.attempt == attempt}
        source, target = last.get("source"), last.get("target", last.get("alone"))
        prefills = source if source is not None and "first_token" in source.marks else target
        if prefills is None:
            return
        asked = prefills.marks.get("asked")
        if asked is not None:
            yield "retry" if attempt else "route", asked, None
        if prefills.part != "target" or "loading" not in prefills.marks:
            yield from _known(prefills, ("queue", "scheduled"), ("prefill", "first_token"))
        else:  # the client asked the target, for a prompt that another node prefills
            yield from _known(prefills, ("queue", "loading"), ("reserve", "accepted"), *ARRIVAL)
        if token == "second_token" and "second_token" in prefills.marks:
            yield from _known(prefills, ("first_decode", "second_token"))
        elif token == "second_token" and target is not None:
            if prefills is not target:
                yield from _known(target, *ARRIVAL)
            yield from _known(target, ("first_decode", "second_token"))

    def stages(self) -> list[Stage]:
        """All stages: those of the critical paths, and other stages of each node."""
        ends = self.ended or time.monotonic()
        found: list[Stage] = []
        on_path: dict[tuple[str, str, int], Stage] = {}
        for token in ("first_token", "second_token"):
            for stage in self.path(token):
                part = stage.part
                key = stage.name, *(("", 0) if part is None else (part.part, part.attempt))
                known = on_path.get(key)
                if known is not None and (known.start, known.end) == (stage.start, stage.end):
                    both = Stage(stage.name, stage.start, stage.end, part, ("first_token", token))
                    found[found.index(known)] = on_path[key] = both
                else:
                    on_path[key] = Stage(stage.name, stage.start, stage.end, part, (token,))
                    found.append(on_path[key])
        sources = {part.attempt: part.marks for part in self.parts if part.part == "source"}
        for part in self.parts:
            at = min(part.marks.get("asked", self.submitted or self.arrived), ends)
            for name, border, _ in _known(part, *BESIDE.get(part.part.partition("-")[0], ())):
                if name == "wire":  # which begins when the first token is sampled
                    at = min(max(at, sources.get(part.attempt, {}).get("first_token", at)), ends)
                until = min(max(border, at), ends)
                if (name, part.part, part.attempt) not in on_path:
                    found.append(Stage(name, at, until, part))
                at = until
        return found

    def timings(self) -> RequestTimings:
        """Timings for a client that asks for them, in milliseconds."""
        reserve = [stage for stage in self.stages() if stage.name == "reserve"]
        return RequestTimings(
            total_ms=_ms((self.ended or time.monotonic()) - self.arrived),
            first_token_ms=self._after("first_token"),
            second_token_ms=self._after("second_token"),
            first_token=self._parts_of("first_token"),
            second_token=self._parts_of("second_token"),
            reserve_ms=_ms(reserve[-1].end - reserve[-1].start) if reserve else None,
            nodes={part.part: part.node for part in self.parts if part.node},
        )

    def _parts_of(self, token: Token) -> dict[str, float]:
        return {stage.name: _ms(stage.end - stage.start) for stage in self.path(token)}

    def _after(self, token: Token) -> float | None:
        at = self.written.get(token)
        return None if at is None else _ms(at - self.arrived)


def _known(part: NodePart, *borders: tuple[str, str]) -> Iterator[tuple[str, float, NodePart]]:
    """Yield (stage, end, node) for those of (stage, mark that ends it) whose mark is there."""
    failed = "load_failed" in part.marks
    for name, mark in borders:
        if mark in part.marks and (failed or name != "recompute"):
            yield name, part.marks[mark], part


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
