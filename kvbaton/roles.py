"""What a node is for others, as connectors: ``kvbaton serve``, ``prefill``, ``decode``, ``encode``.

``any`` is source and target of hand-overs; ``prefill`` is a source only, ``decode`` a target only.
An encoder node has items for prompts, and encoder outputs in its blocks: so it is a source, and
all that crosses does so by the same rules.

Two processes import this file, and a start-up is mostly imports; so each takes what it alone needs
when it runs: the HTTP process in `main`, the core in the factory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import msgspec

from kvbaton.connectors.transfer.config import HandoverConfig

if TYPE_CHECKING:
    from kvbaton.connectors.base import Transport
    from kvbaton.connectors.protocol.events import Identity
    from kvbaton.connectors.transfer.source_worker import SourceWorker
    from kvbaton.connectors.transfer.target_worker import TargetWorker
    from kvbaton.engine.build import ConnectorContext
    from kvbaton.engine.executor import Executor
    from kvbaton.engine.kv_connector import KVConnector
    from kvbaton.engine.scheduler import Scheduler
    from kvbaton.server.config import NodeConfig, NodeRole


@dataclass(frozen=True)
class HandoverFactory:
    """Makes the connectors of a role inside the engine core's process.

    Attributes:
        handover: settings.
        role: of the node.
    """

    handover: HandoverConfig
    role: NodeRole

    @property
    def sends_blocks(self) -> bool:
        """Whether it is a source, so that digests are kept of what is computed."""
        return self.role != "decode"

    @property
    def items(self) -> HandoverFactory:
        """The same for encoder outputs, which are only received; nobody dials who receives."""
        return replace(self, handover=replace(self.handover, control_port=0), role="decode")

    def __call__(
        self, executor: Executor, scheduler: Scheduler, surroundings: ConnectorContext
    ) -> list[KVConnector]:
        """Open transports and control channel, and start the transfer thread.

        Both sides of a node share channel and thread. Each has transports of its own: a fence cuts
        off who writes to us, and must not end what we write; nor may a connection made to write to
        a peer lift a fence against it.
        """
        from kvbaton.connectors.channel import ControlChannel
        from kvbaton.connectors.transfer.thread import TransferThread
        from kvbaton.decode.target_connector import PrefixConnector, TargetConnector
        from kvbaton.prefill.source_connector import SourceConnector

        config = self.handover
        channel = ControlChannel(config.host, config.control_port, cluster_key=config.cluster_key)
        sender = self._sender(executor, surroundings) if self.sends_blocks else None
        receives = self.role in ("any", "decode")
        receiver = self._receiver(executor, surroundings) if receives else None
        transfers = TransferThread(channel, sender=sender, receiver=receiver)
        connectors: list[KVConnector] = []
        if sender is not None:
            connectors.append(
                SourceConnector(
                    transfers,
                    executor,
                    scheduler,
                    surroundings.node,
                    unclaimed_s=config.timers.total,
                )
            )
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

    def _sender(self, executor: Executor, surroundings: ConnectorContext) -> SourceWorker:
        from kvbaton.connectors.protocol.source import Source
        from kvbaton.connectors.transfer.source_worker import SourceWorker

        transports, identity = self._open("source", executor, surroundings)
        source = Source(
            identity,
            self.handover.timers,
            max_attempts=self.handover.max_transfers,
            max_notice_bytes=min(t.capabilities.max_notice_bytes for t in transports),
        )
        return SourceWorker(source, transports)

    def _receiver(self, executor: Executor, surroundings: ConnectorContext) -> TargetWorker:
        from kvbaton.connectors.protocol.target import Target
        from kvbaton.connectors.transfer.target_worker import TargetWorker

        transports, identity = self._open("target", executor, surroundings)
        target = Target(
            identity,
            self.handover.timers,
            new_id=lambda: os.urandom(16),
            max_blocks_per_peer=self.handover.max_blocks_per_peer,
        )
        return TargetWorker(target, transports, executor)

    def _open(
        self, side: Literal["source", "target"], executor: Executor, surroundings: ConnectorContext
    ) -> tuple[list[Transport], Identity]:
        """Open a side's transports, register each rank's memory in order; what it says of itself.

        Raises:
            ConfigError: the transport is unknown, or can't start.
            TransportError: memory can't be registered.
        """
        from kvbaton.connectors.protocol.events import Identity
        from kvbaton.connectors.registry import load_transport
        from kvbaton.messages.control import RankCard

        config, node = self.handover, surroundings.node
        transports, cards = [], []
        for rank, (pools, groups) in enumerate(
            zip(executor.memories, executor.layouts, strict=True)
        ):
            name = f"{node.node}-{node.generation.hex()}-{side}-{rank}"
            transport = load_transport(config.transport, name=name, host=config.host)
            for memory in pools:
                transport.register(memory)
            transports.append(transport)
            cards.append(RankCard(rank, transport.card(), msgspec.msgpack.encode(list(groups))))
        kind = config.transport.partition(":")[0]
        digest, record = surroundings.identity, surroundings.record
        return transports, Identity(node, digest, record, kind, tuple(cards))


def main(config: NodeConfig) -> int:
    """Run a node until it is told to stop; returns the exit status."""
    from kvbaton.server.node import run_node
    from kvbaton.server.node_app import encoder_app, text_app

    app = encoder_app if config.role == "encode" else text_app
    return run_node(config, (HandoverFactory(config.handover, config.role),), app)
