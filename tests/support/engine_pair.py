"""A prefill and a decode engine in threads of one process.

KV is transferred by the memory transport, whose hub can hold writes in flight.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvbaton.connectors.transfer.config import HandoverConfig
from kvbaton.engine.build import ConnectorFactory
from kvbaton.messages.engine import AddRequest, TransferSpec
from kvbaton.roles import HandoverFactory
from kvbaton.types import TransferTimers
from tests.support.engine_node import HUB, Call, Node, greedy
from tests.support.making import making
from tests.support.waiting import until

PROMISE_S = 20.0
"""Seconds after an abort within which blocks are free: less than any deadline of `PATIENT`."""

PATIENT = TransferTimers(resend=0.1, progress_deadline=60.0, total=60.0, lease=60.0)
"""Timers with long deadlines; messages are resent early, since answers take milliseconds."""

Expected = Callable[..., list[int]]


class Pair:
    """A prefill node P and a decode node D; see the module's docstring.

    Args:
        folder: Folder of the model.
        timers: Timers of the protocol.
        transport: Spec for both sides, or one per side.
        p: Engine settings of P.
        d: Engine settings of D.
    """

    def __init__(
        self,
        folder: Path,
        *,
        timers: TransferTimers = PATIENT,
        transport: str | tuple[str, str] = "memory",
        p: Mapping[str, Any] | None = None,
        d: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.timers = timers
        self.settings = {"p": dict(p or {}), "d": dict(d or {})}
        of_p, of_d = (transport, transport) if isinstance(transport, str) else transport
        self.p = self._start("p", HandoverFactory(self._config(of_p), "prefill"))
        self.d = self._start("d", HandoverFactory(self._config(of_d), "decode"))
        self._names = itertools.count()
        self._retired: list[Node] = []

    def _config(self, transport: str, port: int = 0) -> HandoverConfig:
        return HandoverConfig(transport=transport, timers=self.timers, control_port=port)

    def _start(self, side: str, factory: ConnectorFactory) -> Node:
        return Node(side, self.folder, factory, **self.settings[side])

    # --- requests ---

    @property
    def address(self) -> str:
        """P's control address."""
        address = self.p.core.control_address
        assert address is not None
        return address

    def requests(self, prompt: Sequence[int], **params: Any) -> tuple[AddRequest, AddRequest]:
        """The two requests that a router sends, to P and to D."""
        source = TransferSpec(role="source", transfer_id=os.urandom(16))
        target = TransferSpec(role="target", transfer_id=source.transfer_id, peer=self.address)
        name = f"r{next(self._names)}"
        of_p, of_d = (
            AddRequest(
                request_id=name, token_ids=array("I", prompt), params=greedy(params), transfer=spec
            )
            for spec in (source, target)
        )
        return of_p, of_d

    def hand_over(
        self, prompt: Sequence[int], *, goes_on: bool = False, **params: Any
    ) -> tuple[Call, Call]:
        """Send a prompt to both at once; returns P's and D's call.

        With `goes_on`, P may sample a second token, and gets the request after D's reservation.
        """
        of_p, of_d = self.requests(prompt, **params)
        if not goes_on:
            return self.p.add(of_p), self.d.add(of_d)
        transfer, sender = of_p.transfer, self.p.transfers.sender
        assert transfer is not None
        assert sender is not None
        at_d, live = self.d.add(of_d), sender.source.live
        until(
            lambda: self.p.transfers.inspect(lambda: transfer.name in live), "P has the reservation"
        )
        return self.p.add(replace(of_p, transfer=replace(transfer, goes_on=True))), at_d

    def hand_over_to_d(self, prompt: Sequence[int], **params: Any) -> Call:
        """Send a prompt to D alone, as the target of a hand-over by P."""
        return self.d.add(self.requests(prompt, **params)[1])

    # --- start and end ---

    def start_p_again(self) -> None:
        """Restart P after a kill, as a new generation with the same control address."""
        assert self.p in self._retired
        self.p.bury()
        port = int(self.address.rpartition(":")[2])
        self.p = self._start("p", HandoverFactory(self._config("memory", port), "prefill"))

    def kill(self, side: str) -> None:
        """Kill one side. `close` releases its resources, since its threads may be held."""
        node: Node = getattr(self, side)
        self._retired.append(node)
        node.strike()

    def living(self) -> list[Node]:
        """Nodes that are alive."""
        return [node for node in (self.p, self.d) if node not in self._retired]

    def settle(self, seconds: float = PROMISE_S) -> None:
        """Wait until both sides are at rest; check that their ledgers always balanced."""
        for node in self.living():
            left: dict[str, float] = {}

            def at_rest(node: Node = node, left: dict[str, float] = left) -> bool:
                left.clear()
                left.update(node.leftovers())
                return not left

            try:
                until(at_rest, f"{node.id.node} at rest", seconds)
            except AssertionError as error:
                raise AssertionError(f"{error}; {left}; {node.ask('state')}") from error
        self.check()

    def check(self) -> None:
        """Check that neither side has failed."""
        for node in self.living():
            assert node.transfers.failure is None, f"{node.id.node}: {node.transfers.failure}"
        for node in (self.p, self.d, *self._retired):
            assert node.failure is None, f"{node.id.node}: {node.failure!r}"
            assert node.imbalance == 0, f"{node.id.node}: the ledger was off by {node.imbalance}"

    def close(self) -> None:
        """Kill live nodes, and release all resources."""
        HUB.release()
        for node in self.living():
            self.kill(node.id.node)
        for node in self._retired:
            node.bury()


# --- fixtures, for a conftest with a fixture `folder` (the model) ---


@pytest.fixture
def make_pair(folder: Path) -> Iterator[Callable[..., Pair]]:
    """Make pairs, and close them at the end."""
    with making(partial(Pair, folder), Pair.close) as make:
        yield make


@pytest.fixture(scope="session")
def expected(folder: Path) -> Iterator[Expected]:
    """Answers of a single node without hand-overs."""
    node = Node("alone", folder, HandoverFactory(HandoverConfig(transport="memory"), "decode"))
    known: dict[tuple[Any, ...], list[int]] = {}

    def answer(prompt: Sequence[int], **params: Any) -> list[int]:
        key = (tuple(prompt), *sorted(params.items()))
        if key not in known:
            known[key] = node.generate(prompt, **params).result()
        return known[key]

    yield answer
    node.strike()
    node.bury()
