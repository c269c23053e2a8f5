"""From the tokens of one choice to what a client sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from kvbaton.messages.engine import Output
from kvbaton.text.detokenize import Detokenizer
from kvbaton.text.stop import StopStrings
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.types import TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How tokens become text.

    Attributes:
        stop: strings that end the text.
        include_stop: keep the stop string, or the stop token's text.
        skip_special_tokens: leave special tokens out.
        min_tokens: no stop string counts in the text of the first this many tokens.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


class TextDelta(Struct, frozen=True, kw_only=True):
    """What is new of one choice.

    Attributes:
        text: to show; may be empty while text is held back.
        token_ids: the new tokens, the stop token included.
        logprobs: one per new token, if asked for.
        finish_reason: on the last delta.
        stop_reason: the stop string or stop token id.
    """

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChoiceText:
    """Detokenizes one choice and ends it at a stop string.

    Once a delta with a `finish_reason` has come, the choice is over and takes no more output.

    Args:
        tokenizer: the model's.
        prompt: its tokens, as context for the first token's text.
        options: how to make text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], options: TextOptions) -> None:
        self._options = options
        self._detokenizer = Detokenizer.of(
            tokenizer, prompt, skip_special_tokens=options.skip_special_tokens
        )
        self._stops = (
            StopStrings(options.stop, include=options.include_stop) if options.stop else None
        )
        self._num_tokens = 0

    def push(self, output: Output) -> TextDelta:
        """Take the next output of this choice."""
        tokens, finish, reason = output.token_ids, output.finish_reason, output.stop_reason
        # A last token that only ended the text is not to be read.
        hidden = finish == "stop" and not self._options.include_stop
        visible = tokens[:-1] if hidden else tokens
        if self._stops is None:
            text = "".join(map(self._detokenizer.push, visible))
            if finish is not None:
                text += self._detokenizer.flush()
            return TextDelta(
                text=text,
                token_ids=list(tokens),
                logprobs=None if output.logprobs is None else list(output.logprobs),
                finish_reason=finish,
                stop_reason=reason,
            )
        shown: list[str] = []
        count = len(tokens)
        stop = self._find_stop(self._stops, tokens, len(visible), finish, shown)
        if stop is not None:
            count, reason = stop
            finish = "stop"
        elif finish is not None:
            shown.append(self._stops.flush())
        return TextDelta(
            text="".join(shown),
            token_ids=list(tokens[:count]),
            logprobs=None if output.logprobs is None else list(output.logprobs[:count]),
            finish_reason=finish,
            stop_reason=reason,
        )

    def _find_stop(
        self,
        stops: StopStrings,
        tokens: Sequence[int],
        visible: int,
        finish: str | None,
        shown: list[str],
    ) -> tuple[int, str] | None:
        """Read tokens up to a stop string: how many that took, and which it is."""
        for position, token in enumerate(tokens):
            self._num_tokens += 1
            new = self._detokenizer.push(token) if position < visible else ""
            if stop := self._watch(stops, new, shown):
                return position + 1, stop
        if finish and (stop := self._watch(stops, self._detokenizer.flush(), shown)):
            return len(tokens), stop
        return None

    def _watch(self, stops: StopStrings, new: str, shown: list[str]) -> str | None:
        text, stop = stops.push(new, active=self._num_tokens > self._options.min_tokens)
        shown.append(text)
        return stop
