"""Shared by all handlers of an endpoint: the source of tokens, the tokenizer, settings, limits."""

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
from kvbaton.engine.validate import INT32, Range, check_range
from kvbaton.errors import ConfigError, RequestError
from kvbaton.messages import UNREADABLE
from kvbaton.messages.engine import PrefixAt, TransferSpec
from kvbaton.server.config import EndpointConfig, GenerationConfigMode, MediaConfig
from kvbaton.server.metrics import HttpMetrics
from kvbaton.server.tracing import Tracing, TracingConfig
from kvbaton.text.output_parser import OutputFormat, ReasoningParserName, ToolCallParserName
from kvbaton.text.parsers import find_output_format
from kvbaton.text.tokenizer import Tokenizer


class ModelFacts(Struct, frozen=True, kw_only=True):
    """Properties of the model that bound a request.

    Attributes:
        max_model_len: Maximum length of prompt plus output, in tokens.
        vocab_size: Number of token ids; all ids are below it.
    """

    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """Settings of the endpoint; command-line defaults are read from here.

    Attributes:
        model_name: Name of the model in requests and answers.
        aliases: Other names that clients may use.
        api_keys: Keys of clients, sent as ``Authorization: Bearer KEY``; empty leaves the endpoint
            open.
        operator_keys: Keys of operators; empty gives `api_keys` their rights.
        min_priority: Lowest priority that requests may have.
        allowed_origins: See `EndpointConfig`.
        operator_token: A further token with operators' rights; empty for none.
        timeout_s: Seconds after which a request without `timeout` is ended.
        deadline_grace_s: The source ends a request at its timeout; if it does not, the endpoint
            does so this many seconds later.
        max_body_bytes: Maximum length of a body; a longer one is a 413.
        max_bodies_bytes: Maximum length of all long bodies being read; further ones wait.
        body_timeout_s: Seconds for the first MiB of a body to arrive, and again for the rest.
        tool_call_parser: See `EndpointConfig`.
        reasoning_parser: See `EndpointConfig`.
        sampling_defaults: The model's defaults for fields that a request leaves out.
        media: Which images clients may send.
        traces: Where traces go; None for no traces.
    """

    model_name: str
    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    operator_keys: tuple[str, ...] = ()
    min_priority: int = -INT32
    allowed_origins: tuple[str, ...] = ()
    operator_token: str = field(default="", repr=False)
    timeout_s: float = 600.0
    deadline_grace_s: float = 10.0
    max_body_bytes: int = 32 << 20
    max_bodies_bytes: int = 512 << 20
    body_timeout_s: float = 60.0
    tool_call_parser: ToolCallParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    media: MediaConfig = field(default_factory=MediaConfig)
    traces: TracingConfig | None = None

    def check_priority(self, priority: int) -> None:
        """Raise `RequestError` for a priority below `min_priority`."""
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
        """Settings of an endpoint, from its flags and the model's folder.

        Args:
            config: The flags.
            folder: Folder of the model.
            name: Name of the model for clients.
            operator_token: See the attribute.
            role: Role of the node or router, for its traces.
            node: Id of the node, for its traces.

        Raises:
            ConfigError: The model's recommendations can't be read, or traces can't be made.
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
    """Fields of ``generation_config.json`` that become defaults, with the bounds of requests.

    The engine reads the end-of-text ids of that file (`engine.model_config`).
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=100)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    do_sample: bool | None = None


def sampling_defaults(folder: str | Path, mode: GenerationConfigMode = "auto") -> dict[str, Any]:
    """Sampling defaults of a model, by field of the API (`max_tokens` for ``max_new_tokens``).

    Args:
        folder: Folder of the model.
        mode: See `GenerationConfigMode`.

    Returns:
        The defaults. Empty without ``generation_config.json``, or if that file has ``"do_sample":
        false``, in which case its sampling parameters are not meant.

    Raises:
        ConfigError: The file can't be read, or recommends a value that no request may have.
    """
    path = Path(folder, "generation_config.json")
    if mode == "none" or not path.is_file():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Recommended, strict=False)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(str(path), f"{error}; or start with --generation-config=none") from error
    named = msgspec.to_builtins(found)
    if named.pop("do_sample", None) is False:
        return {}
    return {("max_tokens" if k == "max_new_tokens" else k): v for k, v in named.items()}


# --- what handlers share ---


TransferParser = Callable[[dict[str, Any] | None], tuple[TransferSpec | None, PrefixAt | None]]


def refuse_transfer(params: dict[str, Any] | None) -> tuple[None, None]:
    """Parser of ``kv_transfer_params`` for an endpoint that pairs nodes itself: it refuses them.

    Raises:
        RequestError: The client sent ``kv_transfer_params``.
    """
    if params:
        raise RequestError(
            "kv_transfer_params is for nodes; this endpoint pairs them itself",
            param="kv_transfer_params",
        )
    return None, None


@dataclass(frozen=True, kw_only=True)
class Frontend:
    """Objects that all handlers share.

    Attributes:
        source: Makes the tokens.
        tokenizer: Tokenizer of the model.
        config: Settings.
        facts: Returns the model's bounds for requests; raises `RequestError` (503) or
            `EngineDeadError` while nothing can be served.
        transfer: Parses ``kv_transfer_params`` into a role in a hand-over and a prefix to fetch.
        transfer_type: Type of ``kv_transfer_params`` for the API description; None if refused.
        metrics: Metrics of the endpoint.
        long_bodies: Bytes of long bodies that are being read, by tenant.
        body_ended: Set when one of these bodies has been read.
        created: Start time of this process in seconds since 1970, for answers that have it.
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
        _ = self.output_format  # so that an error in it is raised at the start

    @cached_property
    def tracing(self) -> Tracing | None:
        """Makes traces of requests; None for no traces."""
        return None if self.config.traces is None else Tracing(self.config.traces)

    @cached_property
    def output_format(self) -> OutputFormat | None:
        """How the model marks reasoning and calls; None if they are not parsed.

        Raises:
            ConfigError: The configured parsers do not suit the model.
        """
        config = self.config
        return find_output_format(self.tokenizer, config.tool_call_parser, config.reasoning_parser)


FRONTEND = web.AppKey("frontend", Frontend)
