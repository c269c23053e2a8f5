"""Turns the tokens of one choice into text for clients, emitted once it can no longer change.

This does not use `tokenizers.decoders.DecodeStream`, which can't flush the text left at the end,
holds invalid bytes back for ever, and raises if a token changes the text before it.
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
        stop: Strings that end the text.
        include_stop: Keep the stop string, or the stop token's text.
        skip_special_tokens: Leave special tokens out.
        min_tokens: Number of first tokens in whose text stop strings do not count.
        marks: Marks by token id, for an `output_parser.OutputParser`.
        message_mark: See `output_parser.OutputFormat`.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    marks: Mapping[int, str] = {}
    message_mark: str = ""


class TextDelta(Struct, frozen=True, kw_only=True):
    """New text and tokens of one choice.

    Attributes:
        text: New text; may be empty while text is held back.
        token_ids: New tokens, the stop token included.
        logprobs: One per new token, if asked for.
        finish_reason: On the last delta, why the choice ended.
        stop_reason: The stop string or stop token id.
    """

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChoiceText:
    """Detokenizes one choice and ends it at a stop string.

    After a delta with a `finish_reason` the choice is over and takes no more output.

    Args:
        tokenizer: Tokenizer of the model.
        prompt: Tokens of the prompt, as context for the first token's text.
        options: How tokens become text.
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
        # A last token that only ended the text is not part of it.
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
        """Read tokens up to a stop string; return how many it took, and the string."""
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

    Text is held back only while it may be the beginning of a stop string. The match that *ends*
    first wins (of several the longest), so the result does not depend on how the text is cut.

    Args:
        stops: Non-empty strings.
        include: Keep the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str, *, active: bool = True) -> tuple[str, str | None]:
        """Feed new text.

        Args:
            text: New text from the detokenizer.
            active: False while `min_tokens` is not reached; text of that time is never part of a
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
        for stop in self._stops:  # find the longest suffix of held text that begins a stop string
            longest = min(held, len(stop) - 1)
            ends = (n for n in range(longest, 0, -1) if stop.startswith(self._held[-n:]))
            cut = min(cut, held - next(ends, 0))
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def flush(self) -> str:
        """Text that is held back, for the end of the choice."""
        held, self._held = self._held, ""
        return held


# --- tokens to text ---

REPLACEMENT = "\ufffd"
MAX_INCOMPLETE = 3
"""Maximum number of U+FFFD for an incomplete character: one per byte but the last of four."""
SLIDE_AT = 16
"""Number of tokens from which the window is cut at the last clean boundary."""
MAX_WINDOW = 64
"""Number of tokens at which a window without a clean boundary is emitted as it is (garbage)."""
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
        """Make the detokenizer that suits a tokenizer.

        Args:
            tokenizer: Tokenizer of the model.
            prompt: Tokens before the first one; their text is not emitted.
            skip_special_tokens: Leave special tokens out of the text.
            marks: By token id, a mark that replaces the token's text.
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
        """Text that is left at the end; incomplete characters become U+FFFD."""


class ByteDetokenizer(Detokenizer):
    """Detokenizer for byte-level tokenizers, whose text is the bytes of all tokens as UTF-8.

    It takes a fifth of the time of `WindowDetokenizer`. `Detokenizer.of` explains the arguments.
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
    """Detokenizer for all tokenizers.

    A window of the latest tokens is decoded as a whole, because a token's text may depend on the
    token before it (leading spaces, bytes of one character). Text is emitted once it no longer ends
    in U+FFFD, and then the window moves on: the prefix-and-read-offset technique of Hugging Face's
    text-generation-inference, with a bounded window.
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
    """Detokenizer that replaces certain tokens by marks; characters never span a mark.

    Args:
        make: Makes the detokenizer of the tokens between marks.
        marks: Marks by token id.
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
    """Length of `text` without a possibly incomplete character at its end."""
    end = len(text)
    while end > max(0, len(text) - MAX_INCOMPLETE) and text[end - 1] == REPLACEMENT:
        end -= 1
    return end
