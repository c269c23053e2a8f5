"""The control channel's messages, engine core to engine core: the hand-over protocol.

Rules in `docs/protocol.md`. They travel as MessagePack. A field added at the end with a default
keeps neighbouring releases able to talk; anything else raises `PROTOCOL_VERSION`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvbaton.messages import UNREADABLE
from kvbaton.types import (
    KEY_BYTES,
    BlockSpan,
    ChoiceStart,
    Count,
    Id128,
    Key,
    Name,
    NodeId,
    Text,
    clip_text,
)

PROTOCOL_VERSION = MIN_PROTOCOL_VERSION = 4

MAX_KEYS = 1 << 16
"""Blocks that one `Reserve` may name by key."""

MAX_SESSIONS_ASKED = 256


class RankCard(Struct, frozen=True):
    """What one rank shows a peer.

    Attributes:
        rank: tensor-parallel rank.
        card: the transport's card (`Transport.card`).
        layouts: encoded `list[KVLayout]`, one per group, in order of group.
    """

    rank: Count
    card: Annotated[bytes, Meta(max_length=1 << 20)]
    layouts: Annotated[bytes, Meta(max_length=1 << 20)]


class DigestRun(Struct, frozen=True):
    """Digests that P claims for one (source rank, target rank, group) of a write.

    Attributes:
        first_unit: number of the first unit; a unit is lcm(block sizes) tokens.
        values: one 64-bit value per unit, as unsigned little-endian bytes, 8 each.
    """

    source_rank: Count
    target_rank: Count
    group: Count
    first_unit: Count
    values: Annotated[bytes, Meta(max_length=1 << 24)]


class Message(Struct, frozen=True, tag_field="type", kw_only=True):
    """What every control message carries: its session and its number there.

    Attributes:
        receiver: of D's, the generation that the session is up with. Another one that lives at the
            same address now must not take it for its own.
    """

    session: Id128
    seq: Count
    receiver: NodeId | None = None


class Hello(Message, frozen=True, tag="hello", kw_only=True):
    """D opens a session with P, or keeps it alive. Answered by `Welcome` or `Refused`.

    Attributes:
        min_version: oldest protocol version that D speaks.
        max_version: newest.
        over: D's earlier sessions that have blocks in quarantine: can a write still land there?
    """

    sender: NodeId
    min_version: Count
    max_version: Count
    identity: Key
    identity_record: dict[Name, Text]
    transport: Name
    ranks: tuple[RankCard, ...]
    over: Annotated[tuple[Id128, ...], Meta(max_length=MAX_SESSIONS_ASKED)] = ()


class Welcome(Message, frozen=True, tag="welcome", kw_only=True):
    """P accepts a session. It promises nothing about earlier ones."""

    sender: NodeId
    version: Count
    ranks: tuple[RankCard, ...]


class TransferMessage(Message, frozen=True, kw_only=True):
    """A control message about one attempt of one transfer."""

    transfer_id: Id128
    attempt: Count


class Reserve(TransferMessage, frozen=True, tag="reserve", kw_only=True):
    """D names the blocks that P shall write; frozen once sent.

    Attributes:
        prompt_key: chained key over all prompt tokens, partial tail included.
        num_tokens: prompt length.
        spans: per group, the target blocks wanted.
        remaining_ms: how long D will wait in all.
        keys: of the blocks from the first token wanted to `num_tokens`, 32 bytes each: P sends
            those that it holds, at once. The last is `prompt_key`. Empty for a prompt to come.
    """

    prompt_key: Key
    num_tokens: Count
    spans: tuple[tuple[BlockSpan, ...], ...]
    remaining_ms: Count
    keys: Annotated[bytes, Meta(max_length=KEY_BYTES * MAX_KEYS)] = b""


class Accepted(TransferMessage, frozen=True, tag="accepted", kw_only=True):
    """P took a `Reserve`."""


class Refused(Message, frozen=True, tag="refused", kw_only=True):
    """A message can't be honoured; names why. Without `transfer_id` it refuses the session.

    Codes: ``unknown_session``, ``version``, ``identity``, ``transport``, ``layout``, ``prompt``,
    ``conflict``, ``consumed``, ``too_many``, ``expired``, ``malformed``.
    """

    code: Name
    message: Text
    retryable: bool = False
    transfer_id: Id128 | None = None
    attempt: Count = 0


class Progress(TransferMessage, frozen=True, tag="progress", kw_only=True):
    """P is alive and this is how far it is; D's deadline starts anew.

    Attributes:
        state: of the attempt on P, for people.
        tokens_pushed: posted so far.
    """

    state: Name
    tokens_pushed: Count


class Complete(TransferMessage, frozen=True, tag="complete", kw_only=True):
    """P is done: all writes are posted and the first tokens are known.

    Attributes:
        num_tokens: prompt positions with valid KV; of block keys perhaps fewer than were named, as
            P no longer has the others.
        num_writes: writes are numbered 0 to num_writes - 1.
        choices: token 0 of each choice; none of block keys.
        cached_tokens: prompt tokens that P did not have to compute.
    """

    num_tokens: Count
    num_writes: Count
    choices: tuple[ChoiceStart, ...]
    cached_tokens: Count = 0


class Ack(TransferMessage, frozen=True, tag="ack", kw_only=True):
    """D has verified (``ok``), or found bytes that do not match (``mismatch``); P may free.

    Attributes:
        bad: for ``mismatch``, token ranges (start, end) that failed.
    """

    verdict: Name
    bad: tuple[tuple[Count, Count], ...] = ()


class NotNeeded(TransferMessage, frozen=True, tag="not_needed", kw_only=True):
    """D has the whole prompt, or its request ended before it asked for it; P may stop."""


class Failed(TransferMessage, frozen=True, tag="failed", kw_only=True):
    """P gave up and has stopped posting; what was posted may still land until `Drained`.

    Attributes:
        reason: for people.
        engine: P has not computed it, or no longer has it: the way to D is not to blame.
    """

    reason: Text
    engine: bool = False


class Cancel(TransferMessage, frozen=True, tag="cancel", kw_only=True):
    """D no longer wants it. Always answered `Drained`, known or not; repeated until then."""


class Drained(TransferMessage, frozen=True, tag="drained", kw_only=True):
    """No write of this attempt can land any more."""


class SessionDrained(Message, frozen=True, tag="session_drained", kw_only=True):
    """No write of these earlier sessions can land any more; the answer to `Hello.over`."""

    over: Annotated[tuple[Id128, ...], Meta(max_length=MAX_SESSIONS_ASKED)]


Control = (
    Hello | Welcome | SessionDrained | Reserve | Accepted | Refused | Progress | Complete
    | Ack | NotNeeded | Failed | Cancel | Drained
)  # fmt: skip

encode_control: Callable[[Control], bytes] = msgspec.msgpack.Encoder().encode
"""Encode a control message."""

decode_control: Callable[[bytes], Control] = msgspec.msgpack.Decoder(Control).decode
"""Decode a control message.

