"""Nodes of cells, kept while cells that follow want them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.matrix.cells import FAMILIES, Cell
from tests.support.engine_process import NodeProcess, NodeSpec

MOST_NODES = 14
"""Kept at a time: those of all ranks and block sizes of a family, the encoder, the one alone."""

DECODE = {"debug_poison": True, "debug_forbid_prompt_compute": True}
"""D's blocks hold NaN until bytes arrive, and D may compute no prompt token but the last."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """All cells are thousands: they are not even made where ``-m`` leaves them out."""
    left_out = "not matrix" in config.getoption("markexpr")
    return True if left_out and collection_path.name == "test_every_cell.py" else None


class Nodes:
    """Starts nodes, each once; the one that was wanted longest ago ends when there are many."""

    def __init__(self, folder: Path, checkpoint: Callable[..., Path]) -> None:
        self._folder, self._checkpoint = folder, checkpoint
        self._nodes: OrderedDict[NodeSpec, NodeProcess] = OrderedDict()
        self._started = 0

    def model(self, family: str, seed: int = 0) -> Path:
        """The folder of a family's model."""
        return self._checkpoint(**FAMILIES[family], seed=seed)

    def of(self, cell: Cell) -> tuple[NodeProcess, NodeProcess, NodeProcess]:
        """P, D, and the one that is alone, of a cell."""
        model, transport = str(self.model(cell.family)), cell.transport
        dtype = ("kv_cache_dtype", cell.kv_dtype)
        p, d = (
            (dtype, ("tensor_parallel_size", ranks), ("block_size", size))
            for ranks, size in (
                (cell.p_ranks, cell.p_block_size),
                (cell.d_ranks, cell.d_block_size),
            )
        )
        specs = (
            NodeSpec("prefill", model, transport, p),
            NodeSpec("decode", model, transport, (*d, *DECODE.items())),
            NodeSpec("alone", model, "none", (dtype,)),
        )
        first, second, third = [self.start(spec) for spec in specs]
        return first, second, third

    def encoder(self, cell: Cell) -> NodeProcess:
        """An encoder node for a cell's P."""
        return self.start(NodeSpec("encode", str(self.model(cell.family)), cell.transport))

    def start(self, spec: NodeSpec) -> NodeProcess:
        """A node; it comes up while the caller goes on."""
        if spec not in self._nodes:
            while len(self._nodes) >= MOST_NODES:
                self._nodes.popitem(last=False)[1].close()
            self._started += 1
            self._nodes[spec] = NodeProcess(spec, self._folder / f"{self._started}.log")
        self._nodes.move_to_end(spec)
        return self._nodes[spec]

    def close(self) -> None:
        """End all."""
        for node in self._nodes.values():
            node.close()


@pytest.fixture(scope="session")
def nodes(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Any]
) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path_factory.mktemp("nodes"), checkpoint)
    yield nodes
    nodes.close()
