"""How long KV takes between nodes, by the reports of its receivers (`NodeInfo.wires`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct

from kvbaton.messages.nodes import WIRE_COSTS, NodeInfo


class WireSpeed(Struct, frozen=True):
    """Times of one wire from node to node; fields as `WIRE_COSTS`, in seconds."""

    fetch_s: float = 0.0
    handover_s: float = 0.0
    token_s: float = 0.0


UNKNOWN = WireSpeed()
Told = Mapping[str, Mapping[str, float]]


def means(reports: Sequence[Mapping[str, float]], terms: Collection[str]) -> dict[str, float]:
    """Mean of each term over the reports that have it; terms that none has are left out."""
    told = {term: [report[term] for report in reports if term in report] for term in terms}
    return {term: sum(seconds) / len(seconds) for term, seconds in told.items() if seconds}


class Wires:
    """The wires between nodes, and what this router has had sent on them.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told: dict[str, tuple[Told, dict[str | None, WireSpeed]]] = {}
        self._mean = UNKNOWN
        self._queued: dict[str, tuple[float, float]] = {}

    def learn(self, nodes: Sequence[NodeInfo]) -> None:
        """Take in nodes' reports.

        Terms that a receiver has not measured for a sender are the mean of all measured ones.
        """
        known, self._told = self._told, {}
        if not any(node.wires for node in nodes):
            self._mean = UNKNOWN
            return
        mean = means([costs for node in nodes for costs in node.wires.values()], WIRE_COSTS)
        before, self._mean = self._mean, WireSpeed(**mean)
        for node in nodes:
            wires, speeds = known.get(node.node_id, (None, {}))
            if wires is not node.wires or before != self._mean:
                speeds = {
                    sender: WireSpeed(**{t: costs.get(t, mean[t]) for t in mean})
                    for sender, costs in node.wires.items()
                }
            self._told[node.node_id] = node.wires, speeds
        for node_id in self._queued.keys() - self._told.keys():
            del self._queued[node_id]

    def speed(self, sender: NodeInfo, receiver: NodeInfo) -> WireSpeed:
        """Speed of the wire between two nodes."""
        told = self._told.get(receiver.node_id)
        return self._mean if told is None else told[1].get(sender.control_address, self._mean)

    def queued_s(self, sender: NodeInfo) -> float:
        """Seconds until all that this router has had a node send is sent."""
        queued = self._queued.get(sender.node_id)
        return 0.0 if queued is None else max(0.0, queued[1] - (self._clock() - queued[0]))

    def sent(self, sender: NodeInfo, receiver: NodeInfo, tokens: int) -> None:
        """Record that a node was asked to send the KV of `tokens` tokens to another one."""
        took = self.speed(sender, receiver).token_s * tokens
        if took > 0:
            self._queued[sender.node_id] = self._clock(), self.queued_s(sender) + took
