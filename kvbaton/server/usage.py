"""Counting tokens for ``usage``."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.messages.openai import PromptTokensDetails, SamplingFields, Usage
from kvbaton.server.prompt_request import Event, PromptRequest


class UsageCounter:
    """Tokens of one client's request, as its events go by.

    Args:
        prompts: of the request.
    """

    def __init__(self, prompts: Sequence[PromptRequest]) -> None:
        self._prompt_tokens = sum(len(prompt.request.token_ids) for prompt in prompts)
        self._completion_tokens = 0
        self._cached = [0] * len(prompts)

    def add(self, event: Event) -> None:
        """Count one event."""
        self._completion_tokens += len(event.delta.token_ids)
        if event.cached_tokens > self._cached[event.prompt]:
            self._cached[event.prompt] = event.cached_tokens

    def usage(self) -> Usage:
        """All counted until now; a prompt with several choices counts once."""
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached)),
        )


def wants_usage(body: SamplingFields) -> tuple[bool, bool]:
    """Whether a stream ends with a usage chunk, and whether every chunk carries usage."""
    options = body.stream_options
    if options is None or not options.include_usage:
        return False, False
    return True, bool(options.continuous_usage_stats)
