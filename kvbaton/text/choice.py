"""From the tokens of one choice to what a client sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True, kw_only=True)
class TextDelta:
    """What is new of one choice.

    Attributes:
        text: to show; may be empty while text is held back.
        token_ids: the new tokens, the stop token included.
        logprobs: one per new token, if asked for.
        finish_reason: on the last delta.
        stop_reason: the stop string or stop token id.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
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
        self._detokenizer = Detokenizer(
            tokenizer, prompt, skip_special_tokens=options.skip_special_tokens
        )
        self._stops = StopStrings(options.stop, include=options.include_stop)
        self.num_tokens = 0

    def push(self, output: Output) -> TextDelta:
        """Take the next output of this choice."""
        shown: list[str] = []
        visible = len(output.token_ids) - self._hides_last(output)
        for position, token in enumerate(output.token_ids):
            self.num_tokens += 1
            new = self._detokenizer.push(token) if position < visible else ""
            if stop := self._watch(new, shown):
                return self._delta(output, shown, position + 1, "stop", stop)
        if output.finish_reason and (stop := self._watch(self._detokenizer.flush(), shown)):
            return self._delta(output, shown, len(output.token_ids), "stop", stop)
        if output.finish_reason:
            shown.append(self._stops.flush())
        return self._delta(
            output, shown, len(output.token_ids), output.finish_reason, output.stop_reason
        )

    def _watch(self, new: str, shown: list[str]) -> str | None:
        text, stop = self._stops.push(new, active=self.num_tokens > self._options.min_tokens)
        shown.append(text)
        return stop

    def _hides_last(self, output: Output) -> bool:
        """Whether the last token only ended the text and is not to be read."""
        return output.finish_reason == "stop" and not self._options.include_stop

    @staticmethod
    def _delta(
        output: Output, shown: list[str], count: int, finish: str | None, stop: int | str | None
    ) -> TextDelta:
        logprobs = None if output.logprobs is None else list(output.logprobs[:count])
        return TextDelta(
            text="".join(shown),
            token_ids=list(output.token_ids[:count]),
            logprobs=logprobs,
            finish_reason=finish,
            stop_reason=stop,
        )
