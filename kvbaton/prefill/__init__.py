"""``kvbaton prefill``: a node that computes prompts and hands them over; and ``kvbaton encode``.

The engine of an encoder node has items for prompts, and encoder outputs in its blocks: so its role
is that of a prefill node, and so is all that crosses.

Two processes import this file, and a start-up is mostly imports; so each takes what it alone needs
when it runs: the HTTP process in `main`, the core in the factory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvbaton.connectors.transfer.endpoint import HandoverConfig

if TYPE_CHECKING:
    from kvbaton.decode import DecodeFactory
    from kvbaton.engine.build import ConnectorContext
    from kvbaton.engine.executor import Executor
    from kvbaton.engine.scheduler import Scheduler
    from kvbaton.prefill.source_connector import SourceConnector
    from kvbaton.server.config import NodeConfig


@dataclass(frozen=True)
class PrefillFactory:
    """Makes the connector inside the engine core's process."""

    handover: HandoverConfig
    sends_blocks: ClassVar[bool] = True

    @property
    def items(self) -> DecodeFactory:
        """Encoder outputs are received as a decode node receives prompts."""
        from kvbaton.decode import DecodeFactory

        return DecodeFactory(self.handover).items

    def __call__(
        self, executor: Executor, scheduler: Scheduler, surroundings: ConnectorContext
    ) -> SourceConnector:
        """Open transports and control channel, and start the transfer thread."""
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
            max_attempts=self.handover.max_transfers,
            max_notice_bytes=min(t.capabilities.max_notice_bytes for t in endpoint.transports),
        )
        sender = SourceWorker(source, endpoint.transports, executor.layouts)
        return SourceConnector(
            TransferThread(endpoint.channel, sender=sender),
            executor,
            scheduler,
            node,
            unclaimed_s=self.handover.timers.total,
        )


def main(config: NodeConfig) -> int:
    """Run the node until it is told to stop; returns the exit status."""
    from kvbaton.server.node import run_node

    return run_node(config, (PrefillFactory(config.handover),))


def main_encode(config: NodeConfig) -> int:
    """Likewise for an encoder node."""
    from kvbaton.server.node import run_node
    from kvbaton.server.node_app import encoder_app

    return run_node(config, (PrefillFactory(config.handover),), encoder_app)
