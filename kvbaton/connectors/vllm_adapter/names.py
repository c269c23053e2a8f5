"""Stand-ins for the names of vLLM that a connector imports, if vLLM is not installed.

A connector needs vLLM's base class and the names of its arguments' classes. vLLM is large, and not
needed to run a connector here. If it is installed, nothing of this file is used. A name that is
missing here is an ImportError: the connector needs more of vLLM than the connector contract.
"""

from __future__ import annotations

import enum
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

VERSION = "0.32.0+kvbaton"
"""Version of vLLM whose connector contract this is."""


class _Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class _RequestStatus(enum.IntEnum):
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6


class _Message:
    """A message between the two sides of a connector; its content is opaque here."""


class _SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, Any]: ...


class _ConnectorBase(ABC):
    """vLLM's `KVConnectorBase_V1`: state that connectors read, and methods that do nothing.

    Methods that a connector must implement are abstract.
    """

    def __init__(self, vllm_config: Any, role: _Role, kv_cache_config: Any = None) -> None:
        self._connector_metadata: Any = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    @property
    def role(self) -> _Role:
        return self._role

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        return bool(self._kv_transfer_config.is_kv_producer)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None, "no metadata is bound"
        return self._connector_metadata

    def _nothing(self, *_: Any, **__: Any) -> None:  # noqa: B027
        """Default of most methods."""

    register_kv_caches = set_host_xfer_buffer_ops = handle_preemptions = _nothing
    finish_forward = reset_capture_state = get_handshake_metadata = shutdown = _nothing
    get_kv_connector_stats = get_kv_connector_kv_cache_events = _nothing
    build_connector_worker_meta = update_connector_output = on_new_request = _nothing
    set_xfer_handshake_metadata = get_finished_count = reset_cache = _nothing
    bind_kv_cache_manager = bind_gpu_block_pool = _nothing

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
        return False, None

    def take_events(self) -> tuple[Any, ...]:
        return ()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any
    ) -> None: ...  # fmt: skip
    @abstractmethod
    def wait_for_save(self) -> None: ...
    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Any, computed: int
    ) -> tuple[int | None, bool]: ...  # fmt: skip
    @abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None: ...
    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...


def _supports_hma(connector: Any) -> bool:
    kind = connector if isinstance(connector, type) else type(connector)
    return issubclass(kind, _SupportsHMA)


class _ProcessGroup:
    """A process group of one rank."""

    rank = rank_in_group = local_rank = 0
    world_size = 1
    ranks = (0,)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return value

    broadcast_object = broadcast


_BASE = "vllm.distributed.kv_transfer.kv_connector.v1"
_CONTRACT = {
    "KVConnectorBase_V1": _ConnectorBase,
    "KVConnectorRole": _Role,
    "KVConnectorMetadata": _Message,
    "KVConnectorWorkerMetadata": _Message,
    "KVConnectorHandshakeMetadata": _Message,
    "SupportsHMA": _SupportsHMA,
    "supports_hma": _supports_hma,
}


def _only_named(*names: str) -> dict[str, Any]:
    """Empty classes for names in annotations; connectors get `VllmObject`s instead."""
    return {name: type(name, (), {}) for name in names}


def _kv_cache_dtype(cache_dtype: Any, model_dtype: Any) -> Any:
    return model_dtype


_MODULES: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"__version__": VERSION},
    "vllm.version": {"__version__": VERSION},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.config": _only_named("VllmConfig", "KVTransferConfig", "ModelConfig", "CacheConfig"),
    _BASE: _CONTRACT,
    f"{_BASE}.base": _CONTRACT,
    "vllm.distributed.parallel_state": {
        **dict.fromkeys(("get_tp_group", "get_pp_group", "get_world_group"), _ProcessGroup),
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
    },
    "vllm.forward_context": _only_named("ForwardContext"),
    "vllm.sampling_params": _only_named("SamplingParams"),
    "vllm.utils.torch_utils": {"get_kv_cache_torch_dtype": _kv_cache_dtype},
    "vllm.v1.attention.backend": _only_named("AttentionMetadata"),
    "vllm.attention.backends.abstract": _only_named("AttentionMetadata"),
    "vllm.v1.core.kv_cache_manager": _only_named("KVCacheBlocks", "KVCacheManager"),
    "vllm.v1.core.sched.output": _only_named(
        "SchedulerOutput", "NewRequestData", "CachedRequestData"
    ),
    "vllm.v1.kv_cache_interface": _only_named("KVCacheConfig"),
    "vllm.v1.outputs": _only_named("KVConnectorOutput"),
    "vllm.v1.request": {**_only_named("Request"), "RequestStatus": _RequestStatus},
}


class _Names(MetaPathFinder, Loader):
    """Import hook that creates the modules of `_MODULES` and their packages."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        inside = any(name.startswith(f"{fullname}.") for name in _MODULES)
        if not inside and fullname not in _MODULES:
            return None
        return ModuleSpec(fullname, self, origin=__name__, is_package=inside)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_MODULES.get(module.__name__, {}))


def provide_names() -> None:
    """Make `vllm` importable if it is not installed."""
    if find_spec("vllm") is None:
        sys.meta_path.append(_Names())
