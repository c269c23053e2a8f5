"""Who belongs to the cluster and who may serve: a state machine without I/O.

Laws:

1. A node is (node id, generation). A new generation replaces the old one; a removed generation
   never comes back.
2. Only a node in state ``ready`` gets new requests. It is ready once it has answered a probe, and
   until `failures` probes in a row failed, its heartbeats stopped, or it was drained.
3. A node that registered itself and falls silent is forgotten; one named by a flag is probed for
   ever.

The clock is an argument of every event, in seconds of a monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

import msgspec

from kvbaton.errors import RequestError
from kvbaton.messages.nodes import Members, NodeInfo
from kvbaton.server.cluster_token import is_loopback
from kvbaton.server.transfer_params import tcp_host

ROLES = ("prefill", "decode", "encode")
MAX_REMOVED = 256
"""Removed generations that are remembered."""


class State(StrEnum):
    """What a node is good for."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True)
class MembershipTimers:
    """Periods and limits.

    Attributes:
        heartbeat_s: a registered node calls this often.
        missed: heartbeats missed until a node is unhealthy.
        probe_period_s: every node's health is asked this often.
        probe_timeout_s: and must be answered within this time.
        failures: failed probes in a row until a node is unhealthy.
        forget_s: a registered node that was silent for this long is forgotten.
    """

    heartbeat_s: float = 1.0
    missed: int = 5
    probe_period_s: float = 1.0
    probe_timeout_s: float = 2.0
    failures: int = 3
    forget_s: float = 60.0


@dataclass
class Member:
    """One node as the router sees it.

    Attributes:
        info: what it said of itself; a provisional one until a static node has answered.
        static: named by a flag instead of having registered itself.
        heard_at: when its last heartbeat came.
        failed_probes: in a row.
        told: control addresses that it has been told are members; None for a static node, which
            has its own ``--peer`` flags.
        reason: why it is in its state, for people.
    """

    info: NodeInfo
    static: bool
    heard_at: float
    state: State = State.STARTING
    failed_probes: int = 0
    told: frozenset[str] | None = None
    reason: str = ""

    @property
    def serves_prompts(self) -> bool:
        """Whether prompts may be sent there; an encoder node takes items only."""
        return self.info.role != "encode"


@dataclass(frozen=True)
class Change:
    """A node went from one state to another.

    Attributes:
        lost: whatever it was doing for us, it no longer does.
    """

    node_id: str
    old: State
    new: State
    reason: str
    lost: bool = False

    def describe(self) -> str:
        """One line for the log."""
        why = f" ({self.reason})" if self.reason else ""
        return f"node {self.node_id}: {self.old} -> {self.new}{why}"


