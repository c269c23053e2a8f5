"""Which architectures there are, by the name that ``config.json`` gives. Imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvbaton.errors import ConfigError

if TYPE_CHECKING:
    from kvbaton.engine.models.llama import LlamaForCausalLM

ARCHITECTURES = {
    "LlamaForCausalLM": "kvbaton.engine.models.llama",
    "MistralForCausalLM": "kvbaton.engine.models.mistral",
    "Qwen2ForCausalLM": "kvbaton.engine.models.qwen2",
    "Qwen3ForCausalLM": "kvbaton.engine.models.qwen3",
}
"""The module of each architecture; its class has the architecture's name."""


def check_architecture(architecture: str) -> None:
    """Raise `ConfigError` for an architecture that is not implemented."""
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            "--model",
            f"architecture {architecture!r} is not supported; supported: {sorted(ARCHITECTURES)}",
        )


def model_class(architecture: str) -> type[LlamaForCausalLM]:
    """The class of an architecture. Raises `ConfigError` if there is none."""
    check_architecture(architecture)
    found: type[LlamaForCausalLM] = getattr(
        importlib.import_module(ARCHITECTURES[architecture]), architecture
    )
    return found
