"""Settings of ``kvbaton up``, and the command lines of the processes that it starts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from kvbaton.config import Count, Seconds, check_positive, flag, flag_of, words_of
from kvbaton.engine.config import ENCODER_SETTINGS, EngineConfig
from kvbaton.errors import ConfigError
from kvbaton.router.config import RoutingPolicy
from kvbaton.server.config import ModelEndpointConfig

NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(ModelEndpointConfig):
    """All settings of ``kvbaton up``.

    Only the router listens on `host`; nodes listen on loopback, or on the address that Ray knows
    of their machine.

    Attributes:
        num_any: Number of nodes that prefill and decode. None is 2 if `num_prefill` and
            `num_decode` are 0, else 0.
        num_prefill: Number of nodes that only prefill.
        num_decode: Number of nodes that only decode.
        num_encode: Number of encoder nodes.
        ray: Address of the Ray cluster on whose machines the nodes run, as for `ray.init`; None
            starts them on this machine.
        routing: How the router chooses nodes.
        start_timeout_s: Seconds within which all nodes must be ready.
        prompt: Prompt to answer once all is ready, before an exit; None serves until told to stop.
        chat: Message of a user to answer likewise, through the model's chat template.
        max_tokens: Maximum number of tokens of that answer.

    Raises:
        ConfigError: There would be no node, or both `prompt` and `chat` are given.
    """

    GROUP: ClassVar[str | None] = "cluster"

    num_any: Count | None = flag(
        None,
        "number of nodes that prefill and decode (2, without --prefill and --decode)",
        name="--any",
        metavar="N",
    )
    num_prefill: Count = flag(0, "number of prefill nodes", name="--prefill", metavar="N")
    num_decode: Count = flag(0, "number of decode nodes", name="--decode", metavar="N")
    num_encode: Count = flag(0, "number of encoder nodes", name="--encode", metavar="N")
    ray: str | None = flag(
        None,
        "start the nodes on the machines of a Ray cluster (auto: $RAY_ADDRESS, or the one that "
        "runs here; local: a new one on this machine)",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
    )
    prompt: str | None = flag(
        None, "answer this one prompt when all is ready, and exit", metavar="TEXT"
    )
    chat: str | None = flag(
        None, "answer this one chat message when all is ready, and exit", metavar="TEXT"
    )
    max_tokens: int = flag(64, "most tokens of the answer to --prompt or --chat", metavar="N")
    start_timeout_s: Seconds = flag(
        600.0,
        "give up if not all nodes are ready after this many seconds (600)",
        name="--start-timeout",
        metavar="S",
    )
    routing: RoutingPolicy = field(default_factory=RoutingPolicy)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None and self.chat is not None:
            raise ConfigError("--chat", "give either this or --prompt")
        check_positive("--max-tokens", self.max_tokens)
        if not self.any_nodes + self.num_prefill + self.num_decode:
            raise ConfigError("--any", "give 1 or more, or --prefill and --decode")

    @property
    def any_nodes(self) -> int:
        """Number of nodes that prefill and decode."""
        if self.num_any is None:
            return 0 if self.num_prefill + self.num_decode else 2
        return self.num_any

    @property
    def node_names(self) -> list[tuple[str, str]]:
        """(role, name) of each node."""
        counts = {
            "any": self.any_nodes,
            "prefill": self.num_prefill,
            "decode": self.num_decode,
            "encode": self.num_encode,
        }
        return [(role, f"{role}-{i}") for role, count in counts.items() for i in range(count)]

    @property
    def num_pairs(self) -> tuple[int, int]:
        """Pairs of nodes that can hand over once all are ready: (prompts, encoder outputs)."""
        both = self.any_nodes
        sources, targets = both + self.num_prefill, both + self.num_decode
        return sources * targets - both, self.num_encode * (sources + targets - both)

    def router_words(self, fd: int) -> list[str]:
        """Command line of the router, which serves on an inherited socket."""
        return [
            "router",
            f"--fd={fd}",
            f"--model={self.engine.model}",
            *words_of(self, ("served_model_name", "allowed_origins")),
            *words_of(self.routing),
            *words_of(self.tls),
            *self._text_words(),
        ]

    def node_words(
        self, role: str, name: str, router_url: str, sharing: Sequence[str]
    ) -> list[str]:
        """Command line of a node, which takes free ports and registers itself."""
        encodes = role == "encode"
        command = "serve" if role == "any" else role
        engine = words_of(self.engine, ENCODER_SETTINGS if encodes else None)
        known = [flag_of(name) for name in ENCODER_SETTINGS]
        return [
            command,
            *engine,
            *(word for word in sharing if not encodes or word.partition("=")[0] in known),
            "--port=0",
            f"--router={router_url}",
            f"--node-id={name}",
            *words_of(self, ("served_model_name",)),
            f"--transport={self.transport}",
            *words_of(self.tls, ("ssl_ca_certs",)),
            *(self._common_words() if encodes else self._text_words()),
        ]

    def _text_words(self) -> list[str]:
        names = (
            "chat_template", "tool_call_parser", "reasoning_parser", "generation_config",
            "otlp_traces_endpoint", "min_priority",
        )  # fmt: skip
        return [*self._common_words(), *words_of(self, names), *words_of(self.media)]

    def _common_words(self) -> list[str]:
        return [
            f"--log-level={self.log_level}",
            *words_of(self, ("shutdown_timeout_s", "timeout_keep_alive_s")),
        ]

    def node_env(self, name: str) -> dict[str, str]:
        """Environment of a node: the secrets, and its name for store options (``{env:...}``)."""
        return {**self.secrets(), "KVBATON_NODE_ID": name}

    def secrets(self) -> dict[str, str]:
        """Environment of every process: command lines can be read by other users."""
        return {
            "KVBATON_API_KEY": " ".join(self.api_keys),
            "KVBATON_OPERATOR_KEY": " ".join(self.operator_keys),
            "KVBATON_CLUSTER_KEY": self.cluster_key or "",
        }


def shares(
    engine: EngineConfig, num_nodes: int, gpus: Sequence[str], cores: int
) -> list[tuple[list[str], dict[str, str]]]:
    """Divide GPUs or cores among the nodes, where the user's flags leave that open.

    Args:
        engine: Settings of every node.
        num_nodes: Number of nodes.
        gpus: GPUs to use, named as in ``CUDA_VISIBLE_DEVICES``.
        cores: Number of cores to use.

    Returns:
        For each node, flags and environment variables to add.
    """
    ranks = engine.tensor_parallel_size
    if engine.device == "cpu" or (engine.device == "auto" and not gpus):
        chosen = engine.num_threads is not None or bool(os.environ.get("OMP_NUM_THREADS"))
        threads = f"--num-threads={max(1, cores // (num_nodes * ranks))}"
        return [([] if chosen else [threads], {})] * num_nodes
    if len(gpus) < ranks:
        return [([], {})] * num_nodes  # the engine says what is wrong
    per_gpu = -(-num_nodes * ranks // len(gpus))
    chosen = engine.gpu_memory_utilization != EngineConfig.gpu_memory_utilization
    fraction = f"--gpu-memory-utilization={engine.gpu_memory_utilization / per_gpu:.4f}"
    flags = [] if chosen or per_gpu == 1 else [fraction]
    turns = itertools.cycle(gpus)
    taken = (",".join(itertools.islice(turns, ranks)) for _ in range(num_nodes))
    return [(flags, {"CUDA_VISIBLE_DEVICES": names}) for names in taken]


def visible_gpus() -> list[str]:
    """GPUs of this machine that this process may use, found without loading CUDA."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    if not NVIDIA_GPUS.is_dir():
        return []
    return [str(index) for index, _ in enumerate(NVIDIA_GPUS.iterdir())]
