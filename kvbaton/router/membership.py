"""The cluster's nodes and which of them may serve: a state machine without I/O.

Laws:

1. A node is (node id, generation). A new generation replaces the old one if that one can't live
   any more: at its address, or once it is unhealthy. Until then, another node with its id is
   refused by name. A generation that was replaced or removed never comes back.
2. Only a node in state ``ready`` gets new requests. It is ready once it has answered a probe, and
   until `failures` probes in a row failed, its heartbeats stopped, or it was drained.
3. A node that registered itself and falls silent is forgotten; one named by a flag is probed for
   ever.
4. Between two live nodes of which one reports that nothing arrives from the other, only trials are
   sent (`failing_pairs`). Each of them still serves alone, and with other nodes.

The clock is an argument of every event, in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

import msgspec

from kvbaton.connectors.address import is_loopback
from kvbaton.errors import ConfigError, RequestError
from kvbaton.messages.nodes import Members, NodeInfo
from kvbaton.router.config import MembershipTimers
from kvbaton.router.failing_pairs import FailingPair, failing_pairs
from kvbaton.router.route import Pair, Pairs, Route
from kvbaton.server.config import check_url
from kvbaton.server.transfer_params import tcp_host

ROLES = ("any", "prefill", "decode", "encode")
SOURCES, TARGETS = ("any", "prefill"), ("any", "decode")
"""Roles of nodes that hand prompts over, and of nodes that receive them."""
MAX_LENGTH = 1 << 31
"""More tokens than any node takes; limits requests while no node has reported its limit."""
MAX_REMOVED = 256
"""Maximum number of removed generations that are remembered."""


class NodeState(StrEnum):
    """State of a node, as the router sees it."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    GONE = "gone"


@dataclass
class Member:
    """A node as the router sees it.

    Attributes:
        info: What it last reported; provisional until a static node has answered.
        static: Whether a flag names it, instead of having registered itself.
        heard_at: When its last heartbeat came.
        failed_probes: Number of probes that failed in a row.
        told: Control addresses of members that it has been told; None for a static node, which has
            its own ``--peer`` flags.
        reason: Why it is in its state, for people.
        paused: Whether it gets no new requests until resumed, whatever its state.
        failing: Failing pairs of which it is the receiver, by the sender's control address.
    """

    info: NodeInfo
    static: bool
    heard_at: float
    state: NodeState = NodeState.STARTING
    failed_probes: int = 0
    told: frozenset[str] | None = None
    reason: str = ""
    paused: bool = False
    failing: dict[str, FailingPair] = field(default_factory=dict)

    def may_dial(self, address: str) -> bool:
        """Whether it may ask the node at an address for KV.

        A registered node dials only addresses that it was told, and learns of a new node with its
        next heartbeat; until then the two do not pair.
        """
        failing = self.failing.get(address)
        known = self.told is None or address in self.told
        return known and (failing is None or failing.is_due)


