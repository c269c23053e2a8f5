"""The hand-over protocol as data: states, the alarms that run in them, sessions and timers.

What happens when is in `Source.table` and `Target.table`. `docs/protocol.md` is generated from all
of them (`python -m kvbaton.connectors.protocol.pages`).
"""

# ruff: noqa: E501

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class SourceState(Enum):
    """State of an attempt on P."""

    UNKNOWN = "unknown"
    ANNOUNCED = "announced"
    """The request is here, nobody has reserved; nothing is pinned."""
    RESERVED = "reserved"
    """D has reserved, the request has not come."""
    ENGAGED = "engaged"
    """Both are here; P pushes what the engine reports."""
    COMPLETED = "completed"
    """All is posted and the first tokens are known; P repeats `Complete`."""
    STOPPING = "stopping"
    """Over, but a write may still read P's blocks or land at D."""
    ENDED = "ended"
    """Over; remembered to answer late messages."""


class TargetState(Enum):
    """State of an attempt on D."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    """There is no session yet; P was told nothing."""
    RESERVED = "reserved"
    """`Reserve` is sent and unanswered."""
    ENGAGED = "engaged"
    """P has answered."""
    COMPLETING = "completing"
    """`Complete` is here; notices are missing, or not verified."""
    DRAINING = "draining"
    """Over for the engine; the blocks are in quarantine."""
    ENDED = "ended"
    """Over; remembered to answer late messages."""


class Timer(NamedTuple):
    """A timer of the protocol: who owns it and what it settles."""

    owner: str
    settles: str


# fmt: off
SOURCE_ALARMS: dict[SourceState, tuple[str, ...]] = {
    SourceState.ANNOUNCED: ("unclaimed",),
    SourceState.RESERVED: ("unclaimed", "total", "progress"),
    SourceState.ENGAGED: ("lease", "total", "progress"),
    SourceState.COMPLETED: ("lease", "total", "progress", "complete"),
    SourceState.STOPPING: ("stuck",),
}
TARGET_ALARMS: dict[TargetState, tuple[str, ...]] = {
    TargetState.WAITING: ("total", "progress_deadline"),
    TargetState.RESERVED: ("resend", "progress_deadline", "total"),
    TargetState.ENGAGED: ("keepalive", "progress_deadline", "total"),
    TargetState.COMPLETING: ("keepalive", "progress_deadline", "total"),
    TargetState.DRAINING: ("silence", "resend"),
}
"""Alarms that may run in a state, the first of which must."""

SESSION_RULES: tuple[tuple[str, str, str], ...] = (
    ("P", "`Hello`, new session", "Version, identity, transport, layouts must fit, else `Refused` naming both values. Other sessions of that generation end. `OpenPeer` and `Welcome` at once; it promises nothing about earlier sessions."),
    ("P", "`Hello`, session is up", "`Welcome` again: a sign of life for both."),
    ("P", "`Hello` with `over`", "`SessionDrained` of those of the named sessions that have ended here and of which every write is terminal. Of the others it follows when the last write ends, or when D asks again. Of a session that is not remembered nothing is said."),
    ("P", "`Hello`, session is over or was overtaken", "`Refused(unknown_session)`."),
    ("P", "anything else of a session that is not up", "`Refused(unknown_session)`."),
    ("P", "a session ends: superseded, `PeerGone`, nothing heard for two `lease`, a write that does not end", "`Refused(unknown_session)` tells D. Post nothing more; attempts end as lost. `ClosePeer` when every write is terminal, at once if the peer is gone, after `lease` in any case; `Closed` releases P's blocks, but drains nothing."),
    ("D", "`Start`, `Unneeded` or `Meet` without a session", "Send `Hello` every `resend` (after `silence` every `progress_deadline`) until `Welcome` or `Refused`, as long as the address is needed."),
    ("D", "`Welcome`", "The generation lives: it is not fenced any more. `AdmitPeer`, then every waiting `Reserve`. Sessions with another generation at that address end; it is fenced."),
    ("D", "a session is up", "`Hello` is repeated four times in `silence` or `lease`, every `resend` while an earlier session with that generation has blocks in quarantine. Nothing heard of the generation for `silence`: its sessions end."),
    ("D", "a session ends", "Stop using it: its attempts fail, their blocks go into quarantine. Open the next at once if it is needed."),
    ("D", "`SessionDrained`", "Quarantines of the named sessions end, if they were with the generation that says so."),
    ("D", "`Refused(unknown_session)`", "The session ends."),
    ("D", "`Refused`, another code", "Everything that waits for the session fails; a member is asked again after `progress_deadline`."),
    ("D", "`PeerGone`", "Sessions of that generation end. `Fence` every `fence_retry`, until that holds, the generation is heard of, or nothing of it is in quarantine."),
    ("D", "`Fenced`", "Quarantines of that generation end."),
    ("D", "an address that is no member's, with nothing asked for `lease` and nothing in quarantine; a session that was the last with its generation", "`HangUp`; `ForgetPeer`."),
    ("both", "another session, or a number not above the last", "Dropped and counted, but for `Refused` of a session, which is true whenever it comes."),
)

TIMERS: dict[str, Timer] = {
    "resend": Timer("both", "`Hello`, `Reserve`, `Cancel` (D) and `Complete` (P) are sent again"),
    "progress_period": Timer("P", "`Progress` is sent"),
    "progress_deadline": Timer("D", "the attempt fails: there is no session, or nothing was heard, landed or verified"),
    "total": Timer("both", "the attempt fails (D) or expires (P, from `remaining_ms`); an announced prompt that is never computed is forgotten (P)"),
    "lease": Timer("both", "the attempt expires, after two the session ends (P); D repeats `Reserve` every quarter of it; a write that does not end for as long makes P close the peer; an unused address is forgotten (D)"),
    "unclaimed": Timer("P", "a computed prompt without `Reserve` is forgotten"),
    "fence_retry": Timer("D", "`Fence` is tried again"),
    "quarantine_limit": Timer("D", "the node counts as unhealthy if a quarter of the pool is in quarantine for as long"),
    "tombstone": Timer("both", "an ended attempt is forgotten, or a session whose D has none that is up"),
    "silence": Timer("D", "a generation of which nothing was heard: its sessions end, it is fenced if it has blocks in quarantine"),
    "put_out": Timer("D", "a peer with several mismatches is asked again"),
    "unannounced": Timer("P", "a `Reserve` without request is given up (the alarm `unclaimed`)"),
}
# fmt: on
