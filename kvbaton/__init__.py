"""kvbaton: serve large language models with prefill and decode on separate nodes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvbaton.version import __version__

if TYPE_CHECKING:
    from kvbaton.llm.offline import LLM as LLM
    from kvbaton.llm.params import TextSamplingParams as SamplingParams
    from kvbaton.llm.streaming import AsyncLLM as AsyncLLM
    from kvbaton.text.structured import StructuredOutputs as StructuredOutputs

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StructuredOutputs", "__version__"]

_LAZY = {
    "LLM": ("kvbaton.llm.offline", "LLM"),
    "AsyncLLM": ("kvbaton.llm.streaming", "AsyncLLM"),
    "SamplingParams": ("kvbaton.llm.params", "TextSamplingParams"),
    "StructuredOutputs": ("kvbaton.text.structured", "StructuredOutputs"),
}
"""The Python API: its names are looked up when they are used, so that the commands start fast."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvbaton' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)
