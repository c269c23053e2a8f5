"""What a scheduler asks about the encoder outputs that its prompts need."""

from __future__ import annotations

import sys

from kvbaton.engine.request import Sequence
from kvbaton.engine.step import ItemRows
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest


class ItemOutputs:
    """Of a model that takes text only. `EncoderCacheManager` is that of a model that sees."""

    def check(self, request: AddRequest) -> None:
        """Refuse items that can never be encoded.

        Raises:
            RequestError: they overlap, lie outside of the prompt, or one is too large; or the model
                takes none.
        """
        if request.items:
            raise RequestError("this model takes text only", param="items")

    def request(self, sequence: Sequence, start: int) -> None:
        """Ask for items with tokens from `start` on: for all, unless there was no room for them."""

    def ready_until(self, sequence: Sequence, start: int) -> int:
        """Where the first item begins that is not here, at least `start`; beyond all if all are."""
        return sys.maxsize

    def wait(self, sequence: Sequence, start: int) -> None:
        """Let a sequence that lacks the item at `start` wait beside the queue."""

    def rows(self, sequence: Sequence, start: int, end: int) -> tuple[ItemRows, ...]:
        """Where the outputs are that tokens [start, end) need."""
        return ()

    def computed(self, sequence: Sequence) -> None:
        """Let go of outputs whose tokens are computed."""

    def retired(self, sequence: Sequence) -> None:
        """A sequence is over."""
