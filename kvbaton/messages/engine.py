"""What crosses between an engine core and its frontends, as MessagePack: `ToCore`, `FromCore`.

A frontend says `Connect` first and is answered with `Ready` or `Disconnected`. A field added at the
end with a default keeps neighbouring releases able to talk; anything else raises `ENGINE_VERSION`.
What can't be decoded is dropped and counted, except that a request is answered with `Rejected`.
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
"""A block is told by the last bytes of its key; see `connectors.keys`."""
MAX_GRAMMAR = 1 << 18
"""Most characters of a grammar."""


class SamplingParams(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, dict=True
):
    """How to choose tokens. Names and defaults as vLLM's; checked by `server.validation`.

    Defaults are not sent: a core that does not know a field refuses those requests that need it,
    and serves the others.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass, in (0, 1].
        top_k: candidates kept; 0 keeps all.
        min_p: least probability relative to the best.
        presence_penalty: subtracted once per token already generated.
        frequency_penalty: subtracted per occurrence among the generated tokens.
        repetition_penalty: divides or multiplies logits of tokens seen before; 1 is off.
        logit_bias: added to logits, by token id.
        seed: of the noise; the endpoint mints one if the client gave none, so that it is never
            None in an engine.
        n: choices.
        max_tokens: most tokens to generate.
        min_tokens: tokens before any stop may take effect.
        stop_token_ids: end the text, beside the model's own end tokens.
        ignore_eos: the model's own end tokens do not end the text.
        logprobs: candidates reported per token; None for none at all.
        prompt_logprobs: the same for prompt tokens.
        grammar: that the generated text must follow, as llguidance takes it: Lark, or its JSON.
            Empty for none. It decides where the text ends.
        allowed_token_ids: nothing else is generated; None allows all.
        bad_words_token_ids: sequences that are not generated: where the text ends in all of one but
            its last token, that one comes only if nothing else may.
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
    """A request's part in a hand-over.

    Attributes:
        role: ``source`` (this node prefills for another) or ``target`` (this node receives).
        transfer_id: as minted by the router, or by P.
        attempt: as minted by the router; 0 without one.
        peer: for a target, P's control address ``tcp://host:port``.
        peer_node: for a target, P's node id as the router knows it; None if not known.
    """

    role: str
    transfer_id: Id128
    attempt: Count = 0
    peer: Name | None = None
    peer_node: Name | None = None

    @property
    def name(self) -> Attempt:
        """What the hand-over calls it."""
        return Attempt(self.transfer_id, self.attempt)


class PrefixAt(Struct, frozen=True, kw_only=True):
    """A node that has the first tokens of a prompt cached, and can send their blocks.

    Attributes:
        peer: its control address ``tcp://host:port``.
        num_tokens: that it is thought to hold.
    """

    peer: Name
    num_tokens: Count


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


class Connect(Struct, frozen=True, tag="connect", kw_only=True):
    """A frontend introduces itself; before that nothing that it says is heeded.

    Attributes:
        min_version: oldest version of these messages that it speaks.
        version: newest one.
    """

    min_version: Count = MIN_ENGINE_VERSION
    version: Count = ENGINE_VERSION


