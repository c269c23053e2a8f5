"""Images, and chat requests with images."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int, width: int = 40, height: int = 32) -> bytes:
    """A PNG of noise, the same for equal arguments."""
    shape = (height, width, 3)
    pixels = np.random.default_rng([seed, *shape]).integers(0, 256, shape, dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """A URL that holds an image."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def talk(*parts: str | bytes, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """Body of a chat of texts and images in this order: greedy, of a fixed length."""
    content = [_part(part) for part in parts]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    } | fields


def _part(part: str | bytes) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = data_url(part)
    return {"type": "image_url", "image_url": {"url": url}}


def tokens_of(answer: dict[str, Any]) -> list[int]:
    """Token ids of a chat's only choice."""
    (choice,) = answer["choices"]
    tokens: list[int] = choice["token_ids"]
    return tokens


def streamed_tokens(events: Sequence[dict[str, Any]]) -> list[int]:
    """Token ids of a streamed chat's only choice."""
    return [t for event in events for c in event["choices"] for t in c.get("token_ids") or ()]