class ReadyNodes:
    """Nodes that may get requests and pairs that may hand over, until something changes.

    Attributes:
        nodes: All ready nodes.
        serving: Ready nodes that take prompts; encoder nodes take items only.
        pairs: (source, target) that can hand over prompts.
        senders: Nodes that may send cached prefixes, with the ids of nodes that may fetch them:
            sources, and nodes that would be sources if they still got requests.
        encoder_pairs: (encoder, node) that can hand over encoder outputs.
        max_model_len: Longest prompt plus output that every serving node takes, as reported.
        vocab_size: Token ids below it are known to all serving nodes; 0 if none reported it.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.nodes: list[NodeInfo] = []
        self.serving: list[NodeInfo] = []
        self.encoder_pairs: list[Pair] = []
        # Nodes that can receive a node's KV: those of its identity, model and transport.
        receivers: dict[tuple[str, ...], list[Member]] = {}
        leaving: list[NodeInfo] = []
        for member in members:
            node = member.info
            if member.state is not NodeState.READY or member.paused:
                if member.state in (NodeState.READY, NodeState.DRAINING):
                    leaving.append(node)
                continue
            self.nodes.append(node)
            if node.role == "encode":
                continue
            self.serving.append(node)
            if node.role in TARGETS:
                kind = "prompt", node.identity, node.model, node.transport
                receivers.setdefault(kind, []).append(member)
            if node.encoder_identity:
                kind = "item", node.encoder_identity, node.model, node.transport
                receivers.setdefault(kind, []).append(member)
        lengths = [node.max_model_len for node in self.serving if node.max_model_len]
        self.max_model_len = min([MAX_LENGTH, *lengths])
        self.vocab_size = min((n.vocab_size for n in self.serving if n.vocab_size), default=0)
        self._limited = [(n, n.prompt_limits) for n in self.serving if n.prompt_limits is not None]
        # Length up to which a prompt with one choice may go to any node.
        self._fits_all = MAX_LENGTH
        for node, limits in self._limited:
            taken = limits.received if limits.choices else 0
            most = taken if node.role in TARGETS else limits.computed
            self._fits_all = min(self._fits_all, most)
        self._receivers = receivers
        sources: list[tuple[NodeInfo, set[str]]] = []
        for source in self.nodes:
            sources.append((source, {node.node_id for node in self.receivers(source)}))
            if source.role == "encode":
                kind = "item", source.encoder_identity, source.model, source.transport
                self.encoder_pairs += [(source, node) for node in self._dialling(kind, source)]
        self.pairs = Pairs(sources, self.serving)
        self.senders = list(self.pairs.sources)
        for node in leaving:
            if able := {receiver.node_id for receiver in self.receivers(node)}:
                self.senders.append((node, able))

    def too_large(self, num_tokens: int, choices: int) -> tuple[frozenset[str], frozenset[str]]:
        """Ids of nodes that can't compute a prompt, and of targets that would decline it."""
        if num_tokens <= self._fits_all and choices == 1:
            return frozenset(), frozenset()
        everywhere, as_target = set[str](), set[str]()
        for node, limits in self._limited:
            if num_tokens > limits.computed:
                everywhere.add(node.node_id)
            if node.role in TARGETS and not limits.receives(num_tokens, choices):
                as_target.add(node.node_id)
        return frozenset(everywhere), frozenset(as_target)

    def declining(self, held: int, num_tokens: int, choices: int) -> frozenset[str]:
        """Ids of nodes that would not fetch a prefix of `held` tokens, but compute it.

        A node of role ``any`` is judged by the whole prompt, as for a hand-over.
        """
        if num_tokens <= self._fits_all and choices == 1:
            return frozenset()
        return frozenset(
            node.node_id
            for node, limits in self._limited
            if not (
                limits.receives(num_tokens, choices)
                if node.role == "any"
                else held <= limits.received
            )
        )

    def receivers(self, source: NodeInfo) -> list[NodeInfo]:
        """Nodes to which a node may hand prompts over, and send cached prefixes."""
        if source.role not in SOURCES:
            return []
        kind = "prompt", source.identity, source.model, source.transport
        return [n for n in self._dialling(kind, source) if n.node_id != source.node_id]

    def _dialling(self, kind: tuple[str, ...], source: NodeInfo) -> list[NodeInfo]:
        """Receivers of a kind that may dial a node."""
        address, members = source.control_address, self._receivers.get(kind, ())
        if address is None:
            return []
        return [m.info for m in members if m.may_dial(address)]


def failing(members: Iterable[Member]) -> list[tuple[str, str, FailingPair]]:
    """Sender id, receiver id and state of each failing pair."""
    known = list(members)
    senders = {member.info.control_address: member.info.node_id for member in known}
    return [
        (senders[address], member.info.node_id, pair)
        for member in known
        for address, pair in member.failing.items()
        if address in senders
    ]


@dataclass(frozen=True)
class Change:
    """A change of a node's state.

    Attributes:
        lost: Whether it no longer does anything that it was doing for us.
    """

    node_id: str
    old: NodeState
    new: NodeState
    reason: str
    lost: bool = False

    def describe(self) -> str:
        """The change in one line, for the log."""
        why = f" ({self.reason})" if self.reason else ""
        return f"node {self.node_id}: {self.old} -> {self.new}{why}"


