"""Assignment of tests to workers of pytest-xdist."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

SHARED = (
    "tests/e2e/",
    "tests/matrix/",
    "tests/llm/",
    "tests/conformance/test_remote_stores_conform.py::TestS3",
    "tests/examples/test_vendor_store.py",
    "tests/examples/test_vendor_transport.py",
    "tests/engine/test_worker_process.py",
    "tests/server/test_supervisor.py",
)
"""Groups whose tests share what is slow to start or to install: each runs in one worker.

The largest group starts first.
"""
OWN_SERVERS = frozenset(
    f"tests/e2e/test_{name}.py"
    for name in (
        "commands encode encode_more failures frontends hostile migration namespaces overlap "
        "readme rolling_update tcp_gpu tensor_parallel_gpu up vendor_transport vllm_connector"
    ).split()
)
"""Files whose tests share servers only within the file: each runs in one worker."""
PAIRS_GPU = "tests/e2e/test_pair_gpu.py"
"""File with separate servers per model."""


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Distribute tests one by one, except that tests that share servers stay together.

    pytest-xdist's own groups do not work: 3.8 ignores the mark with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        if "test_every_cell[" in nodeid:
            return nodeid.rsplit("/", 2)[0]  # cells that differ only in ranks and block sizes
        file = nodeid.partition("::")[0]
        if file == PAIRS_GPU:
            return file + nodeid.partition("[")[2].partition("-")[0]
        if file in OWN_SERVERS:
            return file
        return next((group for group in SHARED if nodeid.startswith(group)), nodeid)

    def _reschedule(self, node: Any) -> None:
        """Assign tests until a worker knows the one after its next, or that there is none.

        A worker waits for that; xdist gives the successor of a dead worker only one scope.
        """
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """As in xdist, but forget what is done: with each report it counts all that it knows."""
        super().mark_test_complete(node, item_index, duration)
        assigned = self.assigned_work[node]
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(assigned[scope].values()):
            del assigned[scope]

    def remove_node(self, node: Any) -> str | None:
        """As in xdist: a dead worker's tests go to others, except the test at which it died."""
        units = {s: u for s, u in self.assigned_work.pop(node).items() if not all(u.values())}
        if not units:
            return None
        first = next(iter(units.values()))
        died_of: str = next(nodeid for nodeid, done in first.items() if not done)
        first[died_of] = True
        self.workqueue.update(units)
        for other in self.assigned_work:
            self._reschedule(other)
        return died_of
