"""NIXL with nothing around it, at its best settings: what our transport is compared with.

No progress thread; descriptors are prepared once for all writes; the loop does nothing but poll.
"""

from __future__ import annotations

import importlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.connectors.base import Memory, Notice
from kvbaton.testing.remote_worker import QUIET


class BareNixl:
    """One agent with one registered array.

    It has as much of a `Transport` as a `remote_worker` needs to be written to.
    """

    def __init__(self, name: str) -> None:
        api = importlib.import_module("nixl_cu13._api")
        self.agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False))
        self.name, self.address = name, 0

    def register(self, memory: Memory) -> None:
        """The array, in host memory."""
        self.address = memory.address
        self.agent.register_memory([(memory.address, memory.num_bytes, 0, "")], "DRAM")

    def card(self) -> bytes:
        """What `prepare` of the other side needs."""
        return msgspec.msgpack.encode([self.name, self.agent.get_agent_metadata(), self.address])

    def notices(self) -> list[Notice]:
        """Those that came; drives progress."""
        found = self.agent.get_new_notifs().values()
        return [Notice(payload) for payloads in found for payload in payloads]

    def shutdown(self) -> None:
        """Nothing: the process ends."""

    def prepare(self, card: bytes, size: int, targets: npt.NDArray[np.int64]) -> Any:
        """A write of all blocks of `size` bytes, block i to the far side's ``targets[i]``."""
        name, metadata, address = msgspec.msgpack.decode(card)
        self.agent.add_remote_agent(metadata)
        order = np.arange(len(targets))
        here, there = (
            self.agent.prep_xfer_dlist(
                owner, [(base + i * size, size, 0) for i in range(len(targets))], "DRAM"
            )
            for owner, base in (("", self.address), (name, address))
        )
        return self.agent.make_prepped_xfer("WRITE", here, order, there, targets, QUIET)

    def write(self, prepared: Any) -> None:
        """Do a prepared write and wait for it.

        Raises:
            RuntimeError: NIXL reports an error.
        """
        state = self.agent.transfer(prepared, QUIET)
        while state == "PROC":
            state = self.agent.check_xfer_state(prepared)
        if state != "DONE":
            raise RuntimeError(f"NIXL reports {state}")
