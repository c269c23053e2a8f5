"""What handlers of an endpoint share: the source of tokens, the tokenizer, settings and limits."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from kvbaton.engine.outputs import TokenSource
from kvbaton.engine.validate import INT32, RANGES, Range, check_range
from kvbaton.errors import ConfigError, RequestError
from kvbaton.messages.engine import PrefixAt, TransferSpec
from kvbaton.server.config import EndpointConfig, GenerationConfigMode, MediaConfig
from kvbaton.server.metrics import HttpMetrics
from kvbaton.server.tracing import Tracing, TracingConfig
from kvbaton.text.output_parser import OutputFormat, ReasoningParserName, ToolCallParserName
from kvbaton.text.parsers import find_output_format
from kvbaton.text.tokenizer import Tokenizer


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What bounds a request.

    Attributes:
        max_model_len: longest prompt plus output, in tokens.
        vocab_size: token ids are below it.
    """

    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """Settings of the endpoint; command-line defaults are read from here.

    Attributes:
        model_name: as clients name it, and answers.
        aliases: other names that clients may use.
        api_keys: any of them opens the endpoint as ``Authorization: Bearer KEY``; none leaves it
            open.
        operator_keys: open what only operators may ask; none leaves that to `api_keys`.
        min_priority: lowest that requests may name.
        allowed_origins: see `EndpointConfig`.
        operator_token: as such a key; empty for none.
        timeout_s: after which a request is ended, if it names no `timeout`.
        max_timeout_s: longest `timeout` that a request may name.
        deadline_grace_s: the source ends a request at its timeout; if it does not, the endpoint
            does so this much later.
        max_body_bytes: a longer body is a 413.
        max_bodies_bytes: of all long bodies that are on their way at a time; others wait.
        body_timeout_s: in which the first MiB of a body must have come, and then the rest of it.
        max_prompts: of one request.
        max_n: choices per prompt.
        max_choices: prompts times n.
        max_logprobs: candidates per token.
        tool_call_parser: see `EndpointConfig`.
        reasoning_parser: see there.
        sampling_defaults: of the model, for fields that a request leaves out.
        media: what images clients may bring.
        traces: where traces go, if there are to be any.
    """

    model_name: str
    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    operator_keys: tuple[str, ...] = ()
    min_priority: int = -INT32
    allowed_origins: tuple[str, ...] = ()
    operator_token: str = field(default="", repr=False)
    timeout_s: float = 600.0
    max_timeout_s: float = 3600.0
    deadline_grace_s: float = 10.0
    max_body_bytes: int = 32 << 20
    max_bodies_bytes: int = 512 << 20
    body_timeout_s: float = 60.0
    max_prompts: int = 256
    max_n: int = 128
    max_choices: int = 512
    max_logprobs: int = 20
    tool_call_parser: ToolCallParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    media: MediaConfig = field(default_factory=MediaConfig)
    traces: TracingConfig | None = None

    @cached_property
    def ranges(self) -> Mapping[str, Range]:
        """What `SamplingParams` may hold here, by field."""
        scored = Range(0, self.max_logprobs)
        return {**RANGES, "n": Range(1, self.max_n), "logprobs": scored, "prompt_logprobs": scored}

    def check_priority(self, priority: int) -> None:
        """Raise `RequestError` for one that requests may not name here."""
        check_range("priority", priority, Range(self.min_priority, INT32))

    @classmethod
    def of(
        cls,
        config: EndpointConfig,
        folder: str,
        name: str,
        *,
        operator_token: str = "",
        role: str = "router",
        node: str = "",
    ) -> FrontendConfig:
        """What the flags say of an endpoint that serves the model in a folder under a name.

        Args:
            config: the flags.
            folder: of the model.
            name: of the model, for clients.
            operator_token: see the attribute.
            role: of a node, for its traces.
            node: its id.

        Raises:
            ConfigError: the model's recommendations can't be read, or traces can't be made.
        """
        shared = {item.name for item in fields(cls)} & {item.name for item in fields(config)}
        given = {name: getattr(config, name) for name in shared}
        if config.min_priority is None:
            given["min_priority"] = 0 if len(config.api_keys) > 1 else -INT32
        return cls(
            **given,
            model_name=name,
            aliases=config.served_model_name[1:],
            operator_token=operator_token,
            sampling_defaults=sampling_defaults(folder, config.generation_config),
            traces=TracingConfig.of(config.otlp_traces_endpoint, role, node),
        )


