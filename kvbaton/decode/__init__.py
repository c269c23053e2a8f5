"""``kvbaton decode``: a node that receives prompts and generates from them.

Two processes import this file, and a start-up is mostly imports; so each takes what it alone needs
when it runs: the HTTP process in `main`, the core in the factory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from kvbaton.connectors.transfer.endpoint import HandoverConfig

if TYPE_CHECKING:
    from kvbaton.decode.target_connector import TargetConnector
    from kvbaton.engine.build import ConnectorContext
    from kvbaton.engine.executor import Executor
    from kvbaton.engine.scheduler import Scheduler
    from kvbaton.server.config import NodeConfig


@dataclass(frozen=True)
class DecodeFactory:
    """Makes the connector inside the engine core's process."""

    handover: HandoverConfig
    sends_blocks: ClassVar[bool] = False

    @property
    def items(self) -> DecodeFactory:
        """The same for encoder outputs; nobody dials who receives."""
        return replace(self, handover=replace(self.handover, control_port=0))

    def __call__(
        self, executor: Executor, scheduler: Scheduler, surroundings: ConnectorContext
    ) -> TargetConnector:
        """Open transports and control channel, and start the transfer thread."""
        from kvbaton.connectors.protocol.target import Target
        from kvbaton.connectors.transfer.endpoint import open_endpoint
        from kvbaton.connectors.transfer.target_worker import TargetWorker
        from kvbaton.connectors.transfer.thread import TransferThread
        from kvbaton.decode.target_connector import TargetConnector

        endpoint = open_endpoint(
            self.handover,
            surroundings.node,
            surroundings.identity,
            surroundings.record,
            executor.memories,
            executor.layouts,
        )
        target = Target(
            endpoint.identity,
            self.handover.timers,
            new_id=lambda: os.urandom(16),
            max_blocks_per_peer=self.handover.max_blocks_per_peer,
        )
        receiver = TargetWorker(target, endpoint.transports, executor.layouts, executor)
        return TargetConnector(
            TransferThread(endpoint.channel, receiver=receiver),
            executor,
            scheduler,
            members=self.handover.peers,
            trust_loopback=self.handover.cluster_key is None,
            poison=surroundings.config.debug_poison,
        )


def main(config: NodeConfig) -> int:
    """Run the node until it is told to stop; returns the exit status."""
    from kvbaton.server.node import run_node

    return run_node(config, (DecodeFactory(config.handover),))