class AddRequest(Struct, frozen=True, tag="add", kw_only=True):
    """Generate from tokens.

    Attributes:
        request_id: unique among the live requests of the frontend.
        token_ids: the prompt; crosses as 4 bytes a token, little-endian.
        resume_ids: tokens already generated for this request elsewhere; the engine continues after
            them as if it had generated them itself.
        params: sampling.
        priority: lower runs first, as in vLLM; equal ones of a tenant first come, first served.
        cache_salt: requests with different salts never share cache.
        deadline_s: seconds from receipt after which the request is ended.
        transfer: its part in a hand-over, if any.
        items: multimodal items, by start; they do not overlap.
        tenant: whose it is; among equal priorities tenants get equal shares.
        prefix: who has the first tokens cached, if they are to be fetched; what does not come is
            computed.
        timed: tell when what happened (`Output.marks`).
        traceparent: W3C Trace Context of the span that the request is part of, if it is traced.
        ttft_s: seconds from receipt within which its first token is to come; what can't, or makes
            more others late, goes after them. 0 for no objective.
        itl_s: seconds within which each further token is to come: prompts beside it are computed in
            chunks that are short enough for that. 0 for no objective.
        prefill_s: seconds that computing the prompt is expected to take; 0 if nobody knows.
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
    """Stop a request; unknown ids are ignored. Answered by an `Output` with ``abort``."""

    request_id: Name


class Ping(Struct, frozen=True, tag="ping", kw_only=True):
    """Answered by a `Pong` with the same number, between two steps."""

    number: Count


class Command(Struct, frozen=True, tag="command", kw_only=True):
    """Ask the core something, as only a node's own frontends may. Answered by a `Reply`.

    Attributes:
        command_id: the reply has the same.
        name: ``state`` (the debugging dump), ``steps``, ``metrics``, ``reset_prefix_cache``,
            ``reset_store``, ``drain``, ``members``, ``start_profile``, ``stop_profile``.
        argument: for ``members``, a list of control addresses that may be dialled.
    """

    command_id: Count
    name: Name
    argument: Any = None


class Shutdown(Struct, frozen=True, tag="shutdown", kw_only=True):
    """Drain for at most `grace_s` seconds and exit; only a node's own frontends may say so."""

    grace_s: float = 5.0


class WatchBlocks(Struct, frozen=True, tag="watch_blocks", kw_only=True):
    """Tell this frontend what the prefix caches hold, from a snapshot on.

    Answered by `CachedBlocks`, for as long as the frontend is connected. To ask again is to get a
    new snapshot.
    """


ToCore = Connect | AddRequest | AbortRequest | Ping | Command | Shutdown | WatchBlocks


@dataclass(frozen=True)
class Undecodable:
    """A message to a core that can't be read; its receiving end makes it, nobody sends it.

    Attributes:
        error: why.
        request_id: of the `AddRequest` that it was, if that much could be read.
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
    """What an `AddRequest` of any version has."""

    request_id: Name


_any_add = msgspec.msgpack.Decoder(_AddOfAnyKind)


def decode_to_core(data: bytes) -> ToCore | Undecodable:
    """Read a message of a frontend. Whatever it holds, this raises nothing."""
    try:
        return _to_core.decode(data)
    except UNREADABLE as error:
        problem = clip_text(str(error))
    try:
        return Undecodable(problem, _any_add.decode(data).request_id)
    except UNREADABLE:
        return Undecodable(problem)


class Mark(Struct, frozen=True, array_like=True, gc=False):
    """When something happened to a request, for those that are `AddRequest.timed`.

    An engine marks ``received``; ``scheduled``, when the first step was planned that computes it;
    ``first_token`` and ``second_token`` when it had them; ``preempted``. A target of a hand-over
    also marks ``loading`` (it has reserved blocks), ``accepted`` (its peer has agreed),
    ``first_landed``, ``landed`` (the last write), ``verified``, or ``load_failed``; ``loading`` is
    marked of loads from stores, too. A router adds ``asked`` and ``failed`` of its node requests.

    Attributes:
        name: what.
        at: seconds on the monotonic clock of the machine that marks; `EngineClient` turns what an
            engine tells into its own.
        node: node id, as a router adds it.
        part: what the node does for the request, likewise.
        attempt: of the request, likewise.
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
"""HTTP statuses of errors that trying again does not change, by code; those of a request that is to
blame itself (400) would come of every node."""


class Output(Struct, frozen=True, tag="output", kw_only=True, gc=False, omit_defaults=True):
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
        marks: of a timed request, what happened since the output before.
        error_code: for ``error``, what it is called where the same node would fail again, one of
            `ERROR_STATUSES`.
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
    """What one step produced for one frontend."""

    outputs: tuple[Output, ...]