@dataclass
class Membership:
    """The table of nodes.

    Args:
        timers: Periods and limits.
        loopback_only: Whether to refuse nodes on other machines (there is no cluster key).
        model: Name of the served model; None takes the first node's.

    Attributes:
        hears: Whether nodes can register. If not, silence means nothing, and probes decide alone.
    """

    timers: MembershipTimers = field(default_factory=MembershipTimers)
    loopback_only: bool = True
    model: str | None = None
    members: dict[str, Member] = field(default_factory=dict)
    hears: bool = True
    _removed: dict[tuple[str, str], None] = field(default_factory=dict)
    _ready: ReadyNodes | None = None

    # --- events ---

    def add_static(self, url: str, role: str, now: float) -> None:
        """Add a node that a flag names; it has to identify itself before it gets requests."""
        info = NodeInfo(node_id=url, generation="", role=role, url=url, model="")
        self.members[url] = Member(info, static=True, heard_at=now, reason="not yet reached")

    def register(self, info: NodeInfo, now: float) -> tuple[Members, list[Change]]:
        """Handle a node's registration or heartbeat.

        Raises:
            RequestError: The node can't be a member: it is malformed (400), has another model or
                the id of a node that a flag names (409), was removed or replaced before (410), or
                another live node has its id (503: it may try again).
        """
        self._check(info)
        if (info.node_id, info.generation) in self._removed:
            raise RequestError(
                f"node {info.node_id} was removed, or replaced by another life of it; restart it "
                "to let it join again",
                status=410,
                code="removed",
            )
        member = self.members.get(info.node_id)
        changes: list[Change] = []
        if member is None or member.info.generation != info.generation:
            if member is not None:
                self._check_replaces(info, member, now)
            member, changes = self._join(info, member, static=False, now=now)
        member.heard_at = now
        changes += self._follow(member, info, now)
        others = [m.info.control_address for m in self.members.values() if m is not member]
        addresses = tuple(sorted(address for address in others if address is not None))
        member.told = frozenset(addresses)
        return Members(control_addresses=addresses, heartbeat_s=self.timers.heartbeat_s), changes

    def identified(self, url: str, info: NodeInfo, now: float) -> list[Change]:
        """Handle a static node's report of itself.

        It keeps the URL of its flag: the node may know itself by another.
        """
        statics = (m for m in self.members.values() if m.static and m.info.url == url)
        known = next(statics, None)
        if known is None:
            return []
        wanted, info = known.info.role, msgspec.structs.replace(info, url=url)
        try:
            self._check(info)
            if info.role != wanted:
                raise RequestError(f"--{wanted} names {url}, a node of role {info.role!r}")
            holder = self.members.get(info.node_id, known)
            if holder is not known:
                raise RequestError(f"node id {info.node_id!r} belongs to {holder.info.url}, too")
        except RequestError as error:
            return self._move(known, NodeState.UNHEALTHY, error.message)
        if known.info.generation == info.generation:
            return self._follow(known, info, now)
        del self.members[known.info.node_id]
        old = known if known.info.generation else None
        member, changes = self._join(info, old, static=True, now=now)
        return changes + self._follow(member, info, now)

    def probed(
        self, node_id: str, generation: str, error: str | None, now: float, *, answered: bool = True
    ) -> list[Change]:
        """Handle the end of a health probe.

        Args:
            node_id: Id of the node.
            generation: Its generation.
            error: Why the node is not healthy; None if it is.
            now: Seconds on the clock.
            answered: Whether the node itself gave the error; without any answer it is lost.
        """
        member = self.in_life(node_id, generation)
        if member is None:
            return []
        if error is not None:
            member.failed_probes += 1
            if not member.info.generation:
                member.reason = error  # it may still be starting
            elif member.failed_probes >= self.timers.failures:
                return self._move(member, NodeState.UNHEALTHY, error, lost=not answered)
            return []
        member.failed_probes = 0
        if member.state in (NodeState.STARTING, NodeState.UNHEALTHY) and not self._silent(
            member, now
        ):
            return self._move(member, NodeState.READY, "")
        return []

    def is_draining(self, node: NodeInfo) -> bool:
        """Whether a node of this generation was told to stop or to take nothing new."""
        member = self.in_life(node.node_id, node.generation)
        return member is not None and member.state is NodeState.DRAINING

    def unreachable(self, node_id: str, generation: str, error: str) -> list[Change]:
        """Handle a refused connection to a node: it is unhealthy without further probes."""
        member = self.in_life(node_id, generation)
        if member is None:
            return []
        member.failed_probes = self.timers.failures
        return self._move(member, NodeState.UNHEALTHY, error, lost=True)

    def tick(self, now: float) -> list[Change]:
        """Handle the passing of time: silent nodes, and trials of failing pairs."""
        changes: list[Change] = []
        for member in list(self.members.values()):
            if any([pair.tick(now) for pair in member.failing.values()]):
                self._ready = None
            if member.static or not self.hears:
                continue
            if now - member.heard_at >= self.timers.forget_s:
                changes += self._move(member, NodeState.GONE, "silent for too long")
                del self.members[member.info.node_id]
            elif self._silent(member, now):
                changes += self._move(member, NodeState.UNHEALTHY, "heartbeats stopped")
        return changes

    def stood_still(self, seconds: float, now: float) -> None:
        """Extend heartbeat deadlines by the seconds in which this process did not listen."""
        for member in self.members.values():
            member.heard_at = min(member.heard_at + seconds, now)

    def misfits(self, node_id: str) -> list[str]:
        """Why a ready node and others never hand over, though their roles would allow it."""
        mine = self.members[node_id].info
        found: dict[str, str] = {}
        for member in self.members.values():
            other = member.info
            roles = (mine.role, other.role)
            fit = roles[0] in SOURCES and roles[1] in TARGETS
            fit = fit or (roles[1] in SOURCES and roles[0] in TARGETS)
            if other is mine or member.state is not NodeState.READY or not fit:
                continue
            if other.identity != mine.identity:
                reason = "other weights or settings of the KV cache: compare model folders, "
                reason += "--dtype, --kv-cache-dtype and --quantization"
                found[reason] = other.node_id
            elif other.transport != mine.transport:
                found[f"transport {mine.transport!r} against {other.transport!r}"] = other.node_id
        return [f"never hands over with {other}: {reason}" for reason, other in found.items()]

    def drain(self, node_id: str) -> list[Change]:
        """Send no new requests to a node; those it has go on.

        Raises:
            RequestError: There is no such node (404).
        """
        return self._move(self.require(node_id), NodeState.DRAINING, "drained on request")

    def pause(self, node_id: str, *, paused: bool) -> None:
        """Send no new requests to a node, or resume; its next generation is not paused.

        Raises:
            RequestError: There is no such node (404), or it is to resume and is drained (409).
        """
        member = self.require(node_id)
        if not paused and member.state is NodeState.DRAINING:
            told = f"node {node_id} is draining, which only ends with a restart of the node"
            raise RequestError(told, status=409, code="draining")
        member.paused, self._ready = paused, None

    def remove(self, node_id: str, generation: str | None = None) -> list[Change]:
        """Forget a node for good; only a new generation of it may join again.

        Args:
            node_id: Id of the node.
            generation: Generation to forget; None forgets the current one.

        Raises:
            RequestError: There is no such node (404), or it has another generation.
        """
        member = self.require(node_id)
        if generation not in (None, member.info.generation):
            raise RequestError(
                f"node {node_id!r} has another generation than {generation!r}",
                status=404,
                code="no_node",
            )
        self._forget_for_good(member)
        changes = self._move(member, NodeState.GONE, "removed")
        del self.members[node_id]
        return changes

    def sent(self, route: Route) -> None:
        """Record that nodes were asked to send KV, which uses up a failing pair's trial."""
        prefills = route.source or route.target
        for sender, receiver in ((route.source, route.target), (route.holder, prefills)):
            member = self.members.get(receiver.node_id) if sender is not None else None
            if member is None or not member.failing or sender is None:
                continue
            pair = member.failing.get(sender.control_address or "")
            if pair is not None and pair.is_due:
                pair.made_trials, self._ready = pair.trials, None

    # --- questions ---

    def ready(self) -> ReadyNodes:
        """Nodes that may get new requests."""
        if self._ready is None:
            self._ready = ReadyNodes(self.members.values())
        return self._ready

    def in_life(self, node_id: str, generation: str) -> Member | None:
        """A node, if it is of this generation."""
        member = self.members.get(node_id)
        return member if member is not None and member.info.generation == generation else None

    def require(self, node_id: str) -> Member:
        """A node by its id.

        Raises:
            RequestError: There is no such node (404).
        """
        member = self.members.get(node_id)
        if member is None:
            raise RequestError(
                f"no node {node_id!r}; known: {sorted(self.members)}", status=404, code="no_node"
            )
        return member

    def receivers(self, source: NodeInfo) -> list[NodeInfo]:
        """Nodes that may get new requests, and KV from a given node whatever its state."""
        return sorted(self.ready().receivers(source), key=lambda node: node.node_id)

    def show(self, members: Iterable[Member]) -> None:
        """Replace all members by another table's."""
        before, self._ready = self.members, None
        self.members = {member.info.node_id: member for member in members}
        for node_id, member in self.members.items():
            for address, pair in member.failing.items():  # the publisher itself makes no trials
                old = before[node_id].failing.get(address) if node_id in before else None
                pair.made_trials = old.made_trials if old is not None else 0

    def probe_targets(self) -> list[Member]:
        """Members whose health is to be probed."""
        return [m for m in self.members.values() if m.state is not NodeState.LOADING]

    # --- inside ---

    def _check_host(self, host: str, address: str, param: str) -> None:
        if self.loopback_only and not is_loopback(host):
            raise RequestError(
                f"{address} is not on this machine; start router and nodes with --cluster-key",
                param=param,
                status=403,
            )

    def _check(self, info: NodeInfo) -> None:
        if info.role not in ROLES:
            raise RequestError(f"role {info.role!r} is none of {ROLES}", param="role")
        if not info.node_id or "/" in info.node_id:
            raise RequestError("node_id is empty or contains a slash", param="node_id")
        try:
            check_url("url", info.url)
        except ConfigError as error:
            raise RequestError(f"{info.url!r} is no http URL", param="url") from error
        self._check_host(urlsplit(info.url).hostname or "", info.url, "url")
        # Members dial the control address, routers the engine address.
        for name in ("control_address", "engine_address"):
            address: str | None = getattr(info, name)
            local = name == "engine_address" and (not address or address.startswith("ipc:///"))
            if address is None or local:
                continue
            host = tcp_host(address)
            if host is None:
                raise RequestError(f"{name} must be tcp://host:port, not {address!r}", param=name)
            self._check_host(host, address, name)
        if self.loopback_only and info.engine_address.startswith("tcp:"):
            raise RequestError(
                "the node was started with a cluster key and the router without one, so it can't "
                "reach the node's engine; start the router with the same --cluster-key",
                param="engine_address",
                status=403,
            )
        if self.model is None:
            self.model = info.model
        elif info.model != self.model:
            raise RequestError(
                f"this router serves {self.model!r} until it is restarted, the node {info.model!r}"
                "; give both the same --served-model-name if it is one model",
                param="model",
                status=409,
            )

    def _check_replaces(self, info: NodeInfo, member: Member, now: float) -> None:
        """Refuse a node that registers with the id of another one that may still live."""
        where = f"node id {info.node_id!r} belongs to the node at {member.info.url}"
        if member.static:
            raise RequestError(f"{where}, which a flag names", param="node_id", status=409)
        lives = member.state is not NodeState.UNHEALTHY and not self._silent(member, now)
        if lives and member.info.url != info.url:
            raise RequestError(
                f"{where}, which is {member.state}; give one of the two another --node-id",
                param="node_id",
                status=503,
                code="node_id_in_use",
            )

    def _join(
        self, info: NodeInfo, old: Member | None, *, static: bool, now: float
    ) -> tuple[Member, list[Change]]:
        """Add a node, in the place of its old generation if there is one."""
        changes: list[Change] = []
        if old is not None:
            changes = self._move(old, NodeState.GONE, "restarted", lost=True)
            self._forget_for_good(old)
        member = Member(info, static=static, heard_at=now, told=None if static else frozenset())
        self.members[info.node_id] = member
        return member, [
            *changes,
            Change(info.node_id, NodeState.GONE, NodeState.STARTING, "joined"),
        ]

    def _forget_for_good(self, member: Member) -> None:
        self._removed[member.info.node_id, member.info.generation] = None
        while len(self._removed) > MAX_REMOVED:
            del self._removed[next(iter(self._removed))]

    def _follow(self, member: Member, info: NodeInfo, now: float) -> list[Change]:
        """Take over a node's report, except that only a probe makes it ready."""
        member.info, self._ready = info, None
        infos = [known.info for known in self.members.values()]
        lives = {i.control_address: i.generation for i in infos if i.control_address is not None}
        member.failing = failing_pairs(member.failing, info.wire_failures, lives, now)
        announced = info.state
        if announced == NodeState.DRAINING:
            return self._move(member, NodeState.DRAINING, "the node is drained, or stops")
        if announced == NodeState.LOADING and member.state is NodeState.STARTING:
            return self._move(member, NodeState.LOADING, "")
        if announced == NodeState.READY and member.state is NodeState.LOADING:
            return self._move(member, NodeState.STARTING, "loaded")
        return []

    def _move(
        self, member: Member, new: NodeState, reason: str, *, lost: bool = False
    ) -> list[Change]:
        old, self._ready = member.state, None
        # A draining node only leaves: its health changes nothing.
        if old is new or (old is NodeState.DRAINING and new is not NodeState.GONE):
            return []
        member.state, member.reason = new, reason
        return [Change(member.info.node_id, old, new, reason, lost)]

    def _silent(self, member: Member, now: float) -> bool:
        limit = self.timers.missed * self.timers.heartbeat_s
        return self.hears and not member.static and now - member.heard_at >= limit
