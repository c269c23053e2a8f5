"""The target of hand-overs: requests the KV of admitted prompts, and gives it to the engine."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from kvbaton.connectors.address import host_of
from kvbaton.connectors.keys import prompt_key
from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol import events
from kvbaton.connectors.transfer.target_worker import TargetWorker
from kvbaton.connectors.transfer.thread import TransferThread
from kvbaton.connectors.transfer.worker import Timelines, attempt_name
from kvbaton.decode.wire_costs import WireCosts
from kvbaton.engine import request as requests
from kvbaton.engine.executor import Executor
from kvbaton.engine.kv_cache_manager import blocks_of
from kvbaton.engine.kv_connector import HeldBlocks, KVConnector, Load, transfer_consumed
from kvbaton.engine.scheduler import Scheduler
from kvbaton.errors import RequestError
from kvbaton.messages.control import MAX_KEYS
from kvbaton.messages.engine import AddRequest, Mark, Output, TransferSpec
from kvbaton.types import Attempt, Spans

logger = logging.getLogger(__name__)

ENDS = ("delivered", "failed", "cancelled")
"""How a load ends, for metrics."""


def target_of(request: AddRequest) -> TransferSpec | None:
    """The hand-over that a request waits for, if it is a target."""
    transfer = request.transfer
    return transfer if transfer is not None and transfer.role == "target" else None


def _peer(load: Load) -> str:
    """Control address of the node that sends a load."""
    spec = load.sequence.request.spec
    place = target_of(spec) or spec.prefix
    peer = None if place is None else place.peer
    assert peer is not None, "checked in accept"
    return peer


class TargetConnector(KVConnector):
    """Receives prompts from other nodes.

    A hand-over is awaited from the request's arrival until its admission, then live until it is
    delivered or fails. Its blocks stay reserved until no write can land in them any more. Prefixes
    that `PrefixConnector` fetches use the same machinery.

    Args:
        transfers: Transfer thread, with a receiver.
        executor: The ranks.
        scheduler: Admits requests and owns the blocks.
        members: Control addresses that may always be dialled.
        trust_loopback: Whether any loopback address may be dialled (there is no cluster key).
        poison: Whether to fill blocks with NaN before they are reserved (debugging).
        most_blocks: Maximum number of blocks reserved for one source; None for no limit.
    """

    name = "target"
    transfer_role = "target"
    medium = "transferred"
    waits_for_room = True

    def __init__(
        self,
        transfers: TransferThread,
        executor: Executor,
        scheduler: Scheduler,
        *,
        members: Sequence[str],
        trust_loopback: bool,
        poison: bool = False,
        most_blocks: int | None = None,
    ) -> None:
        assert transfers.receiver is not None
        self.transfers = transfers
        self.receiver: TargetWorker = transfers.receiver
        self.executor = executor
        self.scheduler = scheduler
        self.trust_loopback = trust_loopback
        self.poison = poison
        self.most_blocks = most_blocks
        self.wake_fds = (self.receiver.outbox_fd,)
        ends = [(name, end) for name in ("target", "prefix") for end in ENDS]
        self._outcomes = dict.fromkeys([*ends, ("target", "unneeded")], 0)  # by connector's name
        self.wires = WireCosts()
        self._static = frozenset(members)
        self._members: frozenset[str] = frozenset()
        self._awaited: dict[str, TransferSpec] = {}  # by request id
        self._attempts: set[Attempt] = set()  # of `_awaited`
        self._live: dict[Attempt, Load] = {}
        self._delivered: dict[requests.Sequence, Attempt] = {}  # not in a step yet
        self._failed: dict[requests.Request, str] = {}  # reasons; of this turn
        self._unlogged: dict[requests.Request, str] = {}  # of the turn before
        self._timelines = Timelines()
        self._reserved: dict[Attempt, Spans] = {}
        self.set_members(())

    # --- events of requests ---

    @override
    def set_members(self, addresses: Sequence[str]) -> None:
        members = self._static | frozenset(addresses)
        if members != self._members:
            self._members = members
            self.transfers.submit(events.SetMembers(members))

    @override
    def accept(self, request: AddRequest) -> AddRequest:
        transfer = target_of(request)
        if transfer is None:
            return request
        self.check_member(transfer.peer or "", "remote_host")
        if transfer.name in self._reserved or transfer.name in self._attempts:
            raise transfer_consumed(transfer)
        return request

    def check_member(self, peer: str, field: str) -> None:
        """Refuse a peer that is no member: a client must not make this node dial any address.

        Raises:
            RequestError: It is no member (400).
        """
        if not self._is_member(peer):
            raise RequestError(
                f"{peer or 'None'} is not a member of this cluster; members come from the router "
                "or from --peer",
                param=f"kv_transfer_params.{field}",
                code="not_a_member",
            )

    def _is_member(self, address: str) -> bool:
        if address in self._members:
            return True
        try:
            return self.trust_loopback and ipaddress.ip_address(host_of(address)).is_loopback
        except ValueError:
            return False

    @override
    def added(self, sequence: requests.Sequence) -> bool:
        transfer = target_of(sequence.request.spec)
        if transfer is not None:
            self._awaited[sequence.request.request_id] = transfer
            self._attempts.add(transfer.name)
        return False

    def _admitted(self, request: requests.Request) -> TransferSpec:
        """Remove and return an awaited hand-over, when its request is admitted or over."""
        transfer = self._awaited.pop(request.request_id)
        self._attempts.remove(transfer.name)
        return transfer

    @override
    def match(self, sequence: requests.Sequence, num_cached: int) -> int:
        awaits = sequence.request.request_id in self._awaited
        return len(sequence.tokens) - num_cached if awaits else 0

    @override
    def started(self, sequence: requests.Sequence) -> None:
        if sequence.request.request_id in self._awaited:  # all of the prompt is cached here
            self._outcomes["target", "unneeded"] += 1
            self.decline(self._admitted(sequence.request))

    @override
    def launched(self, step: requests.InFlightStep) -> None:
        if not self._delivered:
            return
        for scheduled in step.scheduled:
            attempt = self._delivered.pop(scheduled.sequence, None)
            if attempt is not None:
                self._timelines.mark(attempt, "launched")

    @override
    def decline(self, transfer: TransferSpec) -> None:
        if transfer.peer is not None and self._is_member(transfer.peer):
            self.transfers.submit(events.Unneeded(transfer.name, transfer.peer))

    @override
    def start_load(self, load: Load) -> None:
        request, tokens = load.sequence.request, load.sequence.tokens
        transfer = self._admitted(request)
        assert transfer.peer is not None, "checked in accept"
        attempt = transfer.name
        key = prompt_key(request.root, tokens, extras=request.extras)
        deadline_s = max(0.0, request.deadline - self.scheduler.clock())
        self.begin(
            load, events.Start(attempt, transfer.peer, key, len(tokens), load.spans, deadline_s)
        )

    def begin(self, load: Load, order: events.Start) -> None:
        """Let the transfer thread fill the blocks of a load, also for another connector."""
        self._live[order.attempt] = load
        self._reserved[order.attempt] = load.spans
        if self.poison:
            self.executor.poison(blocks_of(load.spans))
        self.transfers.submit(order)

    def cancel(self, attempt: Attempt, request: requests.Request) -> None:
        """Cancel a request's load if it is live: the request is over."""
        load = self._live.get(attempt)
        if load is not None and load.sequence.request is request:
            del self._live[attempt]
            self._outcomes[load.connector.name, "cancelled"] += 1
            self.transfers.submit(events.CancelTarget(attempt))

    @override
    def finished(self, request: requests.Request) -> None:
        transfer = target_of(request.spec)
        if transfer is None:
            return
        self._delivered.pop(request.sequences[0], None)
        if request.sequences[0].finish_reason == "abort":
            self._failed.pop(request, None)
            self._unlogged.pop(request, None)
        if request.request_id in self._awaited:
            self.decline(self._admitted(request))
        self.cancel(transfer.name, request)

    # --- events of the transfer thread ---

    @override
    def poll(self, now: float) -> list[Output]:
        outputs = []
        for action in self.receiver.take():
            match action:
                case events.Deliver() if (load := self._live.pop(action.attempt, None)) is not None:
                    self.wires.ended(_peer(load), failed=False)
                    if action.crossing is not None:
                        self.wires.observe(action.crossing)
                    if (marks := load.sequence.request.marks) is not None:
                        marks += (Mark(name, at) for name, at in action.times)
                    self._outcomes[load.connector.name, "delivered"] += 1
                    if load.connector is self:
                        self._timelines.mark(action.attempt, "delivered")
                        self._delivered[load.sequence] = action.attempt
                        outputs += self.scheduler.finish_load(
                            load, action.choices, cached_at_source=action.cached_tokens
                        )
                    else:
                        self.scheduler.cut_load(load, action.num_tokens)
                case events.Fail():
                    outputs += self._fail(action)
                case events.Unquarantine():
                    spans = self._reserved.pop(action.attempt, None)
                    if spans is not None:
                        self.scheduler.blocks.release_incoming(spans)
        if self.transfers.failure is not None:  # nothing more arrives: fail what is live
            reason = f"the transfer thread died: {self.transfers.failure}"
            for attempt in list(self._live):
                outputs += self._fail(events.Fail(attempt, 0, reason))
        return outputs

    def _fail(self, action: events.Fail) -> list[Output]:
        load = self._live.pop(action.attempt, None)
        if load is None:
            return []
        self._outcomes[load.connector.name, "failed"] += 1
        if not action.answered:
            self.wires.ended(_peer(load), failed=True)
        if load.connector is not self:
            # With windows or states, a shorter prefix needs blocks that were not reserved.
            whole = all(group.keeps_all for group in self.scheduler.blocks.groups)
            self.scheduler.cut_load(load, action.valid_through if whole else load.start)
            return []
        self._failed[load.sequence.request] = action.reason
        return self.scheduler.fail_load(load, action.valid_through, action.reason)

    @override
    def flush(self) -> None:
        # Logged a turn later: a source may report that its client left before that client's abort
        # arrives here, which is no failure.
        for request, reason in self._unlogged.items():
            logger.warning("request %s: the hand-over failed: %s", request.request_id, reason)
        self._unlogged, self._failed = self._failed, {}

    # --- audit and metrics ---

    @override
    def busy(self) -> bool:
        return bool(self._reserved)

    @override
    def held_blocks(self) -> HeldBlocks:
        return HeldBlocks(incoming=self._reserved.values())

    @override
    def counters(self) -> dict[str, float]:
        totals = {
            f"kvbaton_transfer_{name}_total": value
            for name, value in self.receiver.published.items()
            if name != "unhealthy"
        }
        for (role, outcome), count in self._outcomes.items():
            totals[f'kvbaton_transfers_total{{role="{role}",outcome="{outcome}"}}'] = float(count)
        if self.transfers.sender is None:  # else the source connector counts it
            totals["kvbaton_control_junk_total"] = float(self.transfers.junk)
        return totals

    @override
    def gauges(self) -> dict[str, float]:
        unhealthy = self.receiver.published.get("unhealthy", 0.0) or self.transfers.is_unhealthy()
        return {
            "kvbaton_transfers_live": float(len(self._live)),
            "kvbaton_transfers_quarantined": float(len(self._reserved) - len(self._live)),
            "kvbaton_unhealthy": float(unhealthy),
            **self.wires.gauges(self.scheduler.clock()),
        }

    @override
    def state(self) -> dict[str, Any]:
        return {
            "failure": self.transfers.failure,
            "members": sorted(self._members),
            "live": {
                attempt_name(attempt): load.sequence.request.request_id
                for attempt, load in self._live.items()
            },
            "quarantined": [attempt_name(a) for a in self._reserved if a not in self._live],
            "loads": self._timelines.by_name(),
            **self.transfers.inspect(self.receiver.state),
        }

    @override
    def close(self) -> None:
        self.transfers.close()


