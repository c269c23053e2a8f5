"""Every message that crosses a socket between our processes: typed, versioned, bounded.

Three conversations:

- *control*: engine core to engine core, over the control channel (`Control`): the hand-over
  protocol. Rules in `docs/protocol.md`.
- *core*: a node's HTTP process to its engine core and back (`ToCore`, `FromCore`).
- *membership*: node to router, JSON over HTTP (`NodeInfo`, `Members`).

All are msgspec structs; control and core travel as MessagePack arrays. Nothing is pickled. A field
added at the end with a default keeps neighbouring releases able to talk; anything else raises
`PROTOCOL_VERSION`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20
"""A longer message is dropped unread and counted."""
ENCODER_BLOCK_ROWS = 32
"""Rows of one block of encoder output; an item's last block is filled up with zeros."""

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Id128 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]


# --- control: the hand-over protocol ---


class NodeId(Struct, frozen=True):
    """A peer: a node and one life of it. A restarted node has another generation."""

    node: Name
    generation: Id128


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


class BlockSpan(Struct, frozen=True):
    """Consecutive logical blocks of one group and the physical blocks behind them."""

    first: Count
    blocks: tuple[Count, ...]


class TopLogprob(Struct, frozen=True, array_like=True):
    """One candidate of a position."""

    token: TokenId
    logprob: float
    rank: int


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the chosen token's own, and the best candidates."""

    logprob: float
    rank: int
    top: tuple[TopLogprob, ...] = ()


class ChoiceStart(Struct, frozen=True):
    """What P sampled for one choice: token 0 and what belongs to it."""

    token: TokenId
    logprobs: TokenLogprobs | None = None
    finish_reason: Name | None = None
    stop_reason: int | str | None = None


class DigestRun(Struct, frozen=True):
    """Digests that P claims for one (source rank, target rank, group) of a `Pushed`.

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
    """What every control message carries: its session and its number there."""

    session: Id128
    seq: Count


class Hello(Message, frozen=True, tag="hello", kw_only=True):
    """D opens a session with P. Answered by `Welcome` or `Refused`.

    Attributes:
        clean: no write of an earlier session can land in D any more: all were drained or fenced.
    """

    sender: NodeId
    min_version: Count
    max_version: Count
    identity: Key
    identity_record: dict[Name, Text]
    transport: Name
    ranks: tuple[RankCard, ...]
    clean: bool = False


class Welcome(Message, frozen=True, tag="welcome", kw_only=True):
    """P accepts a session; no write of an older session of this pair can land any more."""

    sender: NodeId
    version: Count
    ranks: tuple[RankCard, ...]


class TransferMessage(Message, frozen=True, kw_only=True):
    """A control message about one attempt of one transfer."""

    transfer_id: Id128
    attempt: Count


class Reserve(TransferMessage, frozen=True, tag="reserve", kw_only=True):
    """D names the blocks that P shall write; frozen once sent; may be extended by later ranges.

    Attributes:
        prompt_key: chained key over all prompt tokens, partial tail included.
        num_tokens: prompt length.
        spans: per group, the target blocks wanted.
        remaining_ms: how long D will wait in all.
        more: D will extend this reservation by another `Reserve`.
    """

    prompt_key: Key
    num_tokens: Count
    spans: tuple[tuple[BlockSpan, ...], ...]
    remaining_ms: Count
    more: bool = False


class Accepted(TransferMessage, frozen=True, tag="accepted", kw_only=True):
    """P took a `Reserve`."""


class Refused(Message, frozen=True, tag="refused", kw_only=True):
    """A message can't be honoured; names why. Without `transfer_id` it refuses the session.

    Codes: ``unknown_session``, ``version``, ``identity``, ``transport``, ``layout``, ``prompt``,
    ``conflict``, ``consumed``, ``draining``, ``too_many``, ``expired``, ``malformed``.
    """

    code: Name
    message: Text
    retryable: bool = False
    transfer_id: Id128 | None = None
    attempt: Count = 0


class Pushed(TransferMessage, frozen=True, tag="pushed", kw_only=True):
    """P posted write number `write` over tokens [start, end) with these digests."""

    write: Count
    start: Count
    end: Count
    digests: tuple[DigestRun, ...]


class Progress(TransferMessage, frozen=True, tag="progress", kw_only=True):
    """P is alive and this is how far it is; D's deadline starts anew."""

    state: Name
    tokens_pushed: Count