Raises:
    msgspec.ValidationError: it is not one; the text says where.
    DecodeError, UnicodeDecodeError, RecursionError: it is no MessagePack at all (`UNREADABLE`).
"""


class _Greeting(Struct, frozen=True, tag_field="type", tag="hello"):
    """What the `Hello` of each version has."""

    session: Id128
    min_version: Count = 0
    max_version: Count = 0


_greeting = msgspec.msgpack.Decoder(_Greeting)


def refuse_unreadable(data: bytes, error: Exception) -> Refused | None:
    """What to answer to a `Hello` that can't be decoded; None if it is not even that.

    A later release may have given it another shape, and its sender must learn why it gets no
    `Welcome`.

    Args:
        data: what has come.
        error: what `decode_control` raised.
    """
    try:
        hello = _greeting.decode(data)
    except UNREADABLE:
        return None
    code, why = version_problem(hello) or ("malformed", clip_text(str(error)))
    return Refused(session=hello.session, seq=0, code=code, message=why)


def version_problem(hello: Hello | _Greeting) -> tuple[str, str] | None:
    """Code and text to refuse a `Hello` with, if its sender speaks no version that we do."""
    low, high = hello.min_version, hello.max_version
    if low <= PROTOCOL_VERSION and MIN_PROTOCOL_VERSION <= high:
        return None
    spoken = f"{MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
    return "version", f"source speaks {spoken}, target {low} to {high}"
