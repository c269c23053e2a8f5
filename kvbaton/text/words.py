"""Token ids of short ASCII texts from those of their words: a quarter of `tokenizers`' time.

A byte-level BPE splits a text into words by a regular expression and merges within each. A text of
a few hundred words has few that were not seen before, and `tokenizers`, which remembers them too,
makes half a dozen allocations for each. The expression is Oniguruma's; for ASCII alone the same
can be said to `re`. What can't be, and any other text, is left to `tokenizers`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

LONGEST_TEXT = 4096
"""A longer one is encoded in a thread: there only `tokenizers` lets other threads go on."""
MAX_WORDS = 1 << 16
"""Words remembered; then it starts anew."""
MAX_LEARNED = 16
"""A text with more unknown words is left to `tokenizers`, which is faster then."""

# What `ByteLevel` splits by if it is to: GPT-2's expression.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PROPERTY = re.compile(r"\\p\{(\w+)\}")
# Means something else to `re`, or was not looked into: anchors, intersections, nested classes,
# `{2}+`, and escapes but those of spaces, properties and punctuation.
_FOREIGN = re.compile(r"[$^](?<!\[\^)|&&|\[[^\]]*\[|\{[\d,]+\}\+|\\(?![srntSpP]|[^\w\s])|\\P")
_ASCII = [chr(code) for code in range(128)]
_PROBE = (
    "I'm HE'LL it's x_y2024, 3.14159 = [a]{b}(c)<d>;\t\t\n\n  two  spaces \r\n\r\n end. \n x "
    "'s 'S'tA " + " ".join(_ASCII) + "".join(_ASCII) + "  "
)


class WordCache:
    """Encodes what it can of one tokenizer's texts. Make one with `of`.

    Args:
        words: finds the words of an ASCII text, and nothing else.
        added: finds tokens that are no words, by their content; one group around each.
        added_ids: of those.
        hard: finds added tokens whose rules are more than their content.
        pieces: encodes a word.
        around: ids that a text begins and ends with if special tokens are added.
    """

    def __init__(
        self,
        words: re.Pattern[str],
        added: re.Pattern[str],
        added_ids: dict[str, int],
        hard: re.Pattern[str],
        pieces: tokenizers.Tokenizer,
        around: tuple[list[int], list[int]],
    ) -> None:
        self._words, self._added, self._added_ids, self._hard = words, added, added_ids, hard
        self._pieces = pieces
        self._begin, self._end = around
        self._ids: dict[str, Sequence[int]] = {}

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, pipeline: dict[str, Any]) -> WordCache | None:
        """For a tokenizer, if it is of the right kind.

        Args:
            backend: the tokenizer, without truncation and padding.
            pipeline: its ``tokenizer.json``.
        """
        words = _words_of(pipeline)
        around = None if words is None else _around(backend)
        if words is None or around is None:
            return None
        pieces = tokenizers.Tokenizer(backend.model)
        pieces.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        plain, hard = {}, []
        for number, token in backend.get_added_tokens_decoder().items():
            if not token.content.isascii() or not token.content:
                continue
            if token.lstrip or token.rstrip or token.single_word or token.normalized:
                hard.append(token.content)
            else:
                plain[token.content] = number
        found = cls(words, _any_of(plain), plain, _any_of(hard), pieces, around)
        for text in (_PROBE, *_PROBE.split(" "), "<".join(plain)):
            found._learn(found._split(text), len(text))
            if found.encode(text) != backend.encode(text).ids:
                return None
        return found

    def __len__(self) -> int:
        """Words and added tokens that it remembers."""
        return len(self._ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int] | None:
        """Token ids of a text; None if it is none for us."""
        if len(text) > LONGEST_TEXT or not text.isascii() or self._hard.search(text):
            return None
        words = self._split(text)
        try:
            ids = list(chain.from_iterable(map(self._ids.__getitem__, words)))
        except KeyError:
            known = self._learn(words)
            if known is None:
                return None
            ids = list(chain.from_iterable(map(known.__getitem__, words)))
        if add_special_tokens and (self._begin or self._end):
            return [*self._begin, *ids, *self._end]
        return ids

    def _split(self, text: str) -> list[str]:
        """Words and added tokens of a text."""
        texts = self._added.split(text)
        if len(texts) == 1:
            return self._words.findall(text)
        parts = [
            [part] if index % 2 else self._words.findall(part) for index, part in enumerate(texts)
        ]
        return list(chain.from_iterable(parts))

    def _learn(
        self, words: Sequence[str], most: int = MAX_LEARNED
    ) -> Mapping[str, Sequence[int]] | None:
        """Remember words, so many at most; None if some are still unknown.

        The answer loses none of them, also where another thread starts anew.
        """
        if not self._ids or len(self._ids) > MAX_WORDS:
            self._ids = {content: (number,) for content, number in self._added_ids.items()}
        ids = self._ids
        unknown = list({word for word in words if word not in ids})
        learned = unknown[:most]
        for word, found in zip(learned, self._pieces.encode_batch_fast(learned), strict=True):
            ids[word] = tuple(found.ids)
        return ids if len(learned) == len(unknown) else None


def _words_of(pipeline: dict[str, Any]) -> re.Pattern[str] | None:
    """What splits an ASCII text into the words that BPE encodes; None if not known."""
    model, normalizer = pipeline["model"], pipeline.get("normalizer") or {"type": "NFC"}
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    if normalizer.get("type") not in ("NFC", "NFD", "NFKC", "NFKD"):  # nothing to an ASCII text
        return None
    first = pipeline.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", []) if first.get("type") == "Sequence" else [first]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    expression = _GPT2 if steps[-1].get("use_regex", True) else None
    if len(steps) == 2 and expression is None and steps[0].get("type") == "Split":
        split = steps[0]
        if split.get("behavior") == "Isolated" and not split.get("invert"):
            expression = split.get("pattern", {}).get("Regex")
    elif len(steps) > 1:
        return None
    return None if expression is None else _as_ascii(expression)


def _as_ascii(expression: str) -> re.Pattern[str] | None:
    """An expression of Oniguruma's as one of `re`, for ASCII texts; None if that is not known."""
    if _FOREIGN.search(expression):
        return None
    bare = False

    def characters(match: re.Match[str]) -> str:
        nonlocal bare
        name, found = match[1], ""
        if name != "Han":
            bare = bare or len(name) > 2 or name[0] not in "LMNPSZC"
            found = "".join(c for c in _ASCII if unicodedata.category(c).startswith(name))
        before = expression[: match.start()]
        if before.rfind("[") > before.rfind("]"):
            return re.escape(found)
        return f"[{re.escape(found)}]" if found else "(?!)"

    ascii_expression = _PROPERTY.sub(characters, expression).replace("[]", "(?!)")
    try:
        return None if bare else re.compile(ascii_expression, re.ASCII)
    except re.error:
        return None


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Ids before and after every text; None if the text's own differ with them."""
    whole, bare = (backend.encode("a", add_special_tokens=special).ids for special in (True, False))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return None


def _any_of(contents: Sequence[str] | dict[str, int]) -> re.Pattern[str]:
    """Any of them, the longest first; each a group, so that a split keeps it."""
    longest = sorted(contents, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest))})" if longest else "((?!))")
