"""A rank's data of sequences, kept from step to step: tokens, block tables, sampling parameters.

It includes rotary positions of prompts with images (M-RoPE: Wang et al., "Qwen2-VL", arXiv
2409.12191). A token has three: temporal, vertical, horizontal. Those of text are equal and count
up. The rows of an image are placed on a grid that begins where the text before it ended; the text
after it goes on behind the largest of them. So after the last image, all three are the position
plus a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.step import Fork, NewSequence, SequenceStep
from kvbaton.engine.upload import upload
from kvbaton.messages.engine import Item, SamplingParams

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Branches:
    """First tokens of all choices of a request, for forks to come.

    Attributes:
        length: Number of tokens of the sequence before them.
        tokens: [choices] int64.
    """

    length: int
    tokens: Tensor


class Sequences:
    """One row per sequence.

    Tokens are on the device, where a sampled token may be needed before the host has read it.
    Lengths are known here without reading tokens, so nothing waits for the device.

    Attributes:
        tokens: [rows, max_tokens] int32, on the device.
        lengths: [rows] int64, number of tokens of each row.
        num_prompt: [rows] int64, number of prompt tokens.
        choices: [rows] int64, index of the choice.
        tables: [rows, groups, max_blocks] int64, block tables, 0 beyond their ends. Blocks behind a
            group's window may belong to other sequences by now; nothing reads them.
        params: Sampling parameters per row; None if the row is free.
        deltas: [rows] int64, rotary position minus position of generated tokens.
        with_items: Rows with items, so that work for items costs nothing without any.
        reporting: Rows whose prompt logprobs are wanted, likewise.
    """

    def __init__(
        self,
        *,
        rows: int,
        max_tokens: int,
        max_blocks: int,
        device: torch.device,
        merge_size: int | None = None,
        groups: int = 1,
    ) -> None:
        self.lengths = np.zeros(rows, np.int64)
        self.num_prompt = np.zeros(rows, np.int64)
        self.choices = np.zeros(rows, np.int64)
        self.tables = np.zeros((rows, groups, max_blocks), np.int64)
        self._allocate(rows, max_tokens, device)
        self.params: list[SamplingParams | None] = [None] * rows
        self.deltas = np.zeros(rows, np.int64)
        self._merge_size = merge_size
        self.with_items: set[int] = set()
        self.reporting: set[int] = set()
        self._rotary: dict[int, RotaryPositions] = {}  # of rows where they differ from positions
        self._table_lens = np.zeros((rows, groups), np.int64)
        self._branches: dict[int, Branches] = {}
        self._row: dict[int, int] = {}
        self._free = list(range(rows - 1, -1, -1))

    def _allocate(self, rows: int, max_tokens: int, device: torch.device) -> None:
        """Allocate the device's tensors, all zero; `tables` has this many rows already."""
        self.tokens = torch.zeros((rows, max_tokens), dtype=torch.int32, device=device)

    def rows(self, steps: Sequence[SequenceStep]) -> Ints:
        """Rows of the steps' sequences, in order."""
        return np.fromiter((self._row[step.handle] for step in steps), np.int64, len(steps))

    def sampling(self, row: int) -> SamplingParams:
        """Sampling parameters of a row in use."""
        params = self.params[row]
        assert params is not None, f"row {row} holds no sequence"
        return params

    def add(self, sequences: Sequence[NewSequence]) -> None:
        """Add sequences, which may replace ones with the same handle."""
        for new in sequences:
            if new.handle in self._row:
                self.end(new.handle)
            count = len(new.token_ids)
            row = self._take(new.handle, count, new.num_prompt, new.choice, new.params)
            self._put_prompt(row, np.frombuffer(new.token_ids, np.uint32))
            if new.items:
                self.with_items.add(row)
            if new.items and self._merge_size is not None:
                self._rotary[row] = rotary_positions(new.items, self._merge_size)
                self.deltas[row] = self._rotary[row].delta

    def _put_prompt(self, row: int, ids: npt.NDArray[np.uint32]) -> None:
        """Write the known tokens of a sequence."""
        self.tokens[row, : len(ids)] = torch.from_numpy(ids.astype(np.int32))

    def fork(self, fork: Fork) -> None:
        """Add a sequence as a copy of another, up to the token that was sampled for it."""
        parent = self._row[fork.parent]
        branches, params = self._branches[parent], self.sampling(parent)
        length = branches.length
        row = self._take(fork.child, length + 1, int(self.num_prompt[parent]), fork.choice, params)
        self.tokens[row, :length] = self.tokens[parent, :length]
        self.tokens[row, length] = branches.tokens[fork.choice]
        if parent in self.with_items:
            self.with_items.add(row)
        if parent in self._rotary:
            self._rotary[row], self.deltas[row] = self._rotary[parent], self.deltas[parent]

    def end(self, handle: int) -> None:
        """Remove a sequence; unknown handles are ignored."""
        row = self._row.pop(handle, None)
        if row is not None:
            self.params[row] = None
            self._branches.pop(row, None)
            self.with_items.discard(row)
            self.reporting.discard(row)
            self._rotary.pop(row, None)
            self.deltas[row] = 0
            self._free.append(row)

    def append_blocks(self, row: int, group: int, blocks: Sequence[int]) -> None:
        """Append blocks to a block table."""
        start = self._table_lens[row, group]
        self.tables[row, group, start : start + len(blocks)] = blocks
        self._table_lens[row, group] += len(blocks)

    def cut(self, rows: Ints, lengths: Ints) -> None:
        """Shorten rows to these lengths, which drops rejected draft tokens."""
        self.lengths[rows] = np.minimum(self.lengths[rows], lengths)

    def put_drafts(self, steps: Sequence[SequenceStep]) -> None:
        """Write draft tokens after the last known tokens."""
        drafted = [step for step in steps if step.draft]
        counts = [len(step.draft) for step in drafted]
        positions = [step.start + 1 + np.arange(len(step.draft)) for step in drafted]
        tokens = np.concatenate([np.array(step.draft, np.int64) for step in drafted])
        rows, ends = np.repeat(self.rows(drafted), counts), np.concatenate(positions)
        of, at, drafts = upload([rows, ends, tokens], self.tokens.device)
        self.tokens[of, at] = drafts.int()
        self.lengths[rows] = ends + 1

    def put_tokens(self, rows: Ints, positions: Ints, tokens: Tensor, chosen: Ints) -> None:
        """Write one of `tokens` into each of these rows, as its last token.

        Args:
            rows: [rows].
            positions: [rows], where to write.
            tokens: [tokens] int64.
            chosen: [rows], index of each row's token.
        """
        of, at, index = upload([rows, positions, chosen], self.tokens.device)
        self.tokens[of, at] = tokens[index].int()
        self.lengths[rows] = positions + 1

    def rotary_positions(self, rows: Ints, positions: Ints, counts: Ints) -> Ints:
        """Rotary positions of a batch: [3, tokens], or [tokens] if they equal the positions.

        Args:
            rows: [sequences].
            positions: [tokens], absolute.
            counts: [sequences], number of tokens of each.
        """
        if self._rotary.keys().isdisjoint(rows.tolist()):
            return positions
        found = np.tile(positions, (3, 1))
        for row, end, count in zip(rows.tolist(), np.cumsum(counts), counts, strict=True):
            if rotary := self._rotary.get(row):
                found[:, end - count : end] = rotary.at(positions[end - count : end])
        return found

    def branch(self, row: int, tokens: Tensor) -> None:
        """Keep the first tokens of all choices; called before `put_tokens`."""
        self._branches[row] = Branches(int(self.lengths[row]), tokens)

    def _take(
        self, handle: int, length: int, num_prompt: int, choice: int, params: SamplingParams
    ) -> int:
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._row[handle] = row
        self.lengths[row], self.num_prompt[row], self.choices[row] = length, num_prompt, choice
        self.tables[row] = 0
        self._table_lens[row] = 0
        self.params[row] = params
        if params.prompt_logprobs is not None:
            self.reporting.add(row)
        return row

    def _grow(self) -> None:
        """Double the number of rows."""
        rows, tokens = len(self.params), self.tokens
        for name in ("lengths", "num_prompt", "choices", "tables", "deltas", "_table_lens"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros_like(array))))
        self._allocate(2 * rows, tokens.shape[1], tokens.device)
        self.tokens[:rows] = tokens
        self.params += [None] * rows
        self._free = list(range(2 * rows - 1, rows - 1, -1))


