"""Rotary positions of a prompt with images (M-RoPE: Wang et al., "Qwen2-VL", arXiv 2409.12191).

A token has three: temporal, vertical, horizontal. Those of text are equal and count up. The rows
of an image stand on a grid, which begins where the text before it ended; the text after it goes on
behind the largest of them. So after the last image, all three are the position plus a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.engine.model_config import ModelConfig
from kvbaton.messages.engine import Item

Ints = npt.NDArray[np.int64]


def merge_size(config: ModelConfig) -> int | None:
    """Side of the square of patches that becomes one token; None without M-RoPE."""
    return config.vision.merge_size if config.vision and config.rope.mrope_section else None


@dataclass(frozen=True)
class RotaryPositions:
    """Rotary positions of a sequence.

    Attributes:
        rows: [3, tokens] int64, of the tokens up to the end of the last item.
        delta: what to add to the position of any later token.
    """

    rows: Ints
    delta: int

    def at(self, positions: Ints) -> Ints:
        """[tokens] absolute positions to [3, tokens]."""
        found = np.tile(positions + self.delta, (3, 1))
        inside = np.flatnonzero(positions < self.rows.shape[1])
        found[:, inside] = self.rows[:, positions[inside]]
        return found


def rotary_positions(items: Sequence[Item], merge_size: int) -> RotaryPositions:
    """Rotary positions of a prompt.

    Args:
        items: of the prompt, by start.
        merge_size: side of the square of patches that became one row.
    """
    parts, token, base = [np.empty((3, 0), np.int64)], 0, 0
    for item in items:
        text = np.arange(item.start - token) + base
        base += len(text)
        # Time, row and column of each of the item's rows.
        height, width = (max(1, patches // merge_size) for patches in item.grid[1:])
        row = np.arange(item.length)
        grid = np.stack((row // (height * width), row // width % height, row % width))
        parts += [np.tile(text, (3, 1)), grid + base]
        base = int(parts[-1].max()) + 1
        token = item.start + item.length
    return RotaryPositions(np.concatenate(parts, axis=1), base - token)
