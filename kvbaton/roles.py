"""The connectors of each role: ``kvbaton serve``, ``prefill``, ``decode``, ``encode``.

Role ``any`` is source and target of hand-overs, ``prefill`` only a source, ``decode`` only a
target. An encoder node is a source whose prompts are items and whose blocks hold encoder outputs:
it hands these over by the same protocol.

Two processes import this file, and imports take most of a start-up. So each process imports its
own part when it runs: the HTTP process in `main`, the core in the factory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvbaton.connectors.transfer.config import HandoverConfig

if TYPE_CHECKING:
    from kvbaton.connectors.base import Transport
    from kvbaton.connectors.channel import ControlChannel
    from kvbaton.connectors.protocol.events import Identity
    from kvbaton.connectors.transfer.source_worker import SourceWorker
    from kvbaton.connectors.transfer.target_worker import TargetWorker
    from kvbaton.engine.build import ConnectorContext, MakeConnectors
    from kvbaton.engine.executor import Executor
    from kvbaton.engine.kv_connector import KVConnector
    from kvbaton.engine.scheduler import Scheduler
    from kvbaton.server.config import NodeConfig, NodeRole


@dataclass(frozen=True)
class HandoverFactory:
    """Makes the connectors of a role inside the engine core's process.

    Attributes:
        handover: Settings of hand-overs.
        role: Role of the node.
    """

    handover: HandoverConfig
    role: NodeRole

    @property
    def sends_blocks(self) -> bool:
        """Whether the node is a source, which keeps digests of the blocks that it computes."""
        return self.role != "decode"

    @property
    def items(self) -> HandoverFactory:
        """The factory for encoder outputs: a target only, to whose control port nobody connects."""
        return replace(self, handover=replace(self.handover, control_port=0), role="decode")

    def __call__(self, surroundings: ConnectorContext) -> MakeConnectors:
        """Open the control channel, and a transport for each rank and side.

        Each side has its own transports. A fence cuts off peers that write to this node. It must
        not end this node's own writes, and connecting to a peer in order to write must not lift it.

        Raises:
            ConfigError: The transport is unknown or can't start, or the port is taken.
        """
        from kvbaton.connectors.channel import ControlChannel
        from kvbaton.connectors.registry import load_transport

        config, node = self.handover, surroundings.node
        receives = self.role in ("any", "decode")
        sides = {"source": self.sends_blocks, "target": receives}
        opened = {
            side: [
                load_transport(
                    config.transport,
                    name=f"{node.node}-{node.generation.hex()}-{side}-{rank}",
                    host=config.host,
                )
                for rank in range(surroundings.config.tensor_parallel_size)
            ]
            for side, wanted in sides.items()
            if wanted
        }
        channel = ControlChannel(config.host, config.control_port, cluster_key=config.cluster_key)
        return partial(self._make, surroundings, channel, opened)

    def _make(
        self,
        surroundings: ConnectorContext,
        channel: ControlChannel,
        opened: Mapping[str, list[Transport]],
        executor: Executor,
        scheduler: Scheduler,
    ) -> list[KVConnector]:
        """Make the connectors, and start the transfer thread that both sides share."""
        from kvbaton.connectors.transfer.thread import TransferThread
        from kvbaton.decode.target_connector import PrefixConnector, TargetConnector
        from kvbaton.prefill.source_connector import SourceConnector

        config = self.handover
        sides = {
            side: (transports, self._register(transports, executor, surroundings))
            for side, transports in opened.items()
        }
        sender = self._sender(*sides["source"]) if "source" in sides else None
        receiver = self._receiver(*sides["target"], executor) if "target" in sides else None
        transfers = TransferThread(channel, sender=sender, receiver=receiver)
        connectors: list[KVConnector] = []
        if sender is not None:
            connectors.append(SourceConnector(transfers, executor, scheduler, surroundings.node))
        if receiver is not None:
            target = TargetConnector(
                transfers,
                executor,
                scheduler,
                members=config.peers,
                trust_loopback=config.cluster_key is None,
                poison=surroundings.config.debug_poison,
                most_blocks=config.max_blocks_per_peer,
            )
            connectors += [target, PrefixConnector(target)]
        transfers.start()
        return connectors

    def _sender(self, transports: list[Transport], identity: Identity) -> SourceWorker:
        from kvbaton.connectors.protocol.source import Source
        from kvbaton.connectors.transfer.source_worker import SourceWorker

        source = Source(
            identity,
            self.handover.timers,
            max_attempts=self.handover.max_transfers,
            max_notice_bytes=min(t.capabilities.max_notice_bytes for t in transports),
        )
        return SourceWorker(source, transports)

    def _receiver(
        self, transports: list[Transport], identity: Identity, executor: Executor
    ) -> TargetWorker:
        from kvbaton.connectors.protocol.target import Target
        from kvbaton.connectors.transfer.target_worker import TargetWorker

        target = Target(
            identity,
            self.handover.timers,
            new_id=lambda: os.urandom(16),
            max_blocks_per_peer=self.handover.max_blocks_per_peer,
        )
        return TargetWorker(target, transports, executor)

    def _register(
        self, transports: list[Transport], executor: Executor, surroundings: ConnectorContext
    ) -> Identity:
        """Register the memory of each rank, in order, and return this side's identity.

        Raises:
            TransportError: Memory can't be registered.
        """
        from kvbaton.connectors.protocol.events import Identity
        from kvbaton.messages.control import RankCard

        cards = []
        ranks = zip(transports, executor.memories, executor.layouts, strict=True)
        for rank, (transport, pools, groups) in enumerate(ranks):
            for memory in pools:
                transport.register(memory)
            cards.append(RankCard(rank, transport.card(), msgspec.msgpack.encode(list(groups))))
        kind = self.handover.transport.partition(":")[0]
        digest, record = surroundings.identity, surroundings.record
        return Identity(surroundings.node, digest, record, kind, tuple(cards))


def main(config: NodeConfig) -> int:
    """Run a node until it is told to stop, and return the exit status."""
    from kvbaton.server.node import run_node

    return run_node(config, (HandoverFactory(config.handover, config.role),))
