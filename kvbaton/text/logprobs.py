"""Log probabilities in the formats of the two OpenAI endpoints, and of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from msgspec.structs import replace

from kvbaton.messages.openai import ChatLogprobs, CompletionLogprobs, LogprobEntry, TopLogprobEntry
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.types import TokenLogprobs

Entry = TypeVar("Entry", TokenLogprobs, TokenLogprobs | None)

FLOOR = -9999.0
"""Replaces minus infinity, which JSON can't express."""


def token_name(tokenizer: Tokenizer, token: int, *, as_ids: bool) -> str:
    """A token's text, or its id as ``token_id:5`` (vLLM's form), since texts may be equal."""
    return f"token_id:{token}" if as_ids else tokenizer.token_text(token)


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    *,
    offset: int = 0,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Log probabilities in the format of ``/v1/completions``.

    Args:
        tokenizer: Tokenizer of the model.
        token_ids: n tokens.
        logprobs: n entries; None for a token without one (the first of a prompt).
        offset: Number of characters of the tokens before these.
        as_ids: See `token_name`.
    """
    tokens = [token_name(tokenizer, token, as_ids=as_ids) for token in token_ids]
    lengths = (len(tokenizer.token_text(token)) for token in token_ids)
    tops: list[dict[str, float] | None] = []
    for token, entry in zip(tokens, logprobs, strict=True):
        if entry is None:
            tops.append(None)
            continue
        # The chosen token is always included, so there may be one more than asked for.
        found = {token: _finite(entry.logprob)}
        for top in entry.top:
            name = token_name(tokenizer, top.token, as_ids=as_ids)
            found.setdefault(name, _finite(top.logprob))
        tops.append(found)
    return CompletionLogprobs(
        text_offset=[*accumulate(lengths, initial=offset)][:-1],
        token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in logprobs],
        tokens=tokens,
        top_logprobs=tops,
    )


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    *,
    as_ids: bool = False,
) -> ChatLogprobs:
    """Log probabilities in the format of ``/v1/chat/completions``.

    Args:
        tokenizer: Tokenizer of the model.
        token_ids: n tokens.
        logprobs: n entries.
        as_ids: See `token_name`.
    """

    def named(token: int, logprob: float) -> tuple[str, float, list[int]]:
        name, data = token_name(tokenizer, token, as_ids=as_ids), tokenizer.token_bytes(token)
        return name, _finite(logprob), list(data)

    entries = []
    for token, entry in zip(token_ids, logprobs, strict=True):
        tops = [TopLogprobEntry(*named(top.token, top.logprob)) for top in entry.top]
        entries.append(LogprobEntry(*named(token, entry.logprob), tops))
    return ChatLogprobs(entries)


@dataclass(frozen=True)
class Logprob:
    """One candidate at one position.

    Attributes:
        logprob: Natural logarithm of its probability.
        rank: Rank of the candidate; 1 is the likeliest.
        decoded_token: Text of the token.
    """

    logprob: float
    rank: int
    decoded_token: str


Logprobs = list[dict[int, Logprob] | None]
"""Per token, its candidates by id, including the chosen one; None for the first of a prompt."""


def named_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
) -> Logprobs:
    """Log probabilities of n tokens by candidate, made from n entries."""
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


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> Logprobs:
    """`named_logprobs` with finite numbers, for JSON in vLLM's format."""
    return named_logprobs(tokenizer, token_ids, [floored(entry) for entry in logprobs])


def floored(entry: Entry) -> Entry:
    """An entry with finite numbers, for JSON, where minus infinity would become null."""
    if entry is None:
        return None
    top = tuple(replace(candidate, logprob=_finite(candidate.logprob)) for candidate in entry.top)
    return replace(entry, logprob=_finite(entry.logprob), top=top)


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
