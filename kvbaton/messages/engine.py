"""Messages between an engine core and its frontends, as MessagePack: `ToCore`, `FromCore`.

A frontend sends `Connect` first and gets `Ready` or `Disconnected`. Adding a field at the end with
a default keeps neighbouring releases compatible; any other change must raise `ENGINE_VERSION`.
Messages that can't be decoded are dropped and counted; a request among them gets `Rejected`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvbaton.errors import RequestError
from kvbaton.messages import UNREADABLE
from kvbaton.types import (
    ENCODER_BLOCK_ROWS,
    MAX_NAME,
    Attempt,
    Count,
    Id128,
    Key,
    Name,
    NodeId,
    PromptLimits,
    Text,
    TokenId,
    TokenIds,
    TokenLogprobs,
    clip_text,
)

ENGINE_VERSION = MIN_ENGINE_VERSION = 3

BLOCK_HASH_BYTES = 8
"""Bytes at the end of a block's key that identify the block to frontends; see `connectors.keys`."""
MAX_GRAMMAR = 1 << 18
"""Maximum number of characters of a grammar."""


class SamplingParams(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, dict=True
):
    """Sampling parameters, with vLLM's names and defaults; checked by `server.validation`.

    Defaults are not sent: a core that does not know a field refuses only the requests that set it.

    Attributes:
        temperature: Temperature; 0 is greedy.
        top_p: Nucleus mass, in (0, 1].
        top_k: Number of candidates kept; 0 keeps all.
        min_p: Least probability relative to the best candidate.
        presence_penalty: Subtracted from the logit of each token that was generated before.
        frequency_penalty: Subtracted per occurrence among the generated tokens.
        repetition_penalty: Divides or multiplies logits of tokens seen before; 1 is off.
        logit_bias: Added to logits, by token id.
        seed: Seed of the sampling noise. The endpoint chooses one if the client gave none, so it is
            never None in an engine.
        n: Number of choices.
        max_tokens: Maximum number of tokens to generate.
        min_tokens: Number of tokens before any stop may take effect.
        stop_token_ids: Token ids that end the text, beside the model's own end tokens.
        ignore_eos: Whether the model's own end tokens do not end the text.
        logprobs: Number of candidates reported per token; None for no log probabilities.
        prompt_logprobs: Number of candidates reported per prompt token; None for none.
        grammar: Grammar of the generated text, in llguidance's Lark or JSON format; empty for none.
            It decides where the text ends.
        allowed_token_ids: Only these tokens are generated; None allows all.
        bad_words_token_ids: Token sequences that are not generated. If the text ends in all of one
            except its last token, that token is generated only if no other is allowed.
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
    grammar: str = ""
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


class TransferSpec(Struct, frozen=True, kw_only=True):
    """A request's role in a hand-over.

    Attributes:
        role: ``source`` (this node prefills for another) or ``target`` (this node receives).
        transfer_id: Id of the transfer, chosen by the router or by P.
        attempt: Number of the attempt, chosen by the router; 0 without one.
        peer: For a target, P's control address ``tcp://host:port``.
        peer_node: For a target, P's node id as the router knows it; None if not known.
        goes_on: For a source: whether it may sample a second token while the prompt's KV crosses.
    """

    role: str
    transfer_id: Id128
    attempt: Count = 0
    peer: Name | None = None
    peer_node: Name | None = None
    goes_on: bool = False

    @property
    def name(self) -> Attempt:
        """Transfer id and attempt, which name the attempt in the protocol."""
        return Attempt(self.transfer_id, self.attempt)


class PrefixAt(Struct, frozen=True, kw_only=True):
    """A node that has the first tokens of a prompt cached, and can send their blocks.

    Attributes:
        peer: Control address of the node, ``tcp://host:port``.
        num_tokens: Number of tokens that the node is thought to hold.
    """

    peer: Name
    num_tokens: Count


class Item(Struct, frozen=True, kw_only=True):
    """A multimodal item of a prompt; tokens [start, start + length) are its placeholders.

    Its encoder output has one row per placeholder. It is handed over like the KV of a prompt: by a
    transfer of its own, of one KV group, whose number of positions is `padded_rows`.

    Attributes:
        start: Position of its first placeholder in the prompt.
        length: Number of placeholders, at least 1.
        digest: Digest of its content and the processor's settings; items of equal digests have
            equal outputs.
        grid: Number of patches in time, height and width, before they are merged.
        data: The image as the client gave it (PNG, JPEG, ...); empty if the receiver need not
            encode it.
        transfer: Its hand-over from an encoder node, if there is one.
    """

    start: Count
    length: Annotated[int, Meta(ge=1, le=1 << 31)]
    digest: Key
    grid: tuple[Count, Count, Count]
    data: bytes = b""
    transfer: TransferSpec | None = None

    @property
    def padded_rows(self) -> int:
        """Number of rows of its output, rounded up to whole blocks of the encoder cache."""
        return -(-self.length // ENCODER_BLOCK_ROWS) * ENCODER_BLOCK_ROWS


class Connect(Struct, frozen=True, tag="connect", kw_only=True):
    """A frontend introduces itself; the core ignores its other messages until then.

    Attributes:
        min_version: Oldest version of these messages that the frontend speaks.
        version: Newest version of these messages that the frontend speaks.
    """

    min_version: Count = MIN_ENGINE_VERSION
    version: Count = ENGINE_VERSION


class AddRequest(Struct, frozen=True, tag="add", kw_only=True):
    """Generate from a prompt.

    Attributes:
        request_id: Id, unique among the live requests of the frontend.
        token_ids: The prompt; sent as 4 bytes per token, little-endian.
        resume_ids: Tokens already generated for this request elsewhere; the engine continues after
            them as if it had generated them itself.
        params: Sampling parameters.
        priority: Lower runs first, as in vLLM; equal ones of a tenant first come, first served.
        cache_salt: Requests with different salts never share cached blocks.
        deadline_s: Seconds from receipt after which the request is ended.
        transfer: Its role in a hand-over, if any.
        items: Multimodal items, ordered by start; they do not overlap.
        tenant: Tenant of the request; among equal priorities tenants get equal shares.
        prefix: Node from which to fetch the first tokens, if any; tokens that do not come are
            computed.
        timed: Whether to send `Output.marks`.
        traceparent: W3C Trace Context of the span that the request is part of; empty if not traced.
        ttft_s: Objective of its first token, in seconds from receipt; 0 for none. A request that
            can't meet it, or would make more others late, is served after them.
        itl_s: Objective of each further token, in seconds; 0 for none. Prompts beside the request
            are computed in chunks that are short enough for it.
        prefill_s: Seconds that computing the prompt is expected to take; 0 if not known.
    """

    request_id: Name
    token_ids: TokenIds
    params: SamplingParams
    resume_ids: tuple[TokenId, ...] = ()
    priority: int = 0
    cache_salt: Text = ""
    deadline_s: float = 600.0
    transfer: TransferSpec | None = None
    items: tuple[Item, ...] = ()
    tenant: Text = ""
    prefix: PrefixAt | None = None
    timed: bool = False
    traceparent: Name = ""
    ttft_s: float = 0.0
    itl_s: float = 0.0
    prefill_s: float = 0.0


class AbortRequest(Struct, frozen=True, tag="abort", kw_only=True):
    """End a request; unknown ids are ignored. Answered by an `Output` with ``abort``."""

    request_id: Name


class Ping(Struct, frozen=True, tag="ping", kw_only=True):
    """Answered by a `Pong` with the same number, between two steps."""

    number: Count


class Command(Struct, frozen=True, tag="command", kw_only=True):
    """Command to the core, which only a node's own frontends may send. Answered by a `Reply`.

    Attributes:
        command_id: Id, which the reply repeats.
        name: ``state`` (the debugging dump), ``steps``, ``metrics``, ``reset_prefix_cache``,
            ``reset_store``, ``drain``, ``members``, ``start_profile``, ``stop_profile``.
        argument: For ``members``, the list of control addresses to which connections are allowed.
    """

    command_id: Count
    name: Name
    argument: Any = None


class Shutdown(Struct, frozen=True, tag="shutdown", kw_only=True):
    """Drain for at most `grace_s` seconds and exit; only a node's own frontends may send it."""

    grace_s: float = 5.0


