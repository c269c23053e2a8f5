"""Incremental detokenizing: text as far as it can't change any more.

Not by `tokenizers.decoders.DecodeStream`: it can't give what is left at the end, keeps broken bytes
for ever, and raises where a token changes the text before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvbaton.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_INCOMPLETE = 3
"""Most U+FFFD that an incomplete character shows as: a byte each of a four-byte character."""
SLIDE_AT = 16
"""Tokens in the window from which it is cut at the last clean boundary."""
MAX_WINDOW = 64
"""A window that has not become clean by then holds garbage, and is emitted as it is."""
PRIMING_TOKENS = 8


class Detokenizer:
    """Turns the tokens of one choice into text, one token at a time.

    A window of the latest tokens is decoded as a whole, since a token's text may depend on the one
    before it (leading spaces, bytes of one character). Text is emitted once it no longer ends in
    U+FFFD, and the window then moves on: the prefix-and-read-offset technique of Hugging Face's
    text-generation-inference, with a bound on the window.

    Args:
        tokenizer: the model's.
        prompt: tokens before the first; their text is not emitted.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._window = list(prompt[-PRIMING_TOKENS:])
        self._clean = len(self._window)
        text = self._decode(self._window)
        self._emitted = text[: _stable(text)]

    def push(self, token: int) -> str:
        """New text after one more token; empty while a character is incomplete."""
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

    def flush(self) -> str:
        """What is left at the end: incomplete characters as U+FFFD."""
        return self._decode(self._window)[len(self._emitted) :]


def _stable(text: str) -> int:
    """Length of `text` without what may be an incomplete character at its end."""
    end = len(text)
    while end > max(0, len(text) - MAX_INCOMPLETE) and text[end - 1] == REPLACEMENT:
        end -= 1
    return end
