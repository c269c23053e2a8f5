"""The cells of the matrix: which models, ranks, block sizes, transports and KV dtypes are paired.

A family is one line of `FAMILIES`. `ALL` has every cell; `COVERING` few of them, in which every two
values of different axes meet (a pairwise covering array), and every family every value.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvbaton.engine.config import KVCacheDType

FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "qwen3": {"family": "qwen3"},
    "gemma3": {"family": "gemma3", "num_layers": 7, "tied": True},
    "gemma3-vl": {"family": "gemma3_vl", "num_layers": 7, "tied": True},
    "gemma4": {
        "family": "gemma4",
        "num_layers": 7,
        "config": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    },
    "llama4": {"family": "llama4", "num_layers": 4},
    "gpt-oss": {"family": "gpt_oss", "num_layers": 4},
    "mixtral": {"family": "mixtral"},
    "qwen3-moe": {"family": "qwen3_moe"},
    "qwen2.5-vl": {"family": "qwen2_5_vl"},
    "qwen3-vl": {"family": "qwen3_vl"},
    "deepseek-v2": {"family": "deepseek_v2"},
    "deepseek-v3": {"family": "deepseek_v3"},
    "qwen3-next": {"family": "qwen3_next", "num_layers": 4, "head_dim": 64},
}
"""Arguments of `FamilySpec` of each family."""

RANKS = (1, 2, 4)
"""Of P, and of D. The models have two KV heads: of four ranks, two hold the same one."""
P_BLOCK_SIZES = (8, 16)
D_BLOCK_SIZES = (8, 24)
TRANSPORTS = ("nixl", "tcp", "nccl")
KV_DTYPES: tuple[KVCacheDType, ...] = ("auto", "fp8")


class Cell(NamedTuple):
    """One P/D run; names as in `EngineConfig`, of P and of D."""

    family: str
    transport: str
    kv_dtype: KVCacheDType
    p_ranks: int
    p_block_size: int
    d_ranks: int
    d_block_size: int

    @property
    def id(self) -> str:
        """Of the test."""
        ranks = f"tp{self.p_ranks}to{self.d_ranks}"
        sizes = f"blocks{self.p_block_size}to{self.d_block_size}"
        return "/".join((self.family, self.transport, self.kv_dtype, ranks, sizes))


WITH_IMAGES = ("gemma3-vl", "qwen2.5-vl", "qwen3-vl")
"""Families whose cells also have prompts with images, encoded by P and by an encoder node."""
WITHOUT_DRAFTS = ("qwen3-next",)
"""Families that refuse `speculative_config`: their states can't go back behind a rejected token."""
AXES = (FAMILIES, TRANSPORTS, KV_DTYPES, RANKS, P_BLOCK_SIZES, RANKS, D_BLOCK_SIZES)
ALL = [Cell(*values) for values in itertools.product(*AXES)]


def covering() -> list[Cell]:
    """Greedily, of some random cells the one in which most pairs meet that did not before."""
    rng = random.Random(0)
    # Sixteen pairs of ranks that meet over gloo take seconds, on a busy machine too many.
    quick = [c for c in ALL if c.transport != "nccl" or c.p_ranks * c.d_ranks < 16]
    missing = {pair for cell in ALL for pair in pairs(cell)}
    chosen = []
    while missing:
        sought = rng.choice(sorted(missing, key=str))
        tried = [cell for cell in rng.sample(quick, 200) if sought in pairs(cell)]
        if tried:
            best = max(tried, key=lambda cell: len(missing & pairs(cell)))
            missing -= pairs(best)
            chosen.append(best)
    return sorted(chosen)


def pairs(cell: Cell) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    """Every two values of a cell, with their axes."""
    return set(itertools.combinations(enumerate(cell), 2))


COVERING = covering()


class Refusal(NamedTuple):
    """A pair that can't be.

    Attributes:
        p: settings of P; its ``transport`` and the ``seed`` of its checkpoint too.
        d: likewise of D.
        told: what D says of P and of itself.
    """

    p: dict[str, Any]
    d: dict[str, Any]
    told: tuple[str, str]


REFUSED: Mapping[str, Refusal] = {
    "KV dtypes": Refusal({"kv_cache_dtype": "fp8"}, {}, ("float8_e4m3fn", "float32")),
    "dtypes": Refusal({"dtype": "bfloat16"}, {}, ("bfloat16", "float32")),
    "transports": Refusal({"transport": "tcp"}, {"transport": "nixl"}, ("'tcp'", "'nixl'")),
    "weights": Refusal({"seed": 1}, {"seed": 0}, ("weights: source", "target")),
}
"""What is compared when a decode node meets a prefill node."""
