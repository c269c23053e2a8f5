"""Which nodes serve a request: pure functions over what is known now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.membership import Member


@dataclass(frozen=True)
class NodeLoad:
    """What the router has in flight at a node.

    Attributes:
        prompt_tokens: of prompts that the node is still prefilling for us.
        sequences: requests that it generates for.
        tokens: prompt and generated tokens of those.
        rows: of items that it is to encode for us.
    """

    prompt_tokens: int = 0
    sequences: int = 0
    tokens: int = 0
    rows: int = 0

    def __add__(self, other: NodeLoad) -> NodeLoad:
        return NodeLoad(
            self.prompt_tokens + other.prompt_tokens,
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.rows + other.rows,
        )

    def __sub__(self, other: NodeLoad) -> NodeLoad:
        return NodeLoad(
            self.prompt_tokens - other.prompt_tokens,
            self.sequences - other.sequences,
            self.tokens - other.tokens,
            self.rows - other.rows,
        )


@dataclass(frozen=True)
class Route:
    """The nodes that serve one attempt.

    Attributes:
        target: the node that generates.
        source: the node that prefills for it; None if the target serves the request alone.
        encoders: per item of the prompt, the node that encodes it; None where the one that
            prefills does so, or has the output already. Empty is None for all.
    """

    target: NodeInfo
    source: NodeInfo | None = None
    encoders: tuple[NodeInfo | None, ...] = ()

    @property
    def prefills(self) -> NodeInfo:
        """The node that computes the prompt."""
        return self.source or self.target


def compatible(source: Member, target: Member) -> bool:
    """Whether a prompt can be handed over from one node to the other."""
    return source.info.identity == target.info.identity and _connected(source, target)


def can_encode_for(encoder: Member, node: Member) -> bool:
    """Whether encoder outputs can be handed over from one node to the other."""
    made, wanted = encoder.info.encoder_identity, node.info.encoder_identity
    return made == wanted != "" and _connected(encoder, node)


def _connected(source: Member, target: Member) -> bool:
    """Whether the target may dial the source, and they speak of one model over one transport.

    A registered target dials only addresses that it was told of, and learns of a new node with its
    next heartbeat; until then the two do not pair.
    """
    p, d = source.info, target.info
    if p.control_address is None or (p.model, p.transport) != (d.model, d.transport):
        return False
    return target.told is None or p.control_address in target.told


def choose(
    ready: Iterable[Member],
    loads: Mapping[str, NodeLoad],
    num_tokens: int,
    *,
    exclude: Set[str] = frozenset(),
    min_handover_tokens: int = 0,
) -> Route | None:
    """The least loaded pair, or one node alone, or None if nobody is left.

    Args:
        ready: members that may get requests.
        loads: by node id; a node without an entry is idle.
        num_tokens: of the prompt.
        exclude: node ids that already failed this request.
        min_handover_tokens: shorter prompts are not worth a hand-over.
    """
    usable = [m for m in ready if m.serves_prompts and m.info.node_id not in exclude]
    pair = None if num_tokens < min_handover_tokens else _least_loaded_pair(usable, loads)
    return pair or _least_loaded_single(usable, loads)


def pairs(ready: Iterable[Member]) -> list[tuple[Member, Member]]:
    """All (source, target) that can hand over prompts."""
    members = list(ready)
    sources = [m for m in members if m.info.role == "prefill"]
    targets = [m for m in members if m.info.role == "decode"]
    return [(p, d) for p in sources for d in targets if compatible(p, d)]


def encoder_pairs(ready: Iterable[Member]) -> list[tuple[Member, Member]]:
    """All (encoder, node) that can hand over encoder outputs."""
    members = list(ready)
    encoders = [m for m in members if m.info.role == "encode"]
    served = [m for m in members if m.serves_prompts]
    return [(e, n) for e in encoders for n in served if can_encode_for(e, n)]


def _least_loaded_pair(usable: list[Member], loads: Mapping[str, NodeLoad]) -> Route | None:
    def cost(pair: tuple[Member, Member]) -> tuple[int, int, int, str, str]:
        p, d = (member.info.node_id for member in pair)
        source, target = loads.get(p, NodeLoad()), loads.get(d, NodeLoad())
        return source.prompt_tokens, target.sequences, target.tokens, p, d

    best = min(pairs(usable), key=cost, default=None)
    return None if best is None else Route(best[1].info, best[0].info)


def _least_loaded_single(usable: list[Member], loads: Mapping[str, NodeLoad]) -> Route | None:
    def cost(member: Member) -> tuple[bool, int, int, int, str]:
        load = loads.get(member.info.node_id, NodeLoad())
        other_role = member.info.role != "decode"
        return other_role, load.sequences, load.prompt_tokens, load.tokens, member.info.node_id

    best = min(usable, key=cost, default=None)
    return None if best is None else Route(best.info)
