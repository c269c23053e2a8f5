"""Which architectures there are, by the name that ``config.json`` gives. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvbaton.errors import ConfigError

if TYPE_CHECKING:
    from kvbaton.engine.models.llama import LlamaForCausalLM

ARCHITECTURES = {
    "LlamaForCausalLM": "kvbaton.engine.models.llama",
    "MistralForCausalLM": "kvbaton.engine.models.mistral",
    "Qwen2ForCausalLM": "kvbaton.engine.models.qwen2",
    "Qwen2_5_VLForConditionalGeneration": "kvbaton.engine.models.qwen2_5_vl",
    "Qwen3ForCausalLM": "kvbaton.engine.models.qwen3",
    "Qwen3VLForConditionalGeneration": "kvbaton.engine.models.qwen3_vl",
}
"""The module of each architecture; its class has the architecture's name."""


def check_architecture(architecture: str, own_code: Mapping[str, Any] | None = None) -> None:
    """Refuse what is not implemented.

    Args:
        architecture: as ``config.json`` names it.
        own_code: its ``auto_map``: classes of the checkpoint that ``transformers`` would run.

    Raises:
        ConfigError: naming the supported architectures.
    """
    supported = f"supported architectures: {', '.join(sorted(ARCHITECTURES))}"
    if own_code:
        raise ConfigError(
            "--model",
            f"{architecture!r} brings code of its own (auto_map, trust_remote_code), which is "
            f"never run; {supported}",
        )
    if architecture not in ARCHITECTURES:
        raise ConfigError("--model", f"architecture {architecture!r} is unknown; {supported}")


def model_class(architecture: str) -> type[LlamaForCausalLM]:
    """The class of an architecture. Raises `ConfigError` if there is none."""
    check_architecture(architecture)
    found: type[LlamaForCausalLM] = getattr(
        importlib.import_module(ARCHITECTURES[architecture]), architecture
    )
    return found