class WatchBlocks(Struct, frozen=True, tag="watch_blocks", kw_only=True):
    """Subscribe to the contents of the prefix caches, beginning with a snapshot.

    Answered by `CachedBlocks` as long as the frontend is connected. Sending it again gives a new
    snapshot.
    """


ToCore = Connect | AddRequest | AbortRequest | Ping | Command | Shutdown | WatchBlocks


@dataclass(frozen=True)
class Undecodable:
    """A message to a core that can't be decoded; the receiver makes this, it is never sent.

    Attributes:
        error: Why it can't be decoded.
        request_id: Request id of an `AddRequest` of which that much could be decoded; else None.
    """

    error: str
    request_id: str | None = None


def _token_ids(_: type, data: object) -> TokenIds:
    if not isinstance(data, bytes):
        raise ValueError(f"token ids must be bytes, not {type(data).__name__}")
    return array("I", data)


encode_to_core: Callable[[ToCore], bytes] = msgspec.msgpack.Encoder(enc_hook=array.tobytes).encode
_to_core: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore, dec_hook=_token_ids)


class _AddOfAnyKind(Struct, frozen=True, tag="add"):
    """The fields that an `AddRequest` of any version has."""

    request_id: Name


_any_add = msgspec.msgpack.Decoder(_AddOfAnyKind)


