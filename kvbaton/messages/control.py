"""Messages of the hand-over protocol, sent between engine cores over the control channel.

`docs/protocol.md` has the rules. Messages are MessagePack. Adding a field at the end with
a default keeps neighbouring releases compatible; any other change must raise `PROTOCOL_VERSION`.
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
"""Maximum number of blocks that a `Reserve` may name by key."""

MAX_SESSIONS_ASKED = 256


class RankCard(Struct, frozen=True):
    """Description of one rank for a peer.

    Attributes:
        rank: Tensor-parallel rank.
        card: Card of the transport (`Transport.card`).
        layouts: Encoded `list[KVLayout]`, one per group, in order of group.
    """

    rank: Count
    card: Annotated[bytes, Meta(max_length=1 << 20)]
    layouts: Annotated[bytes, Meta(max_length=1 << 20)]


class DigestRun(Struct, frozen=True):
    """Digests of P for one (source rank, target rank, group) of a write.

    Attributes:
        source_rank: Rank of P.
        target_rank: Rank of D.
        group: Number of the KV group.
        first_unit: Number of the first unit; a unit is lcm(block sizes) tokens.
        values: One 64-bit value per unit, as unsigned little-endian bytes, 8 each.
    """

    source_rank: Count
    target_rank: Count
    group: Count
    first_unit: Count
    values: Annotated[bytes, Meta(max_length=1 << 24)]


class Message(Struct, frozen=True, tag_field="type", kw_only=True):
    """Fields of every control message.

    Attributes:
        session: Id of the session.
        seq: Number of the message; see `docs/protocol.md`, "Numbers".
        receiver: In D's messages, the generation of P that the session is with. Another generation
            at the same address must not take the message as its own.
    """

    session: Id128
    seq: Count
    receiver: NodeId | None = None


class Hello(Message, frozen=True, tag="hello", kw_only=True):
    """D opens a session with P, or keeps it alive. Answered by `Welcome` or `Refused`.

    Attributes:
        sender: Name and generation of D.
        min_version: Oldest protocol version that D speaks.
        max_version: Newest protocol version that D speaks.
        identity: Digest of the identity record.
        identity_record: Model and settings that both sides must share, for error messages.
        transport: Name of the transport.
        ranks: Descriptions of D's ranks.
        over: Earlier sessions of D that have blocks in quarantine; D asks for `SessionDrained`.
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
    """D names the blocks that P is to write; it never changes once sent.

    Attributes:
        prompt_key: Chained key over all prompt tokens, partial tail included.
        num_tokens: Length of the prompt, in tokens.
        spans: Per group, the target blocks wanted.
        remaining_ms: Milliseconds that D will wait in all.
        keys: Keys of the blocks from the first token wanted to `num_tokens`, 32 bytes each: P sends
            the blocks that it holds, at once. The last is `prompt_key`. Empty for a prompt to come.
    """

    prompt_key: Key
    num_tokens: Count
    spans: tuple[tuple[BlockSpan, ...], ...]
    remaining_ms: Count
    keys: Annotated[bytes, Meta(max_length=KEY_BYTES * MAX_KEYS)] = b""


class Accepted(TransferMessage, frozen=True, tag="accepted", kw_only=True):
    """P accepted a `Reserve`."""


class Refused(Message, frozen=True, tag="refused", kw_only=True):
    """P refuses a message and says why. Without `transfer_id` it refuses the session.

    Codes: ``unknown_session``, ``version``, ``identity``, ``transport``, ``layout``, ``prompt``,
    ``conflict``, ``consumed``, ``too_many``, ``expired``, ``malformed``.
    """

    code: Name
    message: Text
    retryable: bool = False
    transfer_id: Id128 | None = None
    attempt: Count = 0


class Progress(TransferMessage, frozen=True, tag="progress", kw_only=True):
    """P is alive and reports its progress; D's deadline starts anew.

    Attributes:
        state: State of the attempt on P, for people.
        tokens_pushed: Number of tokens posted so far.
    """

    state: Name
    tokens_pushed: Count


class Complete(TransferMessage, frozen=True, tag="complete", kw_only=True):
    """P is done: all writes are posted and the first tokens are known.

    Attributes:
        num_tokens: Number of prompt positions with valid KV; for block keys perhaps fewer than D
            named, if P no longer has the others.
        num_writes: Number of writes; they are numbered from 0.
        choices: First tokens of each choice; empty for block keys.
        cached_tokens: Number of prompt tokens that P did not have to compute.
    """

    num_tokens: Count
    num_writes: Count
    choices: tuple[ChoiceStart, ...]
    cached_tokens: Count = 0


class Ack(TransferMessage, frozen=True, tag="ack", kw_only=True):
    """D has verified all bytes (``ok``) or found a mismatch (``mismatch``); P may free its blocks.

    Attributes:
        verdict: ``ok`` or ``mismatch``.
        bad: For ``mismatch``, token ranges (start, end) that failed.
    """

    verdict: Name
    bad: tuple[tuple[Count, Count], ...] = ()


class NotNeeded(TransferMessage, frozen=True, tag="not_needed", kw_only=True):
    """D has the whole prompt cached, or its request ended before it sent `Reserve`; P may stop."""


class Failed(TransferMessage, frozen=True, tag="failed", kw_only=True):
    """P gave up and has stopped posting; posted writes may still land until `Drained`.

    Attributes:
        reason: Why, for people.
        engine: P did not compute the blocks, or no longer has them: the wire is not to blame.
    """

    reason: Text
    engine: bool = False


class Cancel(TransferMessage, frozen=True, tag="cancel", kw_only=True):
    """D cancels the attempt. Always answered by `Drained`, known or not; repeated until then."""


class Drained(TransferMessage, frozen=True, tag="drained", kw_only=True):
    """No write of this attempt can land any more."""


class SessionDrained(Message, frozen=True, tag="session_drained", kw_only=True):
    """No write of these sessions can land any more; the answer to `Hello.over`."""

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
    msgspec.ValidationError: It is not a control message; the text says where.
    DecodeError, UnicodeDecodeError, RecursionError: It is not MessagePack (`UNREADABLE`).
"""


class _Greeting(Struct, frozen=True, tag_field="type", tag="hello"):
    """The fields that a `Hello` of any version has."""

    session: Id128
    min_version: Count = 0
    max_version: Count = 0


_greeting = msgspec.msgpack.Decoder(_Greeting)


def refuse_unreadable(data: bytes, error: Exception) -> Refused | None:
    """Make the answer to a `Hello` that can't be decoded; None if it is not a `Hello`.

    A later release may have changed its fields, and its sender must learn why it gets no `Welcome`.

    Args:
        data: The message received.
        error: Exception of `decode_control`.
    """
    try:
        hello = _greeting.decode(data)
    except UNREADABLE:
        return None
    code, why = version_problem(hello) or ("malformed", clip_text(str(error)))
    return Refused(session=hello.session, seq=0, code=code, message=why)


def version_problem(hello: Hello | _Greeting) -> tuple[str, str] | None:
    """Code and text of the refusal of a `Hello` without a common version; None if there is one."""
    low, high = hello.min_version, hello.max_version
    if low <= PROTOCOL_VERSION and MIN_PROTOCOL_VERSION <= high:
        return None
    spoken = f"{MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
    return "version", f"source speaks {spoken}, target {low} to {high}"