class Complete(TransferMessage, frozen=True, tag="complete", kw_only=True):
    """P is done: all writes are posted and the first tokens are known.

    Attributes:
        num_tokens: prompt positions with valid KV.
        num_writes: writes are numbered 0 to num_writes - 1.
        choices: token 0 of each choice.
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
    """D has the whole prompt; P may stop."""


class Failed(TransferMessage, frozen=True, tag="failed", kw_only=True):
    """P gave up and has stopped posting; what was posted may still land until `Drained`."""

    reason: Text


class Cancel(TransferMessage, frozen=True, tag="cancel", kw_only=True):
    """D no longer wants it. Always answered `Drained`, known or not; repeated until then."""


class Drained(TransferMessage, frozen=True, tag="drained", kw_only=True):
    """No write of this attempt can land any more."""


Control = (
    Hello
    | Welcome
    | Reserve
    | Accepted
    | Refused
    | Pushed
    | Progress
    | Complete
    | Ack
    | NotNeeded
    | Failed
    | Cancel
    | Drained
)


# --- core: HTTP process <-> engine core ---


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens. Names and defaults as vLLM's; checked by `openai` at the door.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass, in (0, 1].
        top_k: candidates kept; 0 keeps all.
        min_p: least probability relative to the best.
        presence_penalty: subtracted once per token already generated.
        frequency_penalty: subtracted per occurrence among the generated tokens.
        repetition_penalty: divides or multiplies logits of tokens seen before; 1 is off.
        logit_bias: added to logits, by token id.
        seed: of the noise; the door mints one if the client gave none, so that it is never None
            in an engine.
        n: choices.
        max_tokens: most tokens to generate.
        min_tokens: tokens before any stop may take effect.
        stop_token_ids: end the text, beside the model's own end tokens.
        ignore_eos: the model's own end tokens do not end the text.
        logprobs: candidates reported per token; None for none at all.
        prompt_logprobs: the same for prompt tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class TransferSpec(Struct, frozen=True, kw_only=True):
    """A request's part in a hand-over.

    Attributes:
        role: ``source`` (this node prefills for another) or ``target`` (this node receives).
        transfer_id: as minted by the router, or by P.
        attempt: as minted by the router, or by D; None at P when no router minted one.
        peer: for a target, P's control address ``tcp://host:port``.
        peer_node: for a target, P's node id as the router knows it; None if not known.
    """

    role: str
    transfer_id: Id128
    attempt: Count = 0
    peer: Name | None = None
    peer_node: Name | None = None


class Item(Struct, frozen=True, kw_only=True):
    """A multimodal item of a prompt: tokens [start, start + length) stand for it.

    Its encoder output has one row per such token. Where it is handed over, it is an artifact like a
    prompt's KV: a transfer of its own, of one KV group, over as many positions as its rows fill
    whole blocks of the encoder cache.

    Attributes:
        start: position of its first placeholder in the prompt.
        length: placeholders, at least 1.
        digest: of its content and the processor's settings; equal ones have equal outputs.
        grid: patches in time, height and width, before they are merged.
        data: the image as the client gave it (PNG, JPEG, ...); empty where the receiver need not
            encode it.
        transfer: its hand-over from an encoder node, if there is one.
    """

    start: Count
    length: Annotated[int, Meta(ge=1, le=1 << 31)]
    digest: Key
    grid: tuple[Count, Count, Count]
    data: bytes = b""
    transfer: TransferSpec | None = None

    @property
    def padded_rows(self) -> int:
        """Rows of the whole blocks of the encoder cache that its output fills."""
        return -(-self.length // ENCODER_BLOCK_ROWS) * ENCODER_BLOCK_ROWS


class AddRequest(Struct, frozen=True, tag="add", kw_only=True):
    """Generate from tokens.

    Attributes:
        request_id: unique in the node.
        token_ids: the prompt.
        resume_ids: tokens already generated for this request elsewhere; the engine continues after
            them as if it had generated them itself.
        params: sampling.
        priority: lower runs first, as in vLLM; equal ones first come, first served.
        cache_salt: requests with different salts never share cache.
        deadline_s: seconds from receipt after which the request is ended.
        transfer: its part in a hand-over, if any.
        items: multimodal items, by start; they do not overlap.
    """

    request_id: Name
    token_ids: tuple[TokenId, ...]
    params: SamplingParams
    resume_ids: tuple[TokenId, ...] = ()
    priority: int = 0
    cache_salt: Text = ""
    deadline_s: float = 600.0
    transfer: TransferSpec | None = None
    items: tuple[Item, ...] = ()


class AbortRequest(Struct, frozen=True, tag="abort", kw_only=True):
    """Stop a request; unknown ids are ignored. Answered by an `Output` with ``abort``."""

    request_id: Name


class Command(Struct, frozen=True, tag="command", kw_only=True):
    """Ask the core something. Answered by a `Reply` with the same id.

    Attributes:
        name: ``state`` (the debugging dump), ``metrics``, ``reset_prefix_cache``, ``drain``,
            ``members``.
        argument: for ``members``, a list of control addresses that may be dialled.
    """

    command_id: Count
    name: Name
    argument: Any = None


class Shutdown(Struct, frozen=True, tag="shutdown", kw_only=True):
    """Drain hand-overs for at most `grace_s` seconds and exit."""

    grace_s: float = 5.0


ToCore = AddRequest | AbortRequest | Command | Shutdown


class Output(Struct, frozen=True, tag="output", kw_only=True):
    """New tokens of one choice of a request.

    Attributes:
        request_id: whose.
        choice: index of the choice.
        index: position among the generated tokens of the first of `token_ids`.
        token_ids: new tokens; may be empty on the last output.
        logprobs: one per new token, if asked for.
        prompt_logprobs: on the first output, if asked for: one per prompt token, the first None.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error`` on the last output of a choice.
        stop_reason: the token id that stopped it, if one did and it is no end-of-text token.
        error: what went wrong, for ``error``.
        cached_tokens: prompt tokens that this node took from its own cache.
        transferred_tokens: prompt tokens received from another node.
        kv_transfer_params: on the last output of a source, what to paste into the target's request.
    """

    request_id: Name
    choice: Count = 0
    index: Count = 0
    token_ids: tuple[TokenId, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: Name | None = None
    stop_reason: int | str | None = None
    error: Text | None = None
    cached_tokens: Count = 0
    transferred_tokens: Count = 0
    kv_transfer_params: dict[str, Any] | None = None


class Outputs(Struct, frozen=True, tag="outputs", kw_only=True):
    """What one step produced."""

    outputs: tuple[Output, ...]


class Rejected(Struct, frozen=True, tag="rejected", kw_only=True):
    """A request that the core can't take; the fields are those of `RequestError`."""

    request_id: Name
    message: Text
    param: Name | None = None
    status: int = 400
    code: Name | None = None


