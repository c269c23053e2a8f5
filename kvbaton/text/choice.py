"""From the tokens of one choice to what a client sees of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvbaton.messages.engine import Output
from kvbaton.text.detokenize import Detokenizer
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.types import TokenLogprobs


class TextOptions(Struct, frozen=True, kw_only=True):
    """How tokens become text.

    Attributes:
        stop: strings that end the text.
        include_stop: keep the stop string, or the stop token's text.
        skip_special_tokens: leave special tokens out.
        min_tokens: no stop string counts in the text of the first this many tokens.
        marks: what stands for which tokens, for an `output_parser.OutputParser`.
        message_mark: see `output_parser.OutputFormat`.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    marks: Mapping[int, str] = {}
    message_mark: str = ""


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
            tokenizer, prompt, skip_special_tokens=options.skip_special_tokens, marks=options.marks
        )
        self._stops = (
            StopStrings(options.stop, include=options.include_stop) if options.stop else None
        )
        self._num_tokens = 0
        self._in_message = True
        if options.message_mark:
            marked = (options.marks[token] for token in reversed(prompt) if token in options.marks)
            self._in_message = next(marked, "") == options.message_mark

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
        if self._options.message_mark and new and new[-1] in self._options.marks.values():
            self._in_message = new[-1] == self._options.message_mark
        active = self._num_tokens > self._options.min_tokens and self._in_message
        text, stop = stops.push(new, active=active)
        shown.append(text)
        return stop


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
        held = len(self._held)
        cut = held
        for stop in self._stops:  # the longest end of the held text that begins a stop string
            longest = min(held, len(stop) - 1)
            ends = (n for n in range(longest, 0, -1) if stop.startswith(self._held[-n:]))
            cut = min(cut, held - next(ends, 0))
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def flush(self) -> str:
        """What is held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