def decode_to_core(data: bytes) -> ToCore | Undecodable:
    """Decode a message of a frontend. Never raises."""
    try:
        return _to_core.decode(data)
    except UNREADABLE as error:
        problem = clip_text(str(error))
    try:
        return Undecodable(problem, _any_add.decode(data).request_id)
    except UNREADABLE:
        return Undecodable(problem)


class Mark(Struct, frozen=True, array_like=True, gc=False):
    """Time of an event of a request that is `AddRequest.timed`.

    An engine marks ``received``; ``scheduled``, when the first step that computes the request was
    planned; ``first_token`` and ``second_token`` when it had them; ``preempted``. A target of a
    hand-over also marks ``loading`` (it has reserved blocks), ``accepted`` (its peer has agreed),
    ``first_landed``, ``landed`` (the last write), ``verified``, or ``load_failed``; loads from
    stores mark ``loading``, too. A router adds ``asked`` and ``failed`` for its node requests.

    Attributes:
        name: Name of the event.
        at: Seconds on the monotonic clock of the machine where it happened; `EngineClient` converts
            an engine's times to its own clock.
        node: Node id, set by a router.
        part: Part of the node in serving the request, set by a router.
        attempt: Number of the attempt, set by a router.
    """

    name: Name
    at: float
    node: Name = ""
    part: Name = ""
    attempt: Count = 0


ERROR_STATUSES = {
    "grammar_failed": 400,
    "invalid_image": 400,
    "no_token": 500,
    "internal_error": 500,
}
"""HTTP statuses, by error code, of errors that a retry on the same node does not change. With 400
the request itself is to blame, so every node would fail."""


class Output(Struct, frozen=True, tag="output", kw_only=True, gc=False, omit_defaults=True):
    """New tokens of one choice of a request.

    Attributes:
        request_id: Id of the request.
        choice: Index of the choice.
        index: Position of the first of `token_ids` among the generated tokens.
        token_ids: New tokens; may be empty on the last output.
        logprobs: One per new token, if asked for.
        prompt_logprobs: On the first output, if asked for: one per prompt token, the first None.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error`` on the last output of a choice.
        stop_reason: The token id that stopped the choice, unless it is an end-of-text token.
        error: Text of the error, for ``error``.
        cached_tokens: Number of prompt tokens from a cache: this node's, or that of the node which
            handed the prompt over.
        transferred_tokens: Number of prompt tokens received from another node.
        kv_transfer_params: On the last output of a source, the parameters of the target's request.
        marks: For a timed request, the events since the output before.
        error_code: For ``error``, a key of `ERROR_STATUSES` if the same node would fail again.
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
    marks: tuple[Mark, ...] = ()
    error_code: Name | None = None


class Outputs(Struct, frozen=True, tag="outputs", kw_only=True, gc=False):
    """The outputs of one step for one frontend."""

    outputs: tuple[Output, ...]


class Rejected(Struct, frozen=True, tag="rejected", kw_only=True):
    """The core refuses a request; the fields are those of `RequestError`."""

    request_id: Name
    message: Text
    param: Name | None = None
    status: int = 400
    code: Name | None = None

    @classmethod
    def of(cls, request_id: str, error: RequestError) -> Rejected:
        """Make the message from an error."""
        return cls(
            request_id=request_id,
            message=clip_text(error.message),
            param=None if error.param is None else error.param[:MAX_NAME],
            status=error.status,
            code=None if error.code is None else error.code[:MAX_NAME],
        )


class Reply(Struct, frozen=True, tag="reply", kw_only=True):
    """Answer to a `Command`."""

    command_id: Count
    result: Any = None
    error: Text | None = None


class Ready(Struct, frozen=True, tag="ready", kw_only=True):
    """The core is up, and `Connect` accepted.

    Attributes:
        node: Name and generation of the node.
        control_address: Address of its control channel for peers; None without a transport.
        num_blocks: Number of usable blocks in the pool.
        block_size: Tokens per block.
        max_model_len: Maximum length of prompt plus output, in tokens.
        eos_token_ids: The model's own end tokens.
        identity: Digest of the identity record; nodes with different ones never pair.
        encoder_identity: Digest of the identity record of encoder outputs that the node makes or
            can receive; empty if it does neither.
        engine_address: Address for remote frontends, ``tcp://host:port`` or ``ipc:///...``; empty
            without one.
        prompt_limits: Longest prompts; None for an engine of items.
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
    engine_address: Name = ""
    prompt_limits: PromptLimits | None = None


