"""Invariants of the two machines, read off their own records between two events."""

from __future__ import annotations

from kvbaton.connectors.protocol.incoming import Incoming, TargetState
from kvbaton.connectors.protocol.machine import SessionState
from kvbaton.connectors.protocol.outgoing import Outgoing, SourceState
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.protocol.target import Target


def check_machine(machine: Source | Target) -> None:
    """Check the invariants of a machine.

    Raises:
        AssertionError: one does not hold; with the story of the attempt that is wrong.
    """
    for record in machine.live.values():
        problem = _wrong_outgoing(record) if isinstance(record, Outgoing) else None
        if isinstance(record, Incoming):
            problem = _wrong_incoming(record)
        if problem is None and machine.rings_at("deadline", record.name) is None:
            problem = f"no deadline in state {record.state.value}"
        if problem is not None:
            story = [f"{at:.3f} {line}" for at, line in record.story]
            raise AssertionError("\n".join([f"{record.name}: {problem}", *story]))
    counters = machine.counters
    done = counters.completed + counters.failed + counters.cancelled
    assert counters.started == done + len(machine.live), f"{counters}, {len(machine.live)} live"
    if isinstance(machine, Source):
        for session in (*machine.known.values(), *machine._over.values()):
            if session.state is not SessionState.CLOSING:
                assert machine.rings_at("deadline", session.id) is not None, f"{session}"
        for of_d in (*machine.known.values(), *machine._over.values()):
            held = sum(record.pinned for record in of_d.attempts.values())
            assert held == of_d.pinned, f"{held} blocks are pinned for {of_d}"
        return
    for line in machine.lines.values():
        assert machine.rings_at("resend", line.address) is not None, f"nothing would wake {line}"
    for of_p in machine.known.values():
        assert machine.lines[of_p.line.address] is of_p.line, f"{of_p} has a line of its own"
        assert of_p.over != (of_p.line.session is of_p), f"{of_p} is over and in use, or neither"
        assert not of_p.over or of_p.attempts, f"{of_p} should be forgotten"


def _wrong_outgoing(record: Outgoing) -> str | None:
    """What is wrong with an attempt on P, if anything."""
    pushing = record.state in (SourceState.ENGAGED, SourceState.COMPLETED)
    if record.engaged != pushing and record.state is not SourceState.STOPPING:
        return "engaged in a wrong state"
    if record.in_flight and not record.engaged:
        return "writes without a lease"
    if [a for a, _ in record.writes] != [record.start, *(b for _, b in record.writes)][:-1]:
        return f"writes do not join: {record.writes}"
    if record.state is SourceState.STOPPING and not record.in_flight:
        return "nothing is in flight and it has not ended"
    if record.engaged and not record.posted <= record.ready <= record.num_tokens:
        return f"posted {record.posted}, ready {record.ready} of {record.num_tokens}"
    return None


def _wrong_incoming(record: Incoming) -> str | None:
    """What is wrong with an attempt on D, if anything."""
    if (record.session is None) != (record.state is TargetState.WAITING):
        return "a session in a wrong state"
    if record.session is not None and record.session.attempts.get(record.name) is not record:
        return "its session does not know it"
    over = record.session is not None and record.session.over
    if over and record.state is not TargetState.DRAINING:
        return "alive in a session that is over"
    if record.complete is None and record.state is TargetState.COMPLETING:
        return "completing without Complete"
    if any(record.arrivals[write].missing for write in record.verified):
        return "verified before it has landed"
    return None