class Reply(Struct, frozen=True, tag="reply", kw_only=True):
    """Answer to a `Command`."""

    command_id: Count
    result: Any = None
    error: Text | None = None


class Ready(Struct, frozen=True, tag="ready", kw_only=True):
    """The core is up. Sent once.

    Attributes:
        node: this life of the node.
        control_address: where peers reach its control channel; None for a node without a transport.
        num_blocks: usable blocks of the pool.
        block_size: tokens per block.
        max_model_len: longest prompt plus output.
        eos_token_ids: the model's own end tokens.
        identity: digest of the identity record; nodes with different ones never pair.
        encoder_identity: the same of encoder outputs that the node makes or can receive; empty if
            it has nothing to do with any.
    """

    node: NodeId
    control_address: Name | None
    num_blocks: Count
    block_size: Count
    max_model_len: Count
    eos_token_ids: tuple[int, ...]
    vocab_size: Count = 0
    tp_size: Count = 1
    identity: bytes = b""
    encoder_identity: bytes = b""


class Metrics(Struct, frozen=True, tag="metrics", kw_only=True):
    """The core's counters and gauges, sent every few seconds and at each ``metrics`` command.

    Attributes:
        counters: monotonic totals, by Prometheus name with labels, ``name{label="x"}``.
        gauges: values now.
    """

    counters: dict[str, float]
    gauges: dict[str, float]


