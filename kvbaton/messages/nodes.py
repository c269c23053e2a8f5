"""What nodes are asked over HTTP, as JSON: tokens in, tokens out; and their registration."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from kvbaton.messages.engine import Item, Output, SamplingParams
from kvbaton.messages.openai import TokenUsage
from kvbaton.types import Name, PromptLimits, Text, TokenId, TokenLogprobs

STEP_COSTS = (
    "step_s",
    "prefill_token_s",
    "prefill_context_s",
    "decode_sequence_s",
    "decode_context_s",
)
"""Entries of `NodeInfo.load`: seconds that an engine's step takes for itself, per token of prompts,
per such token and 1,000 tokens that it attends to, per decoding sequence, and per 1,000 tokens of
its context."""
WIRE_COSTS = ("fetch_s", "handover_s", "token_s")
"""Entries of `NodeInfo.wires`: seconds that a prefix which is asked for needs for itself, that a
hand-over does after its prompt is computed, and per token that is then on its way."""


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """Body of ``POST /inference/v1/generate``; field names as vLLM's where it has them.

    Answered by a stream (SSE) of `GenerateChunk`, ended by ``[DONE]``, or a `GenerateResponse`.

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


class GenerateChunk(Output, frozen=True, tag="output", kw_only=True, omit_defaults=False):
    """An `Output` as a stream of JSON tells it, with every field."""


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
    usage: TokenUsage
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class NodeInfo(Struct, frozen=True, kw_only=True):
    """How a node introduces itself to the router (``POST /nodes``), again as a heartbeat.

    Attributes:
        node_id: the node's name, stable over its life.
        generation: hex; a restart changes it.
        role: ``any``, ``prefill``, ``decode`` or ``encode``.
        url: base URL of its HTTP endpoint.
        control_address: of its control channel.
        model: the served model's name.
        aliases: other names of it.
        identity: hex of the identity digest; nodes of one model with different ones never pair.
        state: ``loading`` until it can serve, ``ready``, or ``draining`` when it shuts down.
        model_path: folder of the model on the node; a router on the same disk finds the tokenizer.
        encoder_identity: hex of the identity digest of encoder outputs that the node makes or can
            receive; empty if it has to do with none.
        encodes: the node can encode items itself.
        load: what it measured of late: ``encoder_row_s``, seconds to read and encode a row of an
            item; ``prompt_token_s``, seconds per token of a step; `STEP_COSTS`, as far as it has
            seen such steps; ``step_tokens``, most tokens of one step, and ``mixed_tokens``, of one
            with sequences that decode; what it has to do: ``waiting_tokens`` of prompts,
            ``free_blocks`` for it, sequences that are ``running``, ``waiting``, or ``loading`` KV;
            and what it has done since it started: ``generated_tokens``, ``sent_bytes`` handed over.
        vocab_size: of the model; token ids are below it. 0 of a node that does not say.
        engine_address: where routers connect to its engine as frontends: ``tcp://host:port``, keyed
            by the cluster key, or ``ipc:///...`` on one machine without one; empty until ready.
        num_blocks: of its KV cache; 0 of a node that does not say.
        wires: how long KV of late took to come here, by the control address of who sent it:
            `WIRE_COSTS`, as far as they were seen.
        wire_failures: hand-overs and prefixes in a row that did not come here, if any, by the
            control address of who was to send them.
        prompt_limits: how long prompts may be there; None of a node that does not say.
        stores: bytes of blocks since it started, by the store's name: ``load``, found right, and
            ``save``.
    """

    node_id: Name
    generation: Name
    role: Name
    url: Name
    model: Text
    aliases: list[Text] = []
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
    vocab_size: int = 0
    engine_address: Name = ""
    num_blocks: int = 0
    wires: dict[str, dict[str, float]] = {}
    wire_failures: dict[str, int] = {}
    prompt_limits: PromptLimits | None = None
    stores: dict[str, dict[str, float]] = {}


class DrainProgress(Struct, frozen=True, kw_only=True):
    """Answer of ``POST /drain``, of nodes and routers.

    Attributes:
        idle: nothing runs there any more, so that it may be ended.
    """

    idle: bool


class Members(Struct, frozen=True, kw_only=True):
    """The router's answer: who else belongs to the cluster, and when to call again."""

    control_addresses: tuple[Name, ...]
    heartbeat_s: Annotated[float, Meta(gt=0, le=3600)]


class NodeView(Struct, frozen=True, kw_only=True):
    """One node in the answer of the router's ``GET /nodes``.

    Attributes:
        state: what the router takes it for.
        reason: why, for people.
        paused: it gets no new requests.
        used_for: ``prefill``, ``decode``, or both: what the router has used it for of late.
        requests: that it generates for, of those that came through this router.
        prompt_tokens: that it is prefilling for them.
        item_rows: that it is encoding for them.
        running: sequences in its steps, whoever asked for them; None of a node that does not say,
            as with all that follows.
        waiting: those that wait for room, or for KV.
        tokens_per_s: that it generated of late.
        sent_bytes: of KV and encoder outputs that it has handed over since it started.
        kv_usage: share of its KV cache that requests hold.
        max_prompt_len: tokens of the longest prompt that it computes.
        max_received_len: of the longest one that it takes from another node; 0 if it takes none.
        stores: see `NodeInfo`.
    """

    node_id: str
    generation: str
    role: str
    url: str
    state: str
    reason: str
    paused: bool
    model: str
    control_address: str | None
    requests: int
    prompt_tokens: int
    item_rows: int
    used_for: list[str] = []
    running: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None
    sent_bytes: float | None = None
    kv_usage: float | None = None
    max_prompt_len: int | None = None
    max_received_len: int | None = None
    stores: dict[str, dict[str, float]] = {}


class RouterTraffic(Struct, frozen=True, kw_only=True):
    """What goes through a router; rates are of its last seconds.

    Attributes:
        running: requests of clients that have a token.
        waiting: those that have none yet.
        finished: requests answered to the end since the router started.
        failed: requests that failed.
        requests_per_s: answered to the end.
        tokens: relayed to clients.
        tokens_per_s: likewise.
        sent_bytes: handed over by nodes of this cluster, also those that have left.
        sent_bytes_per_s: likewise.
    """

    running: int = 0
    waiting: int = 0
    finished: int = 0
    failed: int = 0
    requests_per_s: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    sent_bytes: float = 0.0
    sent_bytes_per_s: float = 0.0


class FailingPairView(Struct, frozen=True, kw_only=True):
    """Two nodes between which nothing gets through, in the answer of ``GET /nodes``.

    Attributes:
        source: node id of who sends.
        target: of who tells that nothing comes.
        failures: hand-overs and prefixes in a row that did not.
        trials: that were made possible since.
        trial_in_s: until the next one.
    """

    source: str
    target: str
    failures: int
    trials: int
    trial_in_s: float


class NodesView(Struct, frozen=True, kw_only=True):
    """Answer of the router's ``GET /nodes``.

    Attributes:
        nodes: all of them.
        pairs: (prefill node id, decode node id) that can hand over now.
        encoder_pairs: (encoder node id, other node id), too.
        failing_pairs: that get no requests but trials.
        traffic: what goes through the router.
    """

    nodes: list[NodeView]
    pairs: list[tuple[str, str]]
    encoder_pairs: list[tuple[str, str]]
    traffic: RouterTraffic = RouterTraffic()
    failing_pairs: list[FailingPairView] = []
