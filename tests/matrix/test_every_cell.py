"""All cells: a file apart, so that what leaves them out need not make them (`conftest`)."""

from __future__ import annotations

import pytest

from tests.matrix.cells import ALL, Cell
from tests.matrix.conftest import Nodes
from tests.matrix.hand_over import run_cell


@pytest.mark.matrix
@pytest.mark.parametrize("cell", ALL, ids=lambda cell: cell.id)
def test_every_cell(cell: Cell, nodes: Nodes) -> None:
    run_cell(cell, nodes)
