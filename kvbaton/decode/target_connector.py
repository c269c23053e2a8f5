"""The decode role: asks others for the prompts it admits, and gives them to the engine."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from kvbaton.connectors.protocol.events import (
    CancelTarget,
    Deliver,
    Fail,
    Meet,
    Part,
    Start,
    Unneeded,
    Unquarantine,
)
from kvbaton.connectors.transfer.target_worker import TargetWorker
from kvbaton.connectors.transfer.thread import TransferThread
from kvbaton.connectors.transfer.timeline import attempt_name
from kvbaton.engine.executor import Executor
from kvbaton.engine.request import Request
from kvbaton.engine.scheduler import Admitted, Scheduler
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Output, TransferSpec
from kvbaton.types import Attempt, Spans


class TargetConnector:
    """Receives prompts from other nodes; see `engine.role.Role` for the contract of each method.

    Args:
        transfers: the transfer thread, with a receiver.
        executor: the ranks.
        scheduler: admits requests and owns the blocks.
        members: control addresses that may always be dialled.
        trust_loopback: any loopback address may be dialled (there is no cluster key).
        poison: fill blocks with NaN before they are reserved (debugging).
    """

    def __init__(
        self,
        transfers: TransferThread,
        executor: Executor,
        scheduler: Scheduler,
        *,
        members: Sequence[str],
        trust_loopback: bool,
        poison: bool = False,
    ) -> None:
        assert transfers.receiver is not None
        self.transfers = transfers
        self.receiver: TargetWorker = transfers.receiver
        self.executor = executor
        self.scheduler = scheduler
        self.trust_loopback = trust_loopback
        self.poison = poison
        self.delivered = 0
        self.failed = 0
        self.cancelled = 0
        self.unneeded = 0
        self._static = frozenset(members)
        self._members: frozenset[str] = frozenset()
        self._requests: dict[Attempt, str] = {}
        self._attempts: dict[str, Attempt] = {}
        self._reserved: dict[Attempt, Spans] = {}
        self._outputs: list[Output] = []
        self._on: dict[type, Callable[[Any], None]] = {
            Deliver: self._deliver,
            Fail: self._fail,
            Unquarantine: self._unquarantine,
        }
        transfers.start()
        for address in members:
            transfers.submit(Meet(address))

    # --- requests ---

    @property
    def control_address(self) -> str | None:
        """Nobody needs to dial a target."""
        return None

    @property
    def wake_fd(self) -> int:
        """Readable when the transfer thread has something to say."""
        return self.transfers.outbox_fd

    def set_members(self, addresses: Sequence[str]) -> None:
        """Control addresses that the router vouches for: sessions with new ones are opened now."""
        known, self._members = self._members, frozenset(addresses)
        for address in sorted(self._members - known):
            self.transfers.submit(Meet(address))
        for address in sorted(known - self._members - self._static):
            self.transfers.submit(Part(address))

    def accept(self, request: AddRequest) -> AddRequest:
        """Check a request's part in a hand-over, so that no client makes us dial a stranger."""
        transfer = request.transfer
        if transfer is None:
            return request
        if transfer.role != "target" or transfer.peer is None:
            raise RequestError(
                "this node decodes; send do_remote_decode to a prefill node",
                param="kv_transfer_params.do_remote_decode",
            )
        if not self._is_member(transfer.peer):
            raise RequestError(
                f"{transfer.peer} is not a member of this cluster; members come from the router "
                "or from --peer",
                param="kv_transfer_params.remote_host",
                code="not_a_member",
            )
        return request

    def _is_member(self, address: str) -> bool:
        if address in self._static or address in self._members:
            return True
        try:
            host = urlsplit(address).hostname or ""
            return self.trust_loopback and ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def added(self, request: AddRequest) -> None:
        """A target starts its hand-over at admission, not here."""

    def progressed(self, request: Request) -> None:
        """Nobody waits for what a target computes."""

    def emitted(self, outputs: Sequence[Output]) -> list[Output]:
        """Outputs go out as they are."""
        return list(outputs)

    def ended(self, request_id: str) -> None:
        """The request was aborted: stop its hand-over, keep its blocks until that is safe."""
        attempt = self._attempts.pop(request_id, None)
        if attempt is not None and self._requests.pop(attempt, None) is not None:
            self.cancelled += 1
            self.transfers.submit(CancelTarget(attempt))

    # --- hand-overs ---

    def decline(self, transfer: TransferSpec) -> None:
        """Tell a source that what it was to send is here already."""
        if transfer.peer is not None and self._is_member(transfer.peer):
            attempt = Attempt(transfer.transfer_id, transfer.attempt)
            self.transfers.submit(Unneeded(attempt, transfer.peer))

    def begin(self) -> None:
        """Reserve blocks at the prefill node for what was just admitted."""
        for admitted in self.scheduler.take_admitted():
            self._start(admitted)

    def _start(self, admitted: Admitted) -> None:
        transfer = admitted.transfer
        assert transfer.peer is not None, "checked in accept"
        attempt = Attempt(transfer.transfer_id, transfer.attempt)
        if admitted.full_hit:
            self.unneeded += 1
            self.transfers.submit(Unneeded(attempt, transfer.peer))
            return
        self._requests[attempt] = admitted.request_id
        self._attempts[admitted.request_id] = attempt
        self._reserved[attempt] = admitted.spans
        if self.poison:
            for group, spans in enumerate(admitted.spans):
                self.executor.poison(group, [block for span in spans for block in span.blocks])
        self.transfers.submit(
            Start(
                attempt,
                transfer.peer,
                admitted.prompt_key,
                admitted.num_tokens,
                admitted.spans,
                admitted.deadline_s,
            )
        )

    def poll(self) -> list[Output]:
        """Carry out what the machine decided."""
        for action in self.transfers.take():
            self._on[type(action)](action)
        if self.transfers.failure is not None:
            self._give_up(self.transfers.failure)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _deliver(self, action: Deliver) -> None:
        request_id = self._forget(action.attempt)
        if request_id is None:
            return
        self.delivered += 1
        self._outputs += self.scheduler.loaded(request_id, action.choices, action.cached_tokens)

    def _fail(self, action: Fail) -> None:
        request_id = self._forget(action.attempt)
        if request_id is None:
            return
        self.failed += 1
        self._outputs += self.scheduler.load_failed(request_id, action.valid_through, action.reason)

    def _forget(self, attempt: Attempt) -> str | None:
        request_id = self._requests.pop(attempt, None)
        if request_id is not None:
            self._attempts.pop(request_id, None)
        return request_id

    def _unquarantine(self, action: Unquarantine) -> None:
        if self._reserved.pop(action.attempt, None) is not None:
            self.scheduler.unquarantine(action.attempt)

    def _give_up(self, reason: str) -> None:
        """Without a transfer thread nothing more arrives: serve what is left without it."""
        for attempt in list(self._requests):
            self._fail(Fail(attempt, 0, f"the transfer thread died: {reason}"))

    # --- accounts ---

    def busy(self) -> bool:
        """Whether somebody may still write here."""
        return bool(self._reserved)

    def claims(self) -> tuple[list[Spans], list[Spans]]:
        """Blocks reserved or in quarantine."""
        return list(self._reserved.values()), []

    def counters(self) -> dict[str, float]:
        """Totals."""
        totals = {
            f"kvbaton_transfer_{name}_total": value
            for name, value in self.receiver.published.items()
            if name != "unhealthy"
        }
        for outcome in ("delivered", "failed", "cancelled", "unneeded"):
            name = f'kvbaton_transfers_total{{role="target",outcome="{outcome}"}}'
            totals[name] = float(getattr(self, outcome))
        totals["kvbaton_control_junk_total"] = float(self.transfers.junk)
        return totals

    def gauges(self) -> dict[str, float]:
        """Values now."""
        quarantined = len(self._reserved) - len(self._requests)
        failed = self.transfers.failure is not None
        unhealthy = failed or self.receiver.published.get("unhealthy", 0.0) > 0
        return {
            "kvbaton_transfers_live": float(len(self._requests)),
            "kvbaton_transfers_quarantined": float(quarantined),
            "kvbaton_unhealthy": float(unhealthy),
        }

    def state(self) -> dict[str, Any]:
        """The debugging dump."""
        return {
            "role": "decode",
            "failure": self.transfers.failure,
            "members": sorted(self._static | self._members),
            "live": {attempt_name(a): request_id for a, request_id in self._requests.items()},
            "quarantined": [attempt_name(a) for a in self._reserved if a not in self._requests],
            **self.transfers.inspect(self.receiver.state),
        }

    def close(self) -> None:
        """Stop the transfer thread."""
        self.transfers.close()
