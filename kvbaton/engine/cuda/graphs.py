"""Decode steps as CUDA graphs, one per padded batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.engine.cuda.sequences import CudaSequences
from kvbaton.engine.sampler import WORDS
from kvbaton.engine.upload import upload_into

Step = Callable[[Tensor], tuple[Tensor, Tensor]]
COLUMNS = 5 + WORDS
"""Number of inputs per sequence: row, position, rotary position, index of the choice, number of
prompt tokens, and its words of `sampling_words`."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, denser where padding would cost most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True)
class Captured:
    """A captured graph with its fixed input and outputs."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    hidden: Tensor
    tokens: Tensor


class DecodeGraphs:
    """Captures a decode step once per batch size, and replays it.

    Args:
        step: Step to capture; takes [COLUMNS, batch] int64, as made by `CudaRunner`.
        sequences: Owner of the device tensors that the step uses; when these have moved, graphs are
            captured again.
        max_num_seqs: Largest batch size.
    """

    def __init__(self, step: Step, sequences: CudaSequences, max_num_seqs: int) -> None:
        self._step, self._sequences = step, sequences
        self.sizes = graph_sizes(max_num_seqs)
        self._graphs: dict[int, Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._version = sequences.version

    def run(self, columns: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Replay the smallest graph that fits the batch.

        Returns:
            Hidden states and tokens of the batch; overwritten by the next replay.
        """
        count = columns.shape[1]
        size = next(size for size in self.sizes if size >= count)
        if self._version != self._sequences.version:
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()  # a pool can't be used without its graphs
            self._version = self._sequences.version
        captured = self._graphs.get(size) or self.capture(size)
        padded = self._pad(np.empty((COLUMNS, size), np.int64))
        padded[:, :count] = columns
        upload_into(padded, captured.inputs)
        captured.graph.replay()
        return captured.hidden[:count], captured.tokens[:count]

    def load(self, size: int) -> None:
        """Run the step once to load kernels, which is impossible during a capture."""
        self._step(self._inputs(size))

    def capture(self, size: int) -> Captured:
        """Capture the step."""
        inputs = self._inputs(size)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` would empty the caches of all devices, while other ranks capture.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                hidden, tokens = self._step(inputs)
            finally:
                graph.capture_end()
        self._graphs[size] = Captured(graph, inputs, hidden, tokens)
        return self._graphs[size]

    def _inputs(self, size: int) -> Tensor:
        inputs = torch.from_numpy(self._pad(np.zeros((COLUMNS, size), np.int64)))
        return inputs.to(self._sequences.tokens.device)

    def _pad(self, columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Fill with padding sequences."""
        columns[:] = 0
        columns[0], columns[1] = self._sequences.spare_row, -1
        return columns
