"""The tables are filled, each rule is a method with a text, and the page is up to date."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pytest

from kvbaton.connectors.protocol import pages
from kvbaton.connectors.protocol.alarms import Alarms
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.protocol.table import (
    SOURCE,
    SOURCE_ALARMS,
    SOURCE_RULES,
    TARGET,
    TARGET_ALARMS,
    TARGET_RULES,
    TIMERS,
    Row,
    SourceState,
    TargetState,
)
from kvbaton.connectors.protocol.target import Target
from kvbaton.messages.control import Control, Message
from kvbaton.types import TransferTimers

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
SIDES = [
    pytest.param(SOURCE, SOURCE_RULES, SOURCE_ALARMS, SourceState, Source, id="source"),
    pytest.param(TARGET, TARGET_RULES, TARGET_ALARMS, TargetState, Target, id="target"),
]


@pytest.mark.parametrize(("table", "rules", "alarms", "states", "machine"), SIDES)
def test_each_cell_names_a_method_with_a_text(
    table: dict[str, Row],
    rules: dict[str, str],
    alarms: dict[Enum, tuple[str, ...]],
    states: type[Enum],
    machine: type,
) -> None:
    used = {rule for row in table.values() for rule in row}
    assert used == set(rules)
    assert all(len(row) == len(states) for row in table.values())
    assert all(callable(getattr(machine, f"_{rule}")) for rule in rules)


@pytest.mark.parametrize(("table", "rules", "alarms", "states", "machine"), SIDES)
def test_an_alarm_has_a_rule_exactly_where_it_may_run(
    table: dict[str, Row],
    rules: dict[str, str],
    alarms: dict[Enum, tuple[str, ...]],
    states: type[Enum],
    machine: type,
) -> None:
    names = {name for running in alarms.values() for name in running}
    for name in names:
        where = {s for s, rule in zip(states, table[name], strict=True) if rule != "never"}
        assert where == {s for s, running in alarms.items() if name in running}, name
    assert set(alarms) == set(states) - {states("unknown")}


def test_each_message_has_a_row_or_belongs_to_the_session() -> None:
    messages = {kind.__name__ for kind in Control.__args__}
    assert messages == {"Hello", "Welcome"} | {row for row in (*SOURCE, *TARGET) if row in messages}
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