class Dead(Struct, frozen=True, tag="dead", kw_only=True):
    """The core is about to exit because of an error.

    Attributes:
        error: what happened.
        field: for a `ConfigError`, the setting that is wrong.
    """

    error: Text
    field: Name | None = None


FromCore = Outputs | Rejected | Reply | Ready | Metrics | Dead


# --- tokens in, tokens out: router or client -> node, JSON over HTTP ---


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """Body of ``POST /inference/v1/generate``; field names as vLLM's where it has them.

    Answered by a stream (SSE) of `Output` in JSON, ended by ``[DONE]``, or a `GenerateResponse`.

    Attributes:
        token_ids: the prompt.
        sampling_params: as vLLM's.
        resume_token_ids: tokens already generated elsewhere; numbering and budgets go on from them.
        kv_transfer_params: vLLM's field names (see `docs/protocol.md`); checked by the node.
        items: multimodal items of the prompt; bytes are base64, as always in JSON.
    """

    token_ids: tuple[TokenId, ...]
    sampling_params: SamplingParams = SamplingParams()
    request_id: Name | None = None
    stream: bool = False
    resume_token_ids: tuple[TokenId, ...] = ()
    cache_salt: Text | None = None
    priority: int = 0
    deadline_s: float | None = None
    kv_transfer_params: dict[str, Any] | None = None
    items: tuple[Item, ...] = ()


class GenerateChoice(Struct, frozen=True, kw_only=True):
    """One choice of a `GenerateResponse`."""

    index: int
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GenerateResponse(Struct, frozen=True, kw_only=True):
    """Answer of ``POST /inference/v1/generate`` without streaming."""

    request_id: str
    choices: tuple[GenerateChoice, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    usage: dict[str, Any] = {}
    kv_transfer_params: dict[str, Any] | None = None


# --- membership: node <-> router, JSON over HTTP ---


class NodeInfo(Struct, frozen=True, kw_only=True):
    """How a node introduces itself to the router (``POST /nodes``), again as a heartbeat.

    Attributes:
        node_id: the node's name, stable over its life.
        generation: hex; a restart changes it.
        role: ``prefill``, ``decode`` or ``encode``.
        url: base URL of its HTTP endpoint.
        control_address: of its control channel.
        model: the served model's name.
        identity: hex of the identity digest; nodes of one model with different ones never pair.
        state: ``loading`` until it can serve, ``ready``, or ``draining`` when it shuts down.
        model_path: folder of the model on the node; a router on the same disk finds the tokenizer.
        encoder_identity: hex of the identity digest of encoder outputs that the node makes or can
            receive; empty if it has to do with none.
        encodes: the node can encode items itself.
        load: what it measured of late: ``encoder_row_s``, seconds to read and encode a row of an
            item, and ``prompt_token_s``, seconds per token of a step.
    """

    node_id: Name
    generation: Name
    role: Name
    url: Name
    model: Name
    control_address: Name | None = None
    identity: Name = ""
    transport: Name = ""
    block_size: int = 16
    max_model_len: int = 0
    tp_size: int = 1
    load: dict[str, float] = {}
    state: Name = "ready"
    model_path: Text = ""
    encoder_identity: Name = ""
    encodes: bool = False


class Members(Struct, frozen=True, kw_only=True):
    """The router's answer: who else belongs to the cluster, and when to call again."""

    control_addresses: tuple[Name, ...]
    heartbeat_s: float


_control_encoder = msgspec.msgpack.Encoder()
_control_decoder = msgspec.msgpack.Decoder(Control)


def encode_control(message: Control) -> bytes:
    """Encode a control message."""
    return _control_encoder.encode(message)


def decode_control(data: bytes) -> Control:
    """Decode a control message.

    Raises:
        msgspec.ValidationError: it is not one; the text says where.
        msgspec.DecodeError: it is no MessagePack at all.
    """
    message: Control = _control_decoder.decode(data)
    return message