class Disconnected(Struct, frozen=True, tag="disconnected", kw_only=True):
    """The core has dropped this frontend and ended its requests.

    Attributes:
        reason: Why: no common version, or the frontend did not read its messages.
    """

    reason: Text


class Pong(Struct, frozen=True, tag="pong", kw_only=True):
    """The core is alive. Sent for every `Ping`, and at intervals unasked with number 0."""

    number: Count = 0


class HistogramCounts(Struct, frozen=True, kw_only=True):
    """One Prometheus histogram.

    Attributes:
        bounds: Upper bounds of its buckets, rising.
        counts: Observations per bucket, not cumulative; one more than bounds.
        total: Sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[Count, ...]
    total: float


class Metrics(Struct, frozen=True, tag="metrics", kw_only=True):
    """Metrics of the core; sent to a node's own frontends every few seconds and when they ask.

    Attributes:
        counters: Monotonic totals, by Prometheus name with labels, ``name{label="x"}``.
        gauges: Current values, by Prometheus name with labels.
        histograms: Histograms, by Prometheus name with labels.
    """

    counters: dict[str, float]
    gauges: dict[str, float]
    histograms: dict[str, HistogramCounts] = {}


NO_METRICS = Metrics(counters={}, gauges={})
"""Value before a core has sent any."""


class BlockChange(Struct, frozen=True, array_like=True, gc=False):
    """Blocks that entered or left a prefix cache.

    Attributes:
        group: Number of the KV group.
        stored: Whether the blocks entered the cache.
        hashes: The last `BLOCK_HASH_BYTES` of each block's key, concatenated.
    """

    group: Count
    stored: bool
    hashes: bytes


class CachedGroup(NamedTuple):
    """Properties of a KV group that its caching depends on.

    Attributes:
        block_size: Tokens per block.
        window: Tokens of its window or chunk; 0 for none.
        chunked: Whether `window` is a chunk; see `types.first_attended`.
    """

    block_size: Count
    window: Count = 0
    chunked: bool = False


class CachedBlocks(Struct, frozen=True, tag="cached_blocks", kw_only=True, gc=False):
    """Changes of the prefix caches, for frontends that sent `WatchBlocks`.

    Attributes:
        number: Rises by 1 with each message; 0 begins a snapshot, which replaces all earlier
            messages. A frontend that misses a number must send `WatchBlocks` again.
        groups: With number 0: per KV group the tokens of a block, and of its window (0 for none).
        changes: Changes, in order.
        chunked: Numbers of the groups whose windows are chunks.
    """

    number: Count
    groups: tuple[tuple[Count, Count], ...] = ()
    changes: tuple[BlockChange, ...] = ()
    chunked: tuple[Count, ...] = ()

    @classmethod
    def beginning(
        cls, groups: Sequence[CachedGroup], changes: tuple[BlockChange, ...] = ()
    ) -> CachedBlocks:
        """Make the first message of a snapshot."""
        chunked = tuple(number for number, group in enumerate(groups) if group.chunked)
        sizes = tuple((group.block_size, group.window) for group in groups)
        return cls(number=0, groups=sizes, changes=changes, chunked=chunked)

    def cached_groups(self) -> tuple[CachedGroup, ...]:
        """`groups` and `chunked`, joined per KV group."""
        return tuple(
            CachedGroup(*sizes, number in self.chunked) for number, sizes in enumerate(self.groups)
        )


class Dead(Struct, frozen=True, tag="dead", kw_only=True):
    """The core is about to exit because of an error.

    Attributes:
        error: Text of the error.
        field: For a `ConfigError`, the setting that is wrong.
    """

    error: Text
    field: Name | None = None


FromCore = Outputs | Rejected | Reply | Ready | Disconnected | Pong | Metrics | CachedBlocks | Dead
