"""What hypothesis makes of the router's served OpenAPI description: requests right and wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvbaton.router.loads import NodeLoad
from tests.support.fuzzing import OF_BOTH, Background, described, fuzz
from tests.support.router_rig import Rig, build_rig
from tests.support.stand_in import MODEL

OPERATIONS = [
    *OF_BOTH,
    ("POST", "/nodes"),
    ("POST", "/nodes/{node_id}/drain"),
    ("POST", "/nodes/{node_id}/migrate"),
    ("POST", "/nodes/{node_id}/pause"),
    ("POST", "/nodes/{node_id}/resume"),
    ("DELETE", "/nodes/{node_id}"),
    ("GET", "/nodes"),
    ("GET", "/debug/routes"),
    ("POST", "/drain"),
    ("GET", "/"),
]


class Served:
    """A router with a pair of nodes that answer from a script."""

    def __init__(self) -> None:
        self.rigs: list[Rig] = []
        self.background = Background(self._start)
        self.api = self.background.description()

    async def _start(self, stack: AsyncExitStack) -> str:
        sockets = stack.enter_context(TemporaryDirectory())
        self.rigs.append(await build_rig(stack, Path(sockets)))
        return self.rigs[0].url

    def renew(self) -> None:
        """Bring the nodes back that requests have removed, drained, replaced or paused."""
        (rig,) = self.rigs
        for name in rig.nodes:
            self.background.wait(rig.register(name))
            rig.directory.pause(name, paused=False)
        rig.directory.draining = False


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.background.close()


def test_every_endpoint_is_described_and_tried(served: Served) -> None:
    endless = ("GET", "/events")  # see `test_page.py`
    assert described(served.api) == {*OPERATIONS, ("GET", "/openapi.json"), endless}


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_input_breaks_a_router(served: Served, method: str, path: str) -> None:
    served.renew()
    # What is wrong in a body a node's test shows, too: the same code reads it.
    fuzz(served.api, method, path, MODEL, bodies=12 if (method, path) in OF_BOTH else 30)
    served.renew()
    leaked = {node: load for node, load in served.rigs[0].loads().items() if load != NodeLoad()}
    assert leaked == {}
