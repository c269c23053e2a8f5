"""JSON bodies of nodes' HTTP endpoints (tokens in, tokens out), of registration and of `/nodes`."""

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
"""Terms of a step's time in `NodeInfo.load`, in seconds: per step; per prompt token; per prompt
token and 1,000 tokens of its context; per decoding sequence; per 1,000 tokens of the context of
decoding sequences."""
WIRE_COSTS = ("fetch_s", "handover_s", "token_s")
"""Terms of a wire's time in `NodeInfo.wires`, in seconds: per prefix that is fetched; per
hand-over, after its prompt is computed; per token on the wire."""


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """Body of ``POST /inference/v1/generate``, with vLLM's field names where vLLM has them.

    Answered by a stream (SSE) of `GenerateChunk`, ended by ``[DONE]``, or a `GenerateResponse`.

    Attributes:
        token_ids: The prompt.
        sampling_params: Sampling parameters, with vLLM's names.
        resume_token_ids: Tokens already generated elsewhere; numbering and budgets go on from them.
        kv_transfer_params: vLLM's field names (see `docs/protocol.md`); checked by the node.
        items: Multimodal items of the prompt; bytes are base64, as always in JSON.
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
    """An `Output` in a JSON stream, with every field."""


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
    """A node's description of itself for the router (``POST /nodes``), repeated as a heartbeat.

    Attributes:
        node_id: Name of the node, the same after a restart.
        generation: Hex; a restart changes it.
        role: ``any``, ``prefill``, ``decode`` or ``encode``.
        url: Base URL of its HTTP endpoint.
        control_address: Address of its control channel.
        model: Name of the served model.
        aliases: Other names of the model.
        identity: Hex of the identity digest; nodes of one model with different ones never pair.
        state: ``loading`` until it can serve, ``ready``, or ``draining`` when it shuts down.
        model_path: Folder of the model on the node; a router on the same disk finds the tokenizer.
        encoder_identity: Hex of the identity digest of encoder outputs that the node makes or can
            receive; empty if it does neither.
        encodes: Whether the node can encode items itself.
        load: Recent measurements: ``encoder_row_s``, seconds to read and encode a row of an item;
            ``prompt_token_s``, seconds per token of a step; `STEP_COSTS`, as far as the node has
            run such steps. Limits: ``step_tokens``, most tokens of a step, and ``mixed_tokens``, of
            a step with decoding sequences. Work: ``waiting_tokens`` of prompts, ``free_blocks``,
            sequences ``running``, ``waiting``, or ``loading`` KV. Totals since its start:
            ``generated_tokens``, ``sent_bytes`` handed over.
        vocab_size: Number of token ids; 0 if the node does not say.
        engine_address: Address of its engine for routers: ``tcp://host:port``, secured by the
            cluster key, or without one ``ipc:///...`` on the same machine; empty until ready.
        num_blocks: Number of blocks of its KV cache; 0 if the node does not say.
        wires: Fitted time of KV to arrive here, by control address of the sender: `WIRE_COSTS`, as
            far as they were measured.
        wire_failures: Number of consecutive hand-overs and prefixes that failed to arrive here, if
            any, by control address of the sender.
        prompt_limits: Longest prompts of the node; None if the node does not say.
        stores: Bytes of blocks since its start, by name of the store: ``load`` (verified) and
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
        idle: No request is left, so the process may be ended.
    """

    idle: bool


class Members(Struct, frozen=True, kw_only=True):
    """The router's answer to a registration: the other members, and the interval of heartbeats."""

    control_addresses: tuple[Name, ...]
    heartbeat_s: Annotated[float, Meta(gt=0, le=3600)]


class NodeView(Struct, frozen=True, kw_only=True):
    """One node in the answer of the router's ``GET /nodes``.

    Attributes:
        state: State of the node for the router.
        reason: Why it has this state, for people.
        paused: Whether it gets no new requests.
        used_for: ``prefill``, ``decode``, or both: what the router has used it for recently.
        requests: Number of this router's requests for which it generates.
        prompt_tokens: Number of prompt tokens that it is computing for this router.
        item_rows: Number of rows of items that it is encoding for this router.
        running: Number of sequences in its steps, from all frontends; null if the node does not
            say, as for all fields below it.
        waiting: Number of sequences that wait for room, or for KV.
        tokens_per_s: Tokens per second that it generated recently.
        sent_bytes: Bytes of KV and encoder outputs that it has handed over since its start.
        kv_usage: Share of its KV cache that requests hold.
        max_prompt_len: Tokens of the longest prompt that it computes.
        max_received_len: Tokens of the longest prompt that it can receive; 0 if it receives none.
        stores: See `NodeInfo`.
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
    """Traffic through a router; rates are of the last seconds, totals since its start.

    Attributes:
        running: Number of requests that have their first token.
        waiting: Number of requests that have no token yet.
        finished: Number of requests answered to the end.
        failed: Number of requests that failed.
        requests_per_s: Requests answered to the end per second.
        tokens: Number of tokens relayed to clients.
        tokens_per_s: Tokens relayed to clients per second.
        sent_bytes: Bytes handed over by nodes of this cluster, including those that have left.
        sent_bytes_per_s: Bytes handed over by nodes per second.
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
    """Two nodes between which transfers fail, in the answer of ``GET /nodes``.

    Attributes:
        source: Node id of the sender.
        target: Node id of the receiver, which reports the failures.
        failures: Number of consecutive hand-overs and prefixes that failed.
        trials: Number of trials allowed since.
        trial_in_s: Seconds until the next trial.
    """

    source: str
    target: str
    failures: int
    trials: int
    trial_in_s: float


class NodesView(Struct, frozen=True, kw_only=True):
    """Answer of the router's ``GET /nodes``.

    Attributes:
        nodes: All nodes.
        pairs: Pairs (prefill node id, decode node id) that can hand over now.
        encoder_pairs: Pairs (encoder node id, other node id) that can hand over now.
        failing_pairs: Pairs that get only trials.
        traffic: Traffic through the router.
    """

    nodes: list[NodeView]
    pairs: list[tuple[str, str]]
    encoder_pairs: list[tuple[str, str]]
    traffic: RouterTraffic = RouterTraffic()
    failing_pairs: list[FailingPairView] = []