MAX_FETCH_S = 30.0
"""Maximum seconds for fetching a prefix, after which the rest of it is computed."""


class PrefixConnector(KVConnector):
    """Fetches prefixes of prompts from other nodes' caches, where a request names the node.

    Blocks are requested by key, once per request, and transferred as those of a hand-over. They
    enter the prefix cache once their digests are verified; the request goes back to the queue and
    finds them there. Blocks that do not arrive are computed.

    Args:
        target: Runs the loads, and knows the members.
    """

    name = "prefix"
    medium = "peer"

    def __init__(self, target: TargetConnector) -> None:
        self._target = target
        self._scheduler = target.scheduler
        self._asked: dict[requests.Request, Attempt] = {}

    @override
    def accept(self, request: AddRequest) -> AddRequest:
        if request.prefix is not None:
            self._target.check_member(request.prefix.peer, "remote_prefix")
        return request

    @override
    def match(self, sequence: requests.Sequence, num_cached: int) -> int:
        request, blocks = sequence.request, self._scheduler.blocks
        prefix = request.spec.prefix
        if prefix is None or request in self._asked or not request.reads_cache:
            return 0
        if target_of(request.spec) is not None:  # a hand-over brings the whole prompt
            return 0
        size = blocks.alignment
        if any(group.block_size != size for group in blocks.groups):
            return 0  # a prefix would end inside a block of some group
        end = min(prefix.num_tokens, len(sequence.tokens) - 1, num_cached + MAX_KEYS * size)
        return max(0, end - end % size - num_cached)

    @override
    def start_load(self, load: Load) -> None:
        request, clock = load.sequence.request, self._scheduler.clock
        assert request.spec.prefix is not None, "only what `match` has offered is loaded"
        attempt = self._asked[request] = Attempt(os.urandom(16), 0)
        groups, size = self._scheduler.blocks.groups, self._scheduler.blocks.alignment
        # Blocks behind a window are not needed.
        wanted = zip(groups, load.spans, strict=True)
        firsts = [s[0].first for g, s in wanted if s and g.kind is not GroupKind.STATE]
        first = min(firsts, default=load.start // size)
        keys = load.sequence.chain(size)[first : load.end // size]
        left = max(0.001, min(request.deadline - clock(), MAX_FETCH_S))
        peer, joined = request.spec.prefix.peer, b"".join(keys)
        self._target.begin(
            load, events.Start(attempt, peer, keys[-1], load.end, load.spans, left, joined)
        )

    @override
    def finished(self, request: requests.Request) -> None:
        if (attempt := self._asked.pop(request, None)) is not None:
            self._target.cancel(attempt, request)
