"""The tables are filled, each rule is a method with a text, and the page is up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbaton.connectors.protocol.machine import Alarms, Table
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.protocol.target import Target
from kvbaton.messages.control import Control, Message
from kvbaton.types import TransferTimers
from tests.connectors import protocol_page

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


@pytest.mark.parametrize("side", [Source, Target])
def test_each_cell_holds_a_rule_with_a_text(side: Any) -> None:
    table: Table = side.table
    assert all(len(row) == len(side.states) for row in table.values())
    rules = {rule for row in table.values() for rule in row if rule is not None}
    texts = [(rule.__doc__ or "").strip() for rule in rules]
    assert all(text and "\n" not in text for text in texts)
    assert len(set(texts)) == len(rules), "rules that do the same have one name"


@pytest.mark.parametrize("side", [Source, Target])
def test_only_alarms_can_not_happen_and_every_live_state_has_a_deadline(side: Any) -> None:
    for event, row in side.table.items():
        assert isinstance(event, str) or None not in row
    first, *live, last = side.table["deadline"]
    assert (first, last) == (None, None)
    assert None not in live


def test_each_message_has_a_row_or_belongs_to_the_session() -> None:
    messages = {kind.__name__ for kind in Control.__args__}
    rows = {protocol_page.event_name(event) for event in (*Source.table, *Target.table)}
    assert messages == {"Hello", "Welcome", "SessionDrained"} | (rows & messages)
    assert all(issubclass(kind, Message) for kind in Control.__args__)


def test_each_timer_is_documented_with_its_default() -> None:
    lines = PAGE.read_text().split("## Timers\n")[1].split("\n## ")[0].splitlines()
    rows = [line.split(" | ")[:2] for line in lines if line.startswith("| `")]
    timers = vars(TransferTimers())
    assert rows == [[f"| `{name}`", f"{value:g}"] for name, value in timers.items()]


def test_a_timer_is_positive() -> None:
    with pytest.raises(ValueError, match="timer lease must be positive, not 0"):
        TransferTimers(lease=0)


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert protocol_page.splice(page) == page


def test_alarms_ring_in_order_and_only_once() -> None:
    alarms = Alarms()
    for i in range(200):
        alarms.ring_in("a", i, 200.0 - i)
        alarms.ring_in("a", i, 100.0 - i)
    alarms.clear("a", 199)
    alarms.clear("b", 198)
    assert alarms.next_alarm() == -98.0
    rung = []
    while (key := alarms.take_alarm()) is not None:
        rung.append(key[1])
    assert rung == list(range(198, 99, -1))
    assert alarms.take_alarm() is None
    assert alarms.rings_at("a", 5) == 95.0