# --- M-RoPE ---


def merge_size(config: ModelConfig) -> int | None:
    """Side of the square of patches that forms one token; None without M-RoPE."""
    return config.vision.merge_size if config.vision and config.rope.mrope_section else None


@dataclass(frozen=True)
class RotaryPositions:
    """Rotary positions of a sequence.

    Attributes:
        rows: [3, tokens] int64, of the tokens up to the end of the last item.
        delta: What to add to the position of any later token.
    """

    rows: Ints
    delta: int

    def at(self, positions: Ints) -> Ints:
        """Convert absolute positions [tokens] to rotary positions [3, tokens]."""
        found = np.tile(positions + self.delta, (3, 1))
        inside = np.flatnonzero(positions < self.rows.shape[1])
        found[:, inside] = self.rows[:, positions[inside]]
        return found


def rotary_positions(items: Sequence[Item], merge_size: int) -> RotaryPositions:
    """Compute the rotary positions of a prompt.

    Args:
        items: Items of the prompt, by start.
        merge_size: Side of the square of patches that forms one row.
    """
    parts, token, base = [np.empty((3, 0), np.int64)], 0, 0
    for item in items:
        text = np.arange(item.start - token) + base
        base += len(text)
        # Temporal, vertical and horizontal position of each of the item's rows.
        height, width = (max(1, patches // merge_size) for patches in item.grid[1:])
        row = np.arange(item.length)
        grid = np.stack((row // (height * width), row // width % height, row % width))
        parts += [np.tile(text, (3, 1)), grid + base]
        base = int(parts[-1].max()) + 1
        token = item.start + item.length
    return RotaryPositions(np.concatenate(parts, axis=1), base - token)
