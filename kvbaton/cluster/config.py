"""Settings of a cluster that one command starts, and what its processes are started with."""

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
    """All that ``kvbaton up`` needs to know.

    Only the router listens at `host`; nodes listen on loopback, or where Ray knows their machines.

    Attributes:
        num_any: nodes that prefill and generate; 2 if no others that do are wanted.
        num_prefill: nodes that prefill only.
        num_decode: nodes that generate only.
        num_encode: encoder nodes.
        ray: address of the Ray cluster whose machines take the nodes, as `ray.init` knows it; None
            starts them on this machine.
        routing: which work is given to other nodes.
        start_timeout_s: until all nodes must be ready.
        prompt: to be answered once all is ready; None serves until told to stop.
        chat: the same of a chat, by the model's template.
        max_tokens: of that answer.

    Raises:
        ConfigError: there would be no node.
    """

    GROUP: ClassVar[str | None] = "cluster"

    num_any: Count | None = flag(
        None,
        "nodes that prefill and generate (2, unless others are wanted)",
        name="--any",
        metavar="N",
    )
    num_prefill: Count = flag(0, "nodes that prefill only", name="--prefill", metavar="N")
    num_decode: Count = flag(0, "nodes that generate only", name="--decode", metavar="N")
    num_encode: Count = flag(0, "encoder nodes", name="--encode", metavar="N")
    ray: str | None = flag(
        None,
        "place the nodes on the machines of a Ray cluster (auto: $RAY_ADDRESS, or the one that "
        "runs here; local: a new one on this machine)",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
    )
    prompt: str | None = flag(
        None, "answer this one prompt when all is ready, and exit", metavar="TEXT"
    )
    chat: str | None = flag(
        None, "answer this one message of a chat when all is ready, and exit", metavar="TEXT"
    )
    max_tokens: int = flag(64, "of that answer", metavar="N")
    start_timeout_s: Seconds = flag(
        600.0,
        "give up when not all is ready after so many seconds (600)",
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
        """Nodes that prefill and generate."""
        if self.num_any is None:
            return 0 if self.num_prefill + self.num_decode else 2
        return self.num_any

    @property
    def stop_timeout_s(self) -> float:
        """For each process to stop after it was asked to."""
        return self.shutdown_timeout_s + 5.0

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
        """Pairs that can hand over when all are ready: prompts, and encoder outputs."""
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
        """For a node's environment, where options of its store find its name (``{env:...}``)."""
        return {**self.secrets(), "KVBATON_NODE_ID": name}

    def secrets(self) -> dict[str, str]:
        """For every process's environment: a command line can be read by anyone."""
        return {
            "KVBATON_API_KEY": " ".join(self.api_keys),
            "KVBATON_OPERATOR_KEY": " ".join(self.operator_keys),
            "KVBATON_CLUSTER_KEY": self.cluster_key or "",
        }


def shares(
    engine: EngineConfig, num_nodes: int, gpus: Sequence[str], cores: int
) -> list[tuple[list[str], dict[str, str]]]:
    """Divide the machine among the nodes, as far as the user did not do so.

    Args:
        engine: settings of every node.
        num_nodes: how many.
        gpus: as ``CUDA_VISIBLE_DEVICES`` names them.
        cores: that we may use.

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
    """GPUs of this machine that we may use, found without loading CUDA."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    if not NVIDIA_GPUS.is_dir():
        return []
    return [str(index) for index, _ in enumerate(NVIDIA_GPUS.iterdir())]
