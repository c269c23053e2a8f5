"""Log probabilities in the shapes of the two OpenAI endpoints and of vLLM's prompt logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from kvbaton.messages.openai import ChatLogprobs, CompletionLogprobs, LogprobEntry, TopLogprobEntry
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.types import TokenLogprobs

Entry = TypeVar("Entry", TokenLogprobs, TokenLogprobs | None)

FLOOR = -9999.0
"""Stands for minus infinity, which JSON can't say."""


def token_name(tokenizer: Tokenizer, token: int, *, as_ids: bool) -> str:
    """A token's text or, as vLLM names it by its id, ``token_id:5``: texts may be equal."""
    return f"token_id:{token}" if as_ids else tokenizer.token_text(token)


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    *,
    offset: int = 0,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Shape of ``/v1/completions``.

    Args:
        tokenizer: the model's.
        token_ids: n tokens.
        logprobs: n entries; None for a token without one (the first of a prompt).
        offset: characters of the tokens before these.
        as_ids: see `token_name`.
    """
    tokens = [token_name(tokenizer, token, as_ids=as_ids) for token in token_ids]
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(tokenizer.token_text(token_id))
    tops: list[dict[str, float] | None] = []
    for token, entry in zip(tokens, logprobs, strict=True):
        # The chosen token is always among them, so there may be one more than asked for.
        found = None if entry is None else {token: _finite(entry.logprob)}
        if entry is not None and found is not None:
            for top in entry.top:
                name = token_name(tokenizer, top.token, as_ids=as_ids)
                found.setdefault(name, _finite(top.logprob))
        tops.append(found)
    return CompletionLogprobs(
        text_offset=offsets,
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
    """Shape of ``/v1/chat/completions``: n tokens and their n entries; `as_ids`: `token_name`."""

    def named(token: int, logprob: float) -> tuple[str, float, list[int]]:
        name, data = token_name(tokenizer, token, as_ids=as_ids), tokenizer.token_bytes(token)
        return name, _finite(logprob), list(data)

    entries = []
    for token, entry in zip(token_ids, logprobs, strict=True):
        tops = [TopLogprobEntry(*named(top.token, top.logprob)) for top in entry.top]
        entries.append(LogprobEntry(*named(token, entry.logprob), tops))
    return ChatLogprobs(entries)


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """The shape of vLLM: per prompt token None, or entries by token id, the prompt's own first."""
    entries: list[dict[str, Any] | None] = []
    for token, entry in zip(token_ids, logprobs, strict=True):
        if entry is None:
            entries.append(None)
            continue
        ranked = [(token, entry.logprob, entry.rank)]
        ranked += [(top.token, top.logprob, top.rank) for top in entry.top if top.token != token]
        entries.append(
            {
                str(token_id): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(token_id),
                }
                for token_id, logprob, rank in ranked
            }
        )
    return entries


def floored(entry: Entry) -> Entry:
    """An entry that JSON can carry, where minus infinity would become null."""
    if entry is None:
        return None
    top = tuple(replace(candidate, logprob=_finite(candidate.logprob)) for candidate in entry.top)
    return replace(entry, logprob=_finite(entry.logprob), top=top)


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
