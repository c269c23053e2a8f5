"""kvbaton: serve large language models with prefill and decode on separate nodes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbaton.llm.offline import LLM as LLM
    from kvbaton.llm.params import SamplingParams as SamplingParams
    from kvbaton.llm.streaming import AsyncLLM as AsyncLLM

__version__ = "0.1.0"

_LAZY = {
    "LLM": "kvbaton.llm.offline",
    "AsyncLLM": "kvbaton.llm.streaming",
    "SamplingParams": "kvbaton.llm.params",
}
"""The Python API: its names are looked up when they are used, so that the commands start fast."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvbaton' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
