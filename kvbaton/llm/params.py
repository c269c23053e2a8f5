"""How to choose tokens, and what comes of it; names and shapes as vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvbaton.messages import engine as messages
from kvbaton.server.validation import bad_words_token_ids, check_stops
from kvbaton.text.choice import TextOptions
from kvbaton.text.structured import BODY, StructuredOutputs, joined, wanted
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.types import TokenLogprobs


class TextSamplingParams(
    messages.SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The engine's parameters (`messages.SamplingParams`), and how tokens become text.

    Attributes:
        max_tokens: most tokens to generate; None for as many as the model's length leaves.
        stop: strings that end the text.
        include_stop_str_in_output: keep the stop string, or stop token, in the text.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: what the text must be.
        bad_words: texts that are not generated, with and without a space before them.
        truncate_prompt_tokens: keep so many of the prompt's tokens, the last ones; -1 keeps as many
            as leave room for `max_tokens`.
    """

    max_tokens: int | None = 16  # type: ignore[assignment]  # the engine is told a number
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    bad_words: Sequence[str] = ()
    truncate_prompt_tokens: int | None = None

    def for_engine(self, room: int, tokenizer: Tokenizer) -> messages.SamplingParams:
        """The part that the engine is told.

        Args:
            room: tokens that fit behind the prompt.
            tokenizer: for `bad_words`.

        Raises:
            ValueError: a field has a wrong type; the message names it.
            RequestError: `structured_outputs` or `bad_words` are wrong.
        """
        fields = {name: getattr(self, name) for name in messages.SamplingParams.__struct_fields__}
        if self.max_tokens is None:
            fields["max_tokens"] = max(1, room)
        fields["bad_words_token_ids"] += bad_words_token_ids(tokenizer, self.bad_words)
        if (found := wanted(None, self.structured_outputs)) is not None:
            _, piece = found
            fields["grammar"] = joined(f"start: {BODY}", {"body": piece})
        return msgspec.convert(fields, messages.SamplingParams)

    def for_text(self) -> TextOptions:
        """The part that makes text of tokens.

        Raises:
            RequestError: `stop` is wrong.
        """
        return TextOptions(
            stop=check_stops(self.stop),
            include_stop=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            min_tokens=self.min_tokens,
        )


@dataclass(frozen=True)
class Logprob:
    """One candidate at one position.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 is the likeliest.
        decoded_token: its text.
    """

    logprob: float
    rank: int
    decoded_token: str


Logprobs = list[dict[int, Logprob] | None]
"""Per token, its candidates by id, the chosen one among them; None for the first of a prompt."""


def named_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
) -> Logprobs:
    """Log probabilities of n tokens by candidate, from n entries."""
    found: Logprobs = []
    for token, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            found.append(None)
            continue
        named = {token: Logprob(entry.logprob, entry.rank, tokenizer.token_text(token))}
        for rival in entry.top:
            text = tokenizer.token_text(rival.token)
            named.setdefault(rival.token, Logprob(rival.logprob, rival.rank, text))
        found.append(named)
    return found


@dataclass
class CompletionOutput:
    """One choice, or what is new of it.

    Attributes:
        index: of the choice.
        text: generated.
        token_ids: generated, the stop token included.
        logprobs: one per token, if asked for.
        finish_reason: ``stop`` or ``length``; None while it goes on.
        stop_reason: the stop string or stop token id that ended it, if one did.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def append(self, delta: CompletionOutput) -> None:
        """Add what is new of this choice."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *delta.logprobs]
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass
class RequestOutput:
    """Answer to one prompt, or what is new of it.

    Attributes:
        request_id: of the request.
        prompt: its text; None if it came as tokens.
        prompt_token_ids: its tokens.
        outputs: the choices; of a delta, the one that has news.
        prompt_logprobs: one per prompt token, if asked for.
        num_cached_tokens: prompt tokens taken from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether all of `outputs` have ended."""
        return all(output.finish_reason is not None for output in self.outputs)
