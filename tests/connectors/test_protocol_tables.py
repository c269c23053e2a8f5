"""The tables are filled, each rule is a method with a text, and the page is up to date."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pytest

from kvbaton.connectors.protocol import pages
from kvbaton.connectors.protocol.alarms import Alarms
from kvbaton.connectors.protocol.machine import Table
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.protocol.table import (
    SOURCE_ALARMS,
    TARGET_ALARMS,
    TIMERS,
    SourceState,
    TargetState,
)
from kvbaton.connectors.protocol.target import Target
from kvbaton.messages.control import Control, Message
from kvbaton.types import TransferTimers

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
SIDES = [
    pytest.param(Source.table, SOURCE_ALARMS, SourceState, id="source"),
    pytest.param(Target.table, TARGET_ALARMS, TargetState, id="target"),
]


@pytest.mark.parametrize(("table", "alarms", "states"), SIDES)
def test_each_cell_holds_a_rule_with_a_text(
    table: Table, alarms: dict[Enum, tuple[str, ...]], states: type[Enum]
) -> None:
    assert all(len(row) == len(states) for row in table.values())
    rules = {rule for row in table.values() for rule in row if rule is not None}
    texts = [(rule.__doc__ or "").strip() for rule in rules]
    assert all(text and "\n" not in text for text in texts)
    assert len(set(texts)) > len(rules) - 4, "rules that do the same have one name"


@pytest.mark.parametrize(("table", "alarms", "states"), SIDES)
def test_an_alarm_has_a_rule_exactly_where_it_may_run(
    table: Table, alarms: dict[Enum, tuple[str, ...]], states: type[Enum]
) -> None:
    names = {name for running in alarms.values() for name in running}
    for name in names:
        where = {s for s, rule in zip(states, table[name], strict=True) if rule is not None}
        assert where == {s for s, running in alarms.items() if name in running}, name
    assert set(alarms) == set(states) - {states("unknown"), states("ended")}


def test_each_message_has_a_row_or_belongs_to_the_session() -> None:
    messages = {kind.__name__ for kind in Control.__args__}
    rows = {pages.event_name(event) for event in (*Source.table, *Target.table)}
    assert messages == {"Hello", "Welcome", "SessionDrained"} | (rows & messages)
    assert all(issubclass(kind, Message) for kind in Control.__args__)


def test_each_timer_is_documented() -> None:
    assert list(TIMERS) == list(TransferTimers.__dataclass_fields__)


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert pages.splice(page) == page


def test_alarms_ring_in_order_and_only_once() -> None:
    alarms = Alarms()
    for i in range(200):
        alarms.set("a", i, 200.0 - i)
        alarms.set("a", i, 100.0 - i)
    alarms.clear("a", 199)
    assert alarms.next() == -98.0
    rung = []
    while (key := alarms.take(0.0)) is not None:
        rung.append(key[1])
    assert rung == list(range(198, 99, -1))
    assert alarms.take(0.0) is None
    assert alarms.at("a", 5) == 95.0


def test_alarms_of_an_owner_can_be_cut_to_a_few() -> None:
    alarms = Alarms()
    for name in "abc":
        alarms.set(name, "x", 1.0)
    alarms.keep("x", ["b", "z"])
    assert alarms.take(2.0) == ("b", "x")
    assert alarms.take(2.0) is None
