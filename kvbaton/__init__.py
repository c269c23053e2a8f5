"""kvbaton: serve large language models with prefill and decode on separate nodes."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from kvbaton.version import __version__

if TYPE_CHECKING:
    from kvbaton.llm.offline import LLM as LLM
    from kvbaton.llm.streaming import AsyncLLM as AsyncLLM
    from kvbaton.llm.streaming import TextSamplingParams as SamplingParams
    from kvbaton.text.structured import StructuredOutputs as StructuredOutputs

# Torch reads this variable when it is imported. cuBLAS does not split long rows of a weight among
# enough thread blocks: with the down projection of an 8B model it takes 1.06 to 1.17 times as long
# as cuBLASLt, for 32 to 192 rows.
os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StructuredOutputs", "__version__"]

_LAZY = {
    "LLM": ("kvbaton.llm.offline", "LLM"),
    "AsyncLLM": ("kvbaton.llm.streaming", "AsyncLLM"),
    "SamplingParams": ("kvbaton.llm.streaming", "TextSamplingParams"),
    "StructuredOutputs": ("kvbaton.text.structured", "StructuredOutputs"),
}
"""The Python API: (module, attribute) by name, imported at first use: commands start fast."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvbaton' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)