# --- what a model recommends ---


class Recommended(Struct, omit_defaults=True):
    """The fields of ``generation_config.json`` that become defaults; bounds are those of a request.

    Its end-of-text ids are read by the engine (`engine.model_config`).
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=100)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    do_sample: bool | None = None


def sampling_defaults(folder: str | Path, mode: GenerationConfigMode = "auto") -> dict[str, Any]:
    """Defaults of a request by their name in the API (`max_tokens` for ``max_new_tokens``).

    Args:
        folder: of the model; without the file there are none.
        mode: see `GenerationConfigMode`.

    Returns:
        Empty if the file says ``"do_sample": false``: what it says of sampling is then not meant.

    Raises:
        ConfigError: the file can't be read, or recommends a value that no request may have.
    """
    path = Path(folder, "generation_config.json")
    if mode == "none" or not path.is_file():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Recommended, strict=False)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(str(path), f"{error}; or start with --generation-config=none") from error
    named = msgspec.to_builtins(found)
    if named.pop("do_sample", None) is False:
        return {}
    return {("max_tokens" if k == "max_new_tokens" else k): v for k, v in named.items()}


# --- what handlers share ---


TransferParser = Callable[[dict[str, Any] | None], tuple[TransferSpec | None, PrefixAt | None]]


def refuse_transfer(params: dict[str, Any] | None) -> tuple[None, None]:
    """For an endpoint that pairs nodes itself.

    Raises:
        RequestError: the client brought ``kv_transfer_params``.
    """
    if params:
        raise RequestError(
            "kv_transfer_params is for nodes; this endpoint pairs them itself",
            param="kv_transfer_params",
        )
    return None, None


@dataclass(frozen=True, kw_only=True)
class Frontend:
    """What the handlers share.

    Attributes:
        source: makes the tokens.
        tokenizer: the model's.
        config: settings.
        facts: bounds of a request now; may raise `RequestError` (503) or `EngineDeadError` while
            nothing can be served.
        transfer: turns ``kv_transfer_params`` into a part in a hand-over, and a prefix to fetch.
        transfer_type: shape of ``kv_transfer_params`` for the description; None if it is refused.
        metrics: what is counted.
        long_bodies: bytes that are on their way, by tenant.
        body_ended: set when one of those has come.
        created: start of this process, for answers that name it.
    """

    source: TokenSource
    tokenizer: Tokenizer
    config: FrontendConfig
    facts: Callable[[], ModelFacts]
    transfer: TransferParser = refuse_transfer
    transfer_type: type[Struct] | None = None
    metrics: HttpMetrics = field(default_factory=HttpMetrics)
    long_bodies: Counter[str] = field(default_factory=Counter)
    body_ended: asyncio.Event = field(default_factory=asyncio.Event)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        _ = self.output_format  # what is wrong with it is told at the start

    @cached_property
    def tracing(self) -> Tracing | None:
        """Makes traces of requests; None if there are to be none."""
        return None if self.config.traces is None else Tracing(self.config.traces)

    @cached_property
    def output_format(self) -> OutputFormat | None:
        """How the model marks reasoning and calls; None if they are not told apart.

        Raises:
            ConfigError: the configured parsers do not suit the model.
        """
        config = self.config
        return find_output_format(self.tokenizer, config.tool_call_parser, config.reasoning_parser)


FRONTEND = web.AppKey("frontend", Frontend)
