"""Stop strings: found across token borders, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches the text of one choice for strings that end it.

    Text is held back exactly while it could still be the beginning of a stop string. The match that
    *ends* first wins (the longest of those), so the result does not depend on how the text is cut.

    Args:
        stops: non-empty strings.
        include: keep the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str, *, active: bool = True) -> tuple[str, str | None]:
        """Feed new text.

        Args:
            text: what the detokenizer gave.
            active: False while `min_tokens` is not reached: what passes then is never part of a
                match.

        Returns:
            Text that may be shown now, and the stop string that was found, if any.
        """
        self._held += text
        if not active:
            return self.flush(), None
        starts = ((self._held.find(stop), stop) for stop in self._stops)
        matches = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if matches:
            end, start, stop = min(matches)
            return self._held[: end if self._include else start], stop
        cut = len(self._held) - max(map(self._overlap, self._stops), default=0)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def flush(self) -> str:
        """What is held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(self._held), len(stop) - 1)
        ends = (n for n in range(longest, 0, -1) if stop.startswith(self._held[-n:]))
        return next(ends, 0)
