"""NIXL with nothing around it, at its best settings: what our transport is compared with.

No progress thread; descriptors are prepared once for all writes; the loop does nothing but poll.
"""

from __future__ import annotations

import importlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt


class BareNixl:
    """One agent with one registered array.

    Args:
        name: of the agent.
        memory: any contiguous bytes.
    """

    def __init__(self, name: str, memory: npt.NDArray[np.uint8]) -> None:
        api = importlib.import_module("nixl_cu13._api")
        self.agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False))
        self.name, self.memory = name, memory
        self.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")

    def card(self) -> bytes:
        """What `prepare` of the other side needs."""
        return msgspec.msgpack.encode(
            [self.name, self.agent.get_agent_metadata(), self.memory.ctypes.data]
        )

    def poll(self) -> list[bytes]:
        """Notices that came; drives progress."""
        return [notice for notices in self.agent.get_new_notifs().values() for notice in notices]

    def prepare(self, card: bytes, size: int, targets: npt.NDArray[np.int64]) -> Any:
        """A write of all blocks of `size` bytes, block i to the far side's ``targets[i]``."""
        name, metadata, address = msgspec.msgpack.decode(card)
        self.agent.add_remote_agent(metadata)
        order = np.arange(len(targets))
        here, there = (
            self.agent.prep_xfer_dlist(
                owner, [(base + i * size, size, 0) for i in range(len(targets))], "DRAM"
            )
            for owner, base in (("", self.memory.ctypes.data), (name, address))
        )
        return self.agent.make_prepped_xfer("WRITE", here, order, there, targets, b"done")

    def write(self, prepared: Any) -> None:
        """Do a prepared write and wait for it.

        Raises:
            RuntimeError: NIXL reports an error.
        """
        state = self.agent.transfer(prepared, b"done")
        while state == "PROC":
            state = self.agent.check_xfer_state(prepared)
        if state != "DONE":
            raise RuntimeError(f"NIXL reports {state}")
