"""A machine of the hand-over, P's or D's, that a test tells one event after the other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec

from kvbaton.connectors.layout import GroupKind, KVLayout
from kvbaton.connectors.protocol import machine
from kvbaton.connectors.protocol.events import Link, SendMessage, Tick
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.protocol.target import Target
from kvbaton.messages.control import RankCard
from kvbaton.types import Attempt, ChoiceStart, TransferTimers
from tests.simulator.machine_invariants import check_machine

NAME = Attempt(b"t" * 16, 0)
LINK = Link(b"link")
KEY = b"k" * 32
CHOICES = (ChoiceStart(7),)
TIMERS = TransferTimers()
SHARED: Any = SimpleNamespace(shares=((0, 0), (1, 0)))
"""What the machines want of a pairing: both ranks of the source write to the target's."""


class MachineRig:
    """A machine and its time; the peer is a script, and so is how layouts pair."""

    machine: Source | Target

    def __init__(self, pair: Callable[..., Any] = lambda source, target: (SHARED,)) -> None:
        self.now = 0.0
        self.seq = 0
        self.pair = pair

    def do(self, event: Any) -> list[Any]:
        """Tell it an event; its state must be a right one then."""
        with patch.object(machine, "pair_groups", self.pair):
            actions = self.machine.handle(event, self.now)
        check_machine(self.machine)
        return actions

    def wait(self, seconds: float) -> list[Any]:
        """Let time pass, tick by tick."""
        until, actions = self.now + seconds, []
        while (deadline := self.machine.next_alarm()) is not None and deadline <= until:
            self.now = deadline
            actions += self.do(Tick())
        self.now = until
        return actions


def layout(block_size: int, group: int = 0, kind: GroupKind = GroupKind.FULL) -> KVLayout:
    window = 8 if kind is GroupKind.WINDOW else 0
    return KVLayout(group, kind, block_size, 100, (), window)


def cards(*groups: KVLayout, ranks: int = 1) -> tuple[RankCard, ...]:
    return tuple(RankCard(r, b"c", msgspec.msgpack.encode(list(groups))) for r in range(ranks))


def sent(actions: list[Any], kind: type) -> list[Any]:
    """Messages of a kind among what is to be done."""
    return [
        a.message for a in actions if isinstance(a, SendMessage) and isinstance(a.message, kind)
    ]


def of(actions: list[Any], kind: type) -> list[Any]:
    """Actions of a kind."""
    return [a for a in actions if isinstance(a, kind)]
