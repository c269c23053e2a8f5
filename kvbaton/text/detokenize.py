"""From the tokens of one choice to the text that a client sees, as far as it can't change any more.

Not by `tokenizers.decoders.DecodeStream`: it can't give what is left at the end, keeps broken bytes
for ever, and raises where a token changes the text before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from msgspec import Struct
from typing_extensions import override

from kvbaton.messages.engine import Output
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

    __slots__ = ("_detokenizer", "_in_message", "_num_tokens", "_options", "_stops")

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
        count = len(tokens)
        if self._stops is None:
            text = "".join(map(self._detokenizer.push, visible))
            if finish is not None:
                text += self._detokenizer.flush()
        else:
            shown: list[str] = []
            stop = self._find_stop(self._stops, tokens, len(visible), finish, shown)
            if stop is not None:
                count, reason = stop
                finish = "stop"
            elif finish is not None:
                shown.append(self._stops.flush())
            text = "".join(shown)
        return TextDelta(
            text=text,
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


# --- tokens to text ---

REPLACEMENT = "\ufffd"
MAX_INCOMPLETE = 3
"""Most U+FFFD that an incomplete character shows as: a byte each of a four-byte character."""
SLIDE_AT = 16
"""Tokens in the window from which it is cut at the last clean boundary."""
MAX_WINDOW = 64
"""A window that has not become clean by then holds garbage, and is emitted as it is."""
PRIMING_TOKENS = 8
NO_MARKS: Mapping[int, str] = MappingProxyType({})


class Detokenizer(ABC):
    """Turns the tokens of one choice into text, one token at a time."""

    __slots__ = ()

    @staticmethod
    def of(
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        marks: Mapping[int, str] = NO_MARKS,
    ) -> Detokenizer:
        """The one that suits a tokenizer.

        Args:
            tokenizer: the model's.
            prompt: tokens before the first; their text is not emitted.
            skip_special_tokens: leave special tokens out of the text.
            marks: what certain tokens stand for instead of their text.
        """
        kind = ByteDetokenizer if tokenizer.decodes_bytes else WindowDetokenizer
        if marks:
            return MarkedDetokenizer(
                partial(kind, tokenizer, prompt, skip_special_tokens=skip_special_tokens), marks
            )
        return kind(tokenizer, prompt, skip_special_tokens=skip_special_tokens)

    @abstractmethod
    def push(self, token: int) -> str:
        """New text after one more token; empty while a character is incomplete."""

    @abstractmethod
    def flush(self) -> str:
        """What is left at the end: incomplete characters as U+FFFD."""


class ByteDetokenizer(Detokenizer):
    """For byte-level tokenizers, whose text is the bytes of all tokens as UTF-8.

    It takes a fifth of the time of `WindowDetokenizer`.

    Args:
        tokenizer: see `Detokenizer.of`, as for the others.
    """

    __slots__ = ("_bytes", "_rest")

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._bytes = tokenizer.text_bytes if skip_special_tokens else tokenizer.all_bytes
        before = b"".join(map(self._bytes.__getitem__, prompt[-PRIMING_TOKENS:]))
        self._rest = before[utf_8_decode(before, "replace", False)[1] :]

    @override
    def push(self, token: int) -> str:
        data = self._rest + self._bytes[token]
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    @override
    def flush(self) -> str:
        return self._rest.decode(errors="replace")


class WindowDetokenizer(Detokenizer):
    """For all tokenizers.

    A window of the latest tokens is decoded as a whole, since a token's text may depend on the one
    before it (leading spaces, bytes of one character). Text is emitted once it no longer ends in
    U+FFFD, and the window then moves on: the prefix-and-read-offset technique of Hugging Face's
    text-generation-inference, with a bound on the window.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._window = list(prompt[-PRIMING_TOKENS:])
        self._clean = len(self._window)
        text = self._decode(self._window)
        self._emitted = text[: _stable(text)]

    @override
    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        full = len(self._window) >= MAX_WINDOW
        if not (text.startswith(self._emitted) or full):
            return ""
        ends_clean = full or not text.endswith(REPLACEMENT)
        stable = len(text) if ends_clean else _stable(text)
        delta = text[len(self._emitted) : stable]
        self._emitted += delta
        if ends_clean:
            if len(self._window) >= SLIDE_AT:
                self._window = self._window[self._clean :]
                self._emitted = self._decode(self._window)
            self._clean = len(self._window)
        return delta

    @override
    def flush(self) -> str:
        return self._decode(self._window)[len(self._emitted) :]


class MarkedDetokenizer(Detokenizer):
    """Text in which certain tokens stand for something else; characters end before them.

    Args:
        make: what makes text of the tokens between them.
        marks: by token.
    """

    def __init__(self, make: Callable[[], Detokenizer], marks: Mapping[int, str]) -> None:
        self._make, self._marks = make, marks
        self._between = make()

    @override
    def push(self, token: int) -> str:
        mark = self._marks.get(token)
        if mark is None:
            return self._between.push(token)
        text = self._between.flush() + mark
        self._between = self._make()
        return text

    @override
    def flush(self) -> str:
        return self._between.flush()


def _stable(text: str) -> int:
    """Length of `text` without what may be an incomplete character at its end."""
    end = len(text)
    while end > max(0, len(text) - MAX_INCOMPLETE) and text[end - 1] == REPLACEMENT:
        end -= 1
    return end
