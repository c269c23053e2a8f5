"""Memory wall of a decode node: the bytes that each step must read, at copy speed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench_gpu_handover import in_groups
from kvbaton.connectors.layout import ITEM_SIZE
from kvbaton.engine.model_config import load_model_config


@dataclass(frozen=True)
class Wall:
    """Time for the reads of a pure decode step.

    Attributes:
        weights_s: Seconds to read all weights but the embedding.
        sequence_s: Seconds to read the KV of one sequence at its mean length.
        output: Tokens per answer.
    """

    weights_s: float
    sequence_s: float
    output: int

    def rate(self, pace_s: float) -> float:
        """Requests per second at which a step takes `pace_s`."""
        return (1 - self.weights_s / pace_s) / (self.output * self.sequence_s)


def wall_of(folder: Path, inputs: int, outputs: int, speed: float) -> Wall:
    """The wall of a dense model for `inputs` and `outputs` tokens; `speed` in bytes/s."""
    model, text = load_model_config(folder), json.loads((folder / "config.json").read_text())
    hidden, heads, kv_heads = (
        text[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    per_head = text.get("head_dim") or hidden // heads
    layer = hidden * (2 * (heads + kv_heads) * per_head + 3 * text["intermediate_size"])
    weights = text["num_hidden_layers"] * layer + text["vocab_size"] * hidden
    kv = sum(sizes.whole for sizes in in_groups(folder, 1, 1).values())
    sequence = kv * (inputs + outputs / 2)
    return Wall(weights * ITEM_SIZE[model.dtype] / speed, sequence / speed, outputs)


def copy_speed(device: str) -> float:
    """Bytes per second, read plus written, of a copy on the device; run in its own process."""
    import torch

    source = torch.ones(1 << (30 if device == "cuda" else 26), dtype=torch.uint8, device=device)
    target, took = torch.empty_like(source), []
    for _ in range(8):
        began = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(took)
