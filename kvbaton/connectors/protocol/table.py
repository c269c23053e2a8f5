"""The hand-over protocol as data: every state, every event, and the rule that applies.

`Source` and `Target` dispatch from these tables, and `docs/protocol.md` is generated from them
(`python -m kvbaton.connectors.protocol.pages`). A rule's name is the name of the machine's method,
with an underscore before it.
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


Row = tuple[str, ...]
"""One rule per state, in the order of the states."""

# fmt: off
SOURCE: dict[str, Row] = {
    #            unknown          announced            reserved            engaged            completed          stopping        ended
    "Reserve": ("reserve_first", "reserve_announced", "reserve_again",    "reserve_again",   "reserve_again",   "reserve_over", "reserve_over"),
    "Cancel": ("cancel_unknown", "cancel_idle",       "cancel_idle",      "cancel_engaged",  "cancel_engaged",  "cancel_late",  "cancel_over"),
    "NotNeeded": ("spare_unknown", "spare",           "spare",            "spare",           "spare",           "drop",         "drop"),
    "Ack": ("drop",              "ack_early",         "ack_early",        "ack_early",       "ack",             "ack_late",     "drop"),
    "Announce": ("announce_first", "announce_twice",  "announce_reserved", "announce_twice", "announce_twice",  "announce_over", "announce_over"),
    "BlocksReady": ("ignore",    "ignore",            "ignore",           "blocks_ready",    "ignore",          "ignore",       "ignore"),
    "FirstTokens": ("ignore",    "finish_idle",       "ignore",           "first_tokens",    "ignore",          "ignore",       "ignore"),
    "SourceFailed": ("ignore",   "fail_idle",         "ignore",           "fail_engaged",    "ignore",          "ignore",       "ignore"),
    "WriteEnded": ("write_late", "ignore",            "ignore",           "write_ended",     "write_ended",     "write_stopping", "write_late"),
    "unclaimed": ("never",       "expire_idle",       "expire_reserved",  "never",           "never",           "never",        "never"),
    "lease": ("never",           "never",             "never",            "expire_engaged",  "expire_engaged",  "never",        "never"),
    "total": ("never",           "never",             "expire_reserved",  "expire_engaged",  "expire_engaged",  "never",        "never"),
    "progress": ("never",        "never",             "tell_progress",    "tell_progress",   "tell_progress",   "never",        "never"),
    "complete": ("never",        "never",             "never",            "never",           "repeat_complete", "never",        "never"),
    "stuck": ("never",           "never",             "never",            "never",           "never",           "force_close",  "never"),
    "tombstone": ("never",       "never",             "never",            "never",           "never",           "never",        "forget"),
}

TARGET: dict[str, Row] = {
    #            unknown        waiting          reserved            engaged           completing         draining          ended
    "Accepted": ("drop",       "drop",          "accepted",         "note",           "note",            "drop",           "drop"),
    "Refused": ("drop",        "drop",          "refused",          "refused",        "refused",         "drop",           "drop"),
    "Progress": ("disown",     "drop",          "progress",         "progress",       "progress",        "drop",           "drop"),
    "Complete": ("disown",     "drop",          "complete",         "complete",       "complete_again",  "cancel_again",   "answer_complete"),
    "Failed": ("drop",         "drop",          "peer_failed",      "peer_failed",    "peer_failed",     "drop",           "drop"),
    "Drained": ("drop",        "drop",          "peer_failed",      "peer_failed",    "peer_failed",     "drained",        "drop"),
    "Start": ("start",         "start_twice",   "start_twice",      "start_twice",    "start_twice",     "start_twice",    "start_consumed"),
    "Landed": ("ignore",       "ignore",        "landed",           "landed",         "landed",          "ignore",         "ignore"),
    "Verified": ("ignore",     "ignore",        "verified",         "verified",       "verified",        "ignore",         "ignore"),
    "CancelTarget": ("ignore", "cancel_unsent", "cancel_sent",      "cancel_sent",    "cancel_sent",     "ignore",         "ignore"),
    "resend": ("never",        "never",         "repeat_reserve",   "never",          "never",           "repeat_cancel",  "never"),
    "keepalive": ("never",     "never",         "never",            "keep_alive",     "keep_alive",      "never",          "never"),
    "progress_deadline": ("never", "never",     "give_up",          "give_up",        "give_up",         "never",          "never"),
    "total": ("never",         "give_up_unsent", "give_up",         "give_up",        "give_up",         "never",          "never"),
    "silence": ("never",       "never",         "never",            "never",          "never",           "suspect",        "never"),
    "tombstone": ("never",     "never",         "never",            "never",          "never",           "never",          "forget"),
}

SOURCE_RULES = {
    "reserve_first": "Check it, bind the attempt to the session, answer `Accepted`; wait for the request.",
    "reserve_announced": "Check it and compare the prompt; bind, answer `Accepted`, `Engage` the engine from the first token wanted.",
    "reserve_again": "Equal, or longer by later blocks: answer `Accepted` and renew the lease. Other content or another session: `Refused(conflict)`.",
    "reserve_over": "`Refused`, code after how it ended: `expired`, else `consumed`.",
    "cancel_unknown": "Answer `Drained`; remember it, so that a late request is refused.",
    "cancel_idle": "End it; the engine stops the request; answer `Drained`. Nothing was written.",
    "cancel_engaged": "Stop posting. `Drained` as soon as every write is terminal, then `Release`.",
    "cancel_late": "Owe `Drained` until every write is terminal.",
    "cancel_over": "Answer `Drained`.",
    "spare_unknown": "Remember it, so that a late request is refused.",
    "spare": "Stop posting; the engine stops the request; `Release` when every write is terminal.",
    "ack": "`ok`: `Release` when every write is terminal, not before. `mismatch`: evict the ranges, stop.",
    "ack_early": "`mismatch`: evict the ranges, stop. Else `Refused(conflict)`: nothing was completed.",
    "ack_late": "`mismatch`: evict the ranges, once. Else nothing.",
    "announce_first": "Remember it; it pins nothing.",
    "announce_reserved": "Compare the prompt: equal, `Engage`; else `Refused(prompt)` and the request goes on alone.",
    "announce_twice": "`RefuseAnnounce(conflict)`.",
    "announce_over": "`RefuseAnnounce`, code after how it ended.",
    "blocks_ready": "`Post` up to the last common block border, or the end of the prompt, in writes whose digests fit into a notice.",
    "first_tokens": "Keep them; `Complete` once all is posted.",
    "finish_idle": "The prompt is computed: from now on `unclaimed` runs.",
    "fail_idle": "End it.",
    "fail_engaged": "Stop posting, send `Failed`; `Release` when every write is terminal.",
    "write_ended": "Strike it off. If it failed: stop posting, send `Failed`; a range is never posted twice.",
    "write_stopping": "Strike it off; when it was the last: `Drained` if owed, `Release`.",
    "write_late": "Strike it off the writes that outlived their session's end; it may let a `Welcome` go out.",
    "expire_idle": "Forget it; nothing was pinned.",
    "expire_reserved": "End it, send `Failed`.",
    "expire_engaged": "Stop posting, send `Failed`; `Release` when every write is terminal.",
    "tell_progress": "Send `Progress`, until all is posted and every write has ended.",
    "repeat_complete": "Send `Complete` again.",
    "force_close": "A write does not end: close the session's peer. `Closed` frees P's blocks, but is no `Drained`.",
    "forget": "Forget the attempt.",
    "drop": "Count it; the sender has its answer already.",
    "ignore": "The engine or transport has not heard yet that it is over.",
    "never": "Can't happen.",
}

TARGET_RULES = {
    "start": "Wait for the session (open one if there is none), then send `Reserve`. Over the cap, or a peer that was put out: fail at once.",
    "start_twice": "A bug of ours: `LocalProtocolError`.",
    "start_consumed": "Fail at once, nothing is sent.",
    "accepted": "P has it. From now on `Reserve` is repeated slowly, as a sign of life.",
    "note": "P lives; no deadline moves.",
    "refused": "Fail; `Cancel`.",
    "progress": "The progress deadline starts anew.",
    "complete": "Check it; deliver if everything is here.",
    "complete_again": "Must equal the first one; no deadline moves.",
    "cancel_again": "Send `Cancel` again at once.",
    "answer_complete": "Delivered: `Ack(ok)` again. Else `Cancel`.",
    "disown": "Answer `Cancel`: nobody here waits for it.",
    "peer_failed": "Fail; `Cancel`, since what was posted may still land.",
    "drained": "`Unquarantine`.",
    "landed": "Check it and note the rank pair; `Verify` the write if no pair is missing.",
    "verified": "Good: deliver if everything is here. Bad: `Ack(mismatch)`, fail, `Cancel`.",
    "cancel_unsent": "End it; `Unquarantine` at once, P never heard of the blocks.",
    "cancel_sent": "`Cancel`, until `Drained` or a fence.",
    "repeat_reserve": "Send `Reserve` again.",
    "repeat_cancel": "Send `Cancel` again (after `Ack(mismatch)` if that was the reason); if P does not know the session any more, open one: its `Welcome` settles it.",
    "keep_alive": "Send `Reserve` again: P renews its lease.",
    "give_up": "Fail; `Cancel`.",
    "give_up_unsent": "Fail; `Unquarantine` at once.",
    "suspect": "The session is over; `Fence` its peer until that holds or P settles it.",
    "forget": "Forget the attempt.",
    "drop": "Count it.",
    "ignore": "Engine or transport has not heard yet that it is over.",
    "never": "Can't happen.",
}

SOURCE_ALARMS: dict[SourceState, tuple[str, ...]] = {
    SourceState.ANNOUNCED: ("unclaimed",),
    SourceState.RESERVED: ("unclaimed", "total", "progress"),
    SourceState.ENGAGED: ("lease", "total", "progress"),
    SourceState.COMPLETED: ("lease", "total", "progress", "complete"),
    SourceState.STOPPING: ("stuck",),
    SourceState.ENDED: ("tombstone",),
}
TARGET_ALARMS: dict[TargetState, tuple[str, ...]] = {
    TargetState.WAITING: ("total",),
    TargetState.RESERVED: ("resend", "progress_deadline", "total"),
    TargetState.ENGAGED: ("keepalive", "progress_deadline", "total"),
    TargetState.COMPLETING: ("keepalive", "progress_deadline", "total"),
    TargetState.DRAINING: ("resend", "silence"),
    TargetState.ENDED: ("tombstone",),
}
"""Alarms that may run in a state, the first of which must."""

SESSION_RULES: tuple[tuple[str, str, str], ...] = (
    ("P", "`Hello`, new session", "Version, identity, transport, layouts must fit, else `Refused` naming both values. Sessions of the same node end: no more posts. When every write of theirs is terminal, `ClosePeer`; when that is done, `OpenPeer` and `Welcome`. Until then each `Hello` is answered `Refused(draining)`."),
    ("P", "`Hello` with `clean`", "D awaits no promise about earlier writes: close at once, do not wait for them."),
    ("P", "`Hello`, session is up", "`Welcome` again."),
    ("P", "`Hello`, session is over", "`Refused(unknown_session)`."),
    ("P", "anything else of a session that is not up", "`Refused(unknown_session)`."),
    ("P", "`PeerGone`", "Sessions of that generation end: stop posting, `ClosePeer`; `Closed` releases P's blocks."),
    ("D", "`Start` or `Unneeded` without a session", "Send `Hello` every `resend` until `Welcome`, `Refused` or `session` has passed."),
    ("D", "`Welcome`", "Quarantines of that generation end; another generation at that address is fenced. `AdmitPeer`, then every waiting `Reserve`."),
    ("D", "`Refused(unknown_session)`", "The session is over: its attempts fail. If blocks are in quarantine, open a new one."),
    ("D", "`Refused(draining)`", "Ask again; if it lasts, fence what is in quarantine, so that the next `Hello` is `clean`."),
    ("D", "`Refused`, another code", "Everything that waits for the session fails."),
    ("D", "`PeerGone`", "Sessions of that generation are over: their attempts fail, their blocks wait for `Fenced`, `Drained` or `Welcome`."),
    ("D", "`Fenced`", "Quarantines of that generation end."),
    ("both", "another session, or a number not above the last", "Dropped and counted, but for `Refused` of a session, which is true whenever it comes."),
)

TIMERS: dict[str, Timer] = {
    "session": Timer("D", "attempts that wait for a session fail; blocks are free at once"),
    "resend": Timer("both", "`Hello`, `Reserve`, `Cancel` (D) and `Complete` (P) are sent again"),
    "progress_period": Timer("P", "`Progress` is sent"),
    "progress_deadline": Timer("D", "the attempt fails: nothing was heard, landed or verified"),
    "total": Timer("both", "the attempt fails (D) or expires (P, from `remaining_ms`); an announced prompt that is never computed is forgotten (P)"),
    "lease": Timer("both", "the attempt expires (P); D repeats `Reserve` every quarter of it; a write that does not end for as long makes P close the peer"),
    "unclaimed": Timer("P", "a request without `Reserve` is forgotten"),
    "fence_retry": Timer("D", "`Fence` is tried again"),
    "quarantine_limit": Timer("D", "the node counts as unhealthy"),
    "tombstone": Timer("both", "an ended attempt or session is forgotten"),
    "silence": Timer("D", "a peer that leaves blocks in quarantine is fenced; its session is over"),
    "put_out": Timer("D", "a peer with several mismatches is asked again"),
    "unannounced": Timer("P", "a `Reserve` without request is given up (the alarm `unclaimed`)"),
}
# fmt: on
