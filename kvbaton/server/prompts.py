"""Prompts: the forms that ``/v1/completions`` takes, and encoding them off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvbaton.errors import RequestError
from kvbaton.text.tokenizer import Tokenizer

INLINE_CHARACTERS = 4096
"""A longer text is encoded in a thread, so that it does not hold up the other streams."""

Prompt = str | list[int]


def split_prompts(prompt: str | Sequence[str | int | list[int]], most: int) -> list[Prompt]:
    """The field `prompt` as a list of prompts: a text, texts, token ids, or lists of token ids.

    Raises:
        RequestError: it is empty, too long, or a mixture that means nothing.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [list(prompt)]  # type: ignore[arg-type]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if int in kinds or not prompts:
        raise RequestError(
            "prompt must be a text, a list of texts, a list of token ids or a list of such lists",
            param="prompt",
        )
    if len(prompts) > most:
        raise RequestError(f"prompt may hold at most {most} prompts", param="prompt")
    return prompts


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text."""
    if len(text) <= INLINE_CHARACTERS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
