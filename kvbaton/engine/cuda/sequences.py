"""Sequences with their block tables on the device too, and the inputs of the fast sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvbaton.engine.sampler import WORDS, sampling_words
from kvbaton.engine.sequences import Sequences
from kvbaton.engine.upload import lend
from kvbaton.messages.engine import SamplingParams


class CudaSequences(Sequences):
    """`Sequences` in the form that kernels and graphs need.

    Tables and tokens share memory, so that one launch writes all new entries of both.

    Attributes:
        tokens: As in `Sequences`, but those of new sequences are written by `flush`.
        device_tables: [rows, groups, max_blocks] int32, `tables` as of the last `flush`. Entries
            beyond a sequence's blocks may be left from an earlier one.
        spare_row: A row without sequence, for padding.
        plain: [rows], whether the row is sampled with `words` alone.
        words: [rows, WORDS] int64, see `sampling_words`.
        version: Changes when device tensors have moved.
    """

    def __init__(self, *, rows: int, **limits: Any) -> None:
        super().__init__(rows=rows + 1, **limits)
        self.plain = np.zeros(rows + 1, np.bool_)
        self.words = np.zeros((rows + 1, WORDS), np.int64)
        self.version = 0
        self.spare_row = rows
        self._free.remove(rows)
        self._new_blocks: list[tuple[int, Sequence[int]]] = []
        self._new_tokens: list[tuple[int, npt.NDArray[np.uint32]]] = []

    def _allocate(self, rows: int, max_tokens: int, device: torch.device) -> None:
        """See `Sequences`; tables come first in memory, since their rows must be aligned."""
        sizes = [self.tables.size, rows * max_tokens]
        self._memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        tables, tokens = torch.split(self._memory, sizes)
        self.device_tables = tables.view(self.tables.shape)
        self.tokens = tokens.view(rows, max_tokens)

    def _put_prompt(self, row: int, ids: npt.NDArray[np.uint32]) -> None:
        self._new_tokens.append((row * self.tokens.shape[1], ids))

    def append_blocks(self, row: int, group: int, blocks: Sequence[int]) -> None:
        """Append blocks to a block table; the device's copy follows with the next `flush`."""
        if blocks:
            _, groups, most = self.tables.shape
            place = (row * groups + group) * most + int(self._table_lens[row, group])
            self._new_blocks.append((place, blocks))
            super().append_blocks(row, group, blocks)

    def flush(self) -> None:
        """Send new tokens and blocks to the device."""
        if not (self._new_blocks or self._new_tokens):
            return
        behind = self.device_tables.numel()
        news = self._new_blocks + [(behind + place, ids) for place, ids in self._new_tokens]
        places = np.concatenate([place + np.arange(len(what)) for place, what in news])
        values = np.concatenate([np.asarray(what, np.int64) for _, what in news])
        where, what = lend([places, values], self.tokens.device)
        self._memory.index_copy_(0, where, what.int())
        self._new_blocks, self._new_tokens = [], []

    def _take(
        self, handle: int, length: int, num_prompt: int, choice: int, params: SamplingParams
    ) -> int:
        row = super()._take(handle, length, num_prompt, choice, params)
        self.plain[row] = is_plain(params)
        self.words[row] = np.frombuffer(sampling_words(params), np.int64)
        return row

    def _grow(self) -> None:
        """Double the number of rows."""
        tables = self.device_tables
        super()._grow()
        self.device_tables[: len(tables)] = tables
        for name in ("plain", "words"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros_like(array))))
        self.version += 1


def is_plain(params: SamplingParams) -> bool:
    """Whether `sample_tokens` can sample for a request, and nothing else is reported."""
    return not (
        params.bad_words_token_ids
        or params.logit_bias
        or params.min_tokens
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or params.grammar
        or params.allowed_token_ids
    )
