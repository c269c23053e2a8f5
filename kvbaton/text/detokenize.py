"""Incremental detokenizing: text as far as it can't change any more.

Not by `tokenizers.decoders.DecodeStream`: it can't give what is left at the end, keeps broken bytes
for ever, and raises where a token changes the text before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from typing_extensions import override

from kvbaton.text.tokenizer import Tokenizer

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
