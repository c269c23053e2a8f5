"""What nodes are asked over HTTP, as JSON: tokens in, tokens out; and their registration."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from kvbaton.messages.engine import Item, Output, SamplingParams
from kvbaton.types import Name, Text, TokenId, TokenLogprobs

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
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    usage: dict[str, Any] = {}
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
        identity: hex of the identity digest; nodes of one model with different ones never pair.
        state: ``loading`` until it can serve, ``ready``, or ``draining`` when it shuts down.
        model_path: folder of the model on the node; a router on the same disk finds the tokenizer.
        encoder_identity: hex of the identity digest of encoder outputs that the node makes or can
            receive; empty if it has to do with none.
        encodes: the node can encode items itself.
        load: what it measured of late: ``encoder_row_s``, seconds to read and encode a row of an
            item; ``prompt_token_s``, seconds per token of a step; `STEP_COSTS`, as far as it has
            seen such steps; ``step_tokens``, most tokens of one step; and what it has to do:
            ``waiting_tokens`` of prompts, ``free_blocks`` for it.
        vocab_size: of the model; token ids are below it. 0 of a node that does not say.
        engine_address: where routers connect to its engine as frontends: ``tcp://host:port``, keyed
            by the cluster key, or ``ipc:///...`` on one machine without one; empty until ready.
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
    vocab_size: int = 0
    engine_address: Name = ""


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
