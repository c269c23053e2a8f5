"""What the endpoint needs from whoever makes tokens: a node's engine, or the router."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from kvbaton.messages.engine import AddRequest, Output


class TokenSource(Protocol):
    """Tokens in, tokens out."""

    def generate(self, request: AddRequest) -> AsyncGenerator[Output]:
        """Run a request until every choice has a `finish_reason`.

        Closing the generator early (``aclose``) cancels the request everywhere.

        Raises:
            RequestError: the request can't be served as sent.
            EngineDeadError: nothing can be served.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What bounds a request.

    Attributes:
        max_model_len: longest prompt plus output, in tokens.
        vocab_size: token ids are below it; 0 takes the tokenizer's.
    """

    max_model_len: int
    vocab_size: int = 0