@dataclass
class Membership:
    """The table of nodes.

    Args:
        timers: see there.
        loopback_only: refuse nodes elsewhere (there is no cluster key).
        model: the one model's name; None takes that of the first node.
    """

    timers: MembershipTimers = field(default_factory=MembershipTimers)
    loopback_only: bool = True
    model: str | None = None
    members: dict[str, Member] = field(default_factory=dict)
    _removed: dict[tuple[str, str], None] = field(default_factory=dict)

    # --- events ---

    def add_static(self, url: str, role: str, now: float) -> None:
        """A flag names a node; it is asked who it is before it gets requests."""
        info = NodeInfo(node_id=url, generation="", role=role, url=url, model="")
        self.members[url] = Member(info, static=True, heard_at=now, reason="not yet reached")

    def register(self, info: NodeInfo, now: float) -> tuple[Members, list[Change]]:
        """A node introduces itself or repeats its heartbeat.

        Raises:
            RequestError: it can't be a member: malformed (400), another model or a name that a
                flag has given to another node (409), or removed before (410).
        """
        self._check(info)
        if (info.node_id, info.generation) in self._removed:
            raise RequestError(
                f"node {info.node_id} was removed; restart it to let it join again",
                status=410,
                code="removed",
            )
        member = self.members.get(info.node_id)
        changes: list[Change] = []
        if member is None or member.info.generation != info.generation:
            member, changes = self._join(info, static=False, now=now)
        member.info, member.heard_at = info, now
        changes += self._follow_announced_state(member)
        return self._tell(member), changes

    def identified(self, url: str, info: NodeInfo, now: float) -> list[Change]:
        """A static node said who it is.

        Its url stays the one the flag named: the node may know itself by another.
        """
        known = self._static_at(url)
        if known is None:
            return []
        wanted, info = known.info.role, msgspec.structs.replace(info, url=url)
        try:
            self._check(info)
            if info.role != wanted:
                raise RequestError(f"--{wanted} names {url}, which is a {info.role} node")
        except RequestError as error:
            return self._move(known, State.UNHEALTHY, error.message)
        if known.info.generation == info.generation:
            known.info = info
            return self._follow_announced_state(known)
        del self.members[known.info.node_id]
        member, changes = self._join(info, static=True, now=now)
        return changes + self._follow_announced_state(member)

    def probed(
        self,
        node_id: str,
        generation: str,
        error: str | None,
        now: float,
        *,
        answered: bool = True,
    ) -> list[Change]:
        """A health probe came to an end.

        Args:
            node_id: who was asked.
            generation: which life of it.
            error: why the node is not healthy; None if it is.
            now: the clock.
            answered: the node itself said so; without any answer it is lost.
        """
        member = self.members.get(node_id)
        if member is None or member.info.generation != generation:
            return []
        if error is not None:
            member.failed_probes += 1
            if not member.info.generation:
                member.reason = error  # it may still be starting
            elif member.failed_probes >= self.timers.failures:
                return self._move(member, State.UNHEALTHY, error, lost=not answered)
            return []
        member.failed_probes = 0
        if member.state in (State.STARTING, State.UNHEALTHY) and not self._silent(member, now):
            return self._move(member, State.READY, "")
        return []

    def unreachable(self, node_id: str, generation: str, error: str) -> list[Change]:
        """A node refused a connection: no need to wait for more probes."""
        member = self.members.get(node_id)
        if member is None or member.info.generation != generation:
            return []
        member.failed_probes = self.timers.failures
        return self._move(member, State.UNHEALTHY, error, lost=True)

    def tick(self, now: float) -> list[Change]:
        """Time has passed: notice silence."""
        changes: list[Change] = []
        for member in list(self.members.values()):
            if member.static:
                continue
            if now - member.heard_at >= self.timers.forget_s:
                changes += self._move(member, State.GONE, "silent for too long")
                del self.members[member.info.node_id]
            elif self._silent(member, now):
                changes += self._move(member, State.UNHEALTHY, "heartbeats stopped")
        return changes

    def drain(self, node_id: str) -> list[Change]:
        """Send no new requests to a node; those it has go on.

        Raises:
            RequestError: there is no such node (404).
        """
        return self._move(self._require(node_id), State.DRAINING, "drained on request")

    def remove(self, node_id: str) -> list[Change]:
        """Forget a node for good; only a new generation of it may join again.

        Raises:
            RequestError: there is no such node (404).
        """
        member = self._require(node_id)
        self._removed[node_id, member.info.generation] = None
        while len(self._removed) > MAX_REMOVED:
            del self._removed[next(iter(self._removed))]
        changes = self._move(member, State.GONE, "removed")
        del self.members[node_id]
        return changes

    # --- questions ---

    def ready(self) -> list[Member]:
        """Members that may get new requests."""
        return [m for m in self.members.values() if m.state is State.READY]

    def serving(self) -> list[Member]:
        """Members that may get new prompts."""
        return [m for m in self.ready() if m.serves_prompts]

    def probe_targets(self) -> list[Member]:
        """Members whose health is worth asking."""
        return [m for m in self.members.values() if m.state is not State.LOADING]

    def max_model_len(self) -> int | None:
        """Longest prompt plus output that every such node takes; None if nobody said."""
        lengths = (m.info.max_model_len for m in self.serving())
        return min((length for length in lengths if length), default=None)

    def vocab_size(self) -> int:
        """Token ids below it are known to all serving nodes; 0 if nobody said."""
        return min((m.info.vocab_size for m in self.serving() if m.info.vocab_size), default=0)

    # --- inside ---

    def _check(self, info: NodeInfo) -> None:
        if info.role not in ROLES:
            raise RequestError(f"role {info.role!r} is none of {ROLES}", param="role")
        if not info.node_id or "/" in info.node_id:
            raise RequestError("node_id is empty or contains a slash", param="node_id")
        url = urlsplit(info.url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise RequestError(f"{info.url!r} is no http URL", param="url")
        if self.loopback_only and not is_loopback(url.hostname):
            raise RequestError(
                f"{info.url} is not on this machine; start router and nodes with --cluster-key",
                param="url",
                status=403,
            )
        self._check_address("control_address", info.control_address)
        if self.model is None:
            self.model = info.model
        elif info.model != self.model:
            raise RequestError(
                f"this router serves {self.model!r}, the node {info.model!r}",
                param="model",
                status=409,
            )

    def _check_address(self, name: str, address: str | None) -> None:
        """Members are told it and dial it, so nothing else may get in."""
        if address is None:
            return
        host = tcp_host(address)
        if host is None:
            raise RequestError(f"{name} must be tcp://host:port, not {address!r}", param=name)
        if self.loopback_only and not is_loopback(host):
            raise RequestError(
                f"{address} is not on this machine; start router and nodes with --cluster-key",
                param=name,
                status=403,
            )

    def _join(self, info: NodeInfo, *, static: bool, now: float) -> tuple[Member, list[Change]]:
        old = self.members.get(info.node_id)
        if old is not None and old.static != static:
            raise RequestError(
                f"node id {info.node_id!r} belongs to another node", param="node_id", status=409
            )
        changes = self._move(old, State.GONE, "restarted", lost=True) if old is not None else []
        member = Member(info, static=static, heard_at=now, told=None if static else frozenset())
        self.members[info.node_id] = member
        return member, [*changes, Change(info.node_id, State.GONE, State.STARTING, "joined")]

    def _follow_announced_state(self, member: Member) -> list[Change]:
        """What a node says of itself counts, except that only a probe makes it ready."""
        announced = member.info.state
        if announced == State.DRAINING:
            return self._move(member, State.DRAINING, "the node is shutting down")
        if announced == State.LOADING and member.state is State.STARTING:
            return self._move(member, State.LOADING, "")
        if announced == State.READY and member.state is State.LOADING:
            return self._move(member, State.STARTING, "loaded")
        return []

    def _tell(self, member: Member) -> Members:
        others = [m.info.control_address for m in self.members.values() if m is not member]
        addresses = tuple(sorted(address for address in others if address is not None))
        member.told = frozenset(addresses)
        return Members(control_addresses=addresses, heartbeat_s=self.timers.heartbeat_s)

    def _move(self, member: Member, new: State, reason: str, *, lost: bool = False) -> list[Change]:
        old = member.state
        # Draining ends by leaving only: health changes nothing about it.
        if old is new or (old is State.DRAINING and new is not State.GONE):
            return []
        member.state, member.reason = new, reason
        return [Change(member.info.node_id, old, new, reason, lost)]

    def _silent(self, member: Member, now: float) -> bool:
        limit = self.timers.missed * self.timers.heartbeat_s
        return not member.static and now - member.heard_at >= limit

    def _static_at(self, url: str) -> Member | None:
        statics = (m for m in self.members.values() if m.static and m.info.url == url)
        return next(statics, None)

    def _require(self, node_id: str) -> Member:
        member = self.members.get(node_id)
        if member is None:
            raise RequestError(
                f"no node {node_id!r}; known: {sorted(self.members)}", status=404, code="no_node"
            )
        return member