class Rejected(Struct, frozen=True, tag="rejected", kw_only=True):
    """A request that the core can't take; the fields are those of `RequestError`."""

    request_id: Name
    message: Text
    param: Name | None = None
    status: int = 400
    code: Name | None = None

    @classmethod
    def of(cls, request_id: str, error: RequestError) -> Rejected:
        """The message that says so."""
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
        node: this life of the node.
        control_address: where peers reach its control channel; None for a node without a transport.
        num_blocks: usable blocks of the pool.
        block_size: tokens per block.
        max_model_len: longest prompt plus output.
        eos_token_ids: the model's own end tokens.
        identity: digest of the identity record; nodes with different ones never pair.
        encoder_identity: the same of encoder outputs that the node makes or can receive; empty if
            it has nothing to do with any.
        engine_address: where remote frontends connect, ``tcp://host:port`` or ``ipc:///...``; empty
            if there is no such place.
        prompt_limits: of its prompts; None of an engine for items.
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
    """The core is done with this frontend, and has ended its requests.

    Attributes:
        reason: no common version, or it did not read what it was sent.
    """

    reason: Text


class Pong(Struct, frozen=True, tag="pong", kw_only=True):
    """The core lives. Sent for every `Ping`, and now and then unasked with number 0."""

    number: Count = 0


class HistogramCounts(Struct, frozen=True, kw_only=True):
    """One Prometheus histogram.

    Attributes:
        bounds: upper bounds of its buckets, rising.
        counts: observations per bucket, not summed up; one more than bounds.
        total: sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[Count, ...]
    total: float


class Metrics(Struct, frozen=True, tag="metrics", kw_only=True):
    """What the core counts; sent to a node's own frontends every few seconds and when they ask.

    Attributes:
        counters: monotonic totals, by Prometheus name with labels, ``name{label="x"}``.
        gauges: values now.
        histograms: by Prometheus name.
    """

    counters: dict[str, float]
    gauges: dict[str, float]
    histograms: dict[str, HistogramCounts] = {}


NO_METRICS = Metrics(counters={}, gauges={})
"""Before a core has sent any."""


class BlockChange(Struct, frozen=True, array_like=True, gc=False):
    """Blocks that entered or left a prefix cache.

    Attributes:
        group: KV group.
        stored: they entered it.
        hashes: the last `BLOCK_HASH_BYTES` of the key of each.
    """

    group: Count
    stored: bool
    hashes: bytes


class CachedGroup(NamedTuple):
    """How a KV group's blocks are cached.

    Attributes:
        block_size: tokens of a block.
        window: of its window or chunk; 0 for none.
        chunked: see `types.first_attended`.
    """

    block_size: Count
    window: Count = 0
    chunked: bool = False


class CachedBlocks(Struct, frozen=True, tag="cached_blocks", kw_only=True, gc=False):
    """What happened to the prefix caches, to those who watch (`WatchBlocks`).

    Attributes:
        number: rises by 1 with each message; 0 begins a snapshot and replaces all that was told.
            One that has no successor's number means that the watcher must ask again.
        groups: with number 0: per KV group the tokens of a block, and of its window (0 for none).
        changes: in order.
        chunked: numbers of the groups whose windows are chunks.
    """

    number: Count
    groups: tuple[tuple[Count, Count], ...] = ()
    changes: tuple[BlockChange, ...] = ()
    chunked: tuple[Count, ...] = ()

    @classmethod
    def beginning(
        cls, groups: Sequence[CachedGroup], changes: tuple[BlockChange, ...] = ()
    ) -> CachedBlocks:
        """The first message of a snapshot."""
        chunked = tuple(number for number, group in enumerate(groups) if group.chunked)
        sizes = tuple((group.block_size, group.window) for group in groups)
        return cls(number=0, groups=sizes, changes=changes, chunked=chunked)

    def cached_groups(self) -> tuple[CachedGroup, ...]:
        """What `groups` and `chunked` say."""
        return tuple(
            CachedGroup(*sizes, number in self.chunked) for number, sizes in enumerate(self.groups)
        )


class Dead(Struct, frozen=True, tag="dead", kw_only=True):
    """The core is about to exit because of an error.

    Attributes:
        error: what happened.
        field: for a `ConfigError`, the setting that is wrong.
    """

    error: Text
    field: Name | None = None


FromCore = Outputs | Rejected | Reply | Ready | Disconnected | Pong | Metrics | CachedBlocks | Dead
