"""``kvbaton prefill``: a node that computes prompts and hands them over.

Two processes import this file, and a start-up is mostly imports; so each takes what it alone needs
when it runs: the HTTP process in `main`, the core in the factory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvbaton.connectors.transfer.endpoint import HandoverConfig

if TYPE_CHECKING:
    from kvbaton.decode.node import DecodeFactory
    from kvbaton.engine.executor import Executor
    from kvbaton.engine.process import Surroundings
    from kvbaton.engine.scheduler import Scheduler
    from kvbaton.prefill.source_connector import SourceConnector
    from kvbaton.server.node_config import NodeConfig


@dataclass(frozen=True)
class PrefillFactory:
    """Makes the connector inside the engine core's process."""

    handover: HandoverConfig
    sends_blocks: ClassVar[bool] = True

    @property
    def items(self) -> DecodeFactory:
        """Encoder outputs are received as a decode node receives prompts."""
        from kvbaton.decode.node import DecodeFactory

        return DecodeFactory(self.handover).items

    def __call__(
        self, executor: Executor, scheduler: Scheduler, surroundings: Surroundings
    ) -> SourceConnector:
        """Open transports and control channel, and start the transfer thread."""
        from kvbaton.connectors.pairing import check_pairable
        from kvbaton.connectors.protocol.source import Source
        from kvbaton.connectors.transfer.endpoint import open_endpoint
        from kvbaton.connectors.transfer.source_worker import SourceWorker
        from kvbaton.connectors.transfer.thread import TransferThread
        from kvbaton.prefill.source_connector import SourceConnector

        node = surroundings.node
        endpoint = open_endpoint(
            self.handover,
            node,
            surroundings.identity,
            surroundings.record,
            executor.memories,
            executor.layouts,
        )
        source = Source(
            endpoint.identity,
            self.handover.timers,
            new_id=lambda: os.urandom(16),
            pairable=check_pairable,
            max_attempts=self.handover.max_transfers,
            max_notice_bytes=min(t.capabilities.max_notice_bytes for t in endpoint.transports),
        )
        sender = SourceWorker(source, endpoint.transports, executor.layouts)
        return SourceConnector(
            TransferThread(endpoint.channel, sender=sender),
            executor,
            scheduler,
            node,
            unclaimed_s=self.handover.timers.unclaimed,
        )


def main(config: NodeConfig) -> int:
    """Run the node until it is told to stop; returns the exit status."""
    from kvbaton.server.node import run_node

    return run_node(config, (PrefillFactory(config.handover),))
