"""Calls a connector as vLLM's scheduler and single worker do, for blocks of a store's objects.

To the connector, each *block* is a prompt of one full block and two more tokens: vLLM always
computes a prompt's last token itself, so connectors leave it out, some of them twice. Calls are
made in the order of a step: scheduler side, metadata, worker side, and back. A block is saved by a
step in which its prompt is computed and finishes, and loaded by a step in which it is found.
"""

from __future__ import annotations

import importlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvbaton.connectors.stores.chunks import tokens_of
from kvbaton.connectors.vllm_adapter.names import provide_names
from kvbaton.errors import ConfigError, StoreError

LAYER = "model.layers.0.self_attn.attn"
"""Name of the only layer."""
_ITEM_BYTES = 2
"""Bytes of a bfloat16: connectors see all data as that type."""
_SPARE = 1
"""Block id of every prompt's last tokens, which are not saved; 0 is vLLM's null block."""
_FIRST = 2
"""First block id for data."""
_POLL_S = 0.002
"""Seconds between steps while waiting for the connector."""

Fill = Callable[[int, list[memoryview]], None]
"""Called with a block's index in the call and its memory, to write or read it."""


class VllmObject(SimpleNamespace):
    """Argument of a connector: has the attributes of vLLM's class `title` that connectors use."""

    def __init__(self, title: str, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.__dict__["_title"] = title

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        title = self.__dict__.get("_title", "this")
        raise AttributeError(f"{title}.{name} is not there for connectors under kvbaton")


@dataclass(kw_only=True, eq=False)
class ConnectorDriver:
    """Both sides of one connector; for one caller at a time.

    Attributes:
        path: ``package.module:Class`` of the connector.
        extra_config: Its ``kv_connector_extra_config``.
        block_bytes: Bytes of a block; a multiple of 4 times `block_tokens`.
        block_tokens: Tokens of a block; a multiple of 16.
        num_blocks: Number of blocks that can be moved at the same time.
        planes: Whether keys and values are separate, ``[2, block, token, head, feature]``, or
            adjacent, ``[block, head, token, feature]``, as in vLLM today.
        timeout_s: Maximum seconds for which the connector may answer "not yet", or load or save
            asynchronously.
    """

    path: str
    extra_config: Mapping[str, Any]
    block_bytes: int
    block_tokens: int
    num_blocks: int
    planes: bool
    timeout_s: float

    def __post_init__(self) -> None:
        self._pool_blocks = self.num_blocks + _FIRST
        self._features = self.block_bytes // (2 * _ITEM_BYTES * self.block_tokens)
        self._numbers = itertools.count()
        self._free: list[int] = []
        self._late: dict[str, Any] = {}
        """Requests whose blocks the connector still accesses, until `get_finished` names them."""
        self._ended: set[str] = set()
        """Finished requests that are not reported to the worker side yet."""
        self._sides: list[Any] = []

    def open(self) -> None:
        """Create both sides, and check what a store needs.

        Raises:
            ConfigError: The connector can't be used; the message names the method or feature.
        """
        self._torch: Any = importlib.import_module("torch")  # here, as listing stores needs none
        base = self._base()
        kind = self._class(base)
        config = self._config()
        layout = kind.get_required_kvcache_layout(config)
        if layout not in (None, "NHD", "HND", "LBNHC", "LBHNC"):
            raise self.refusal(f"get_required_kvcache_layout asks for {layout!r}")
        memory = np.zeros(self._pool_blocks * self.block_bytes, np.uint8)
        self._memory = memory.data
        shape = (
            (2, self._pool_blocks, self.block_tokens, 1, self._features)
            if self.planes
            else (self._pool_blocks, 1, self.block_tokens, 2 * self._features)
        )
        self._cache = self._torch.from_numpy(memory).view(self._torch.bfloat16).view(shape)
        caches = self._caches()
        for role in (base.KVConnectorRole.SCHEDULER, base.KVConnectorRole.WORKER):
            self._sides.append(kind(config, role, caches))
        self._scheduler, self._worker = self._sides
        self._hma = base.supports_hma(self._worker)
        if getattr(self._worker, "prefer_cross_layer_blocks", False):
            raise self.refusal("prefer_cross_layer_blocks: there is one tensor for each layer")
        self._worker.register_kv_caches({LAYER: self._cache})
        if self._worker.get_handshake_metadata() is not None:
            raise self.refusal(
                "get_handshake_metadata: it moves blocks between engines that live, and keeps none"
            )
        self._free = list(range(_FIRST, self._pool_blocks))

    def close(self) -> None:
        """Shut both sides down."""
        sides, self._sides = self._sides, []
        with ExitStack() as ending:  # the worker first; the other side even if it raises
            for side in sides:
                ending.callback(side.shutdown)

    def found(self, names: Sequence[bytes]) -> list[bool]:
        """Per block, whether the connector would load it.

        Args:
            names: Names of the blocks, 32 bytes each.
        """
        requests = [self._request(name) for name in names]
        try:
            return [self._matched(request)[0] for request in requests]
        finally:
            self._end(requests)

    def load(self, names: Sequence[bytes], read: Fill) -> list[bool]:
        """Load blocks, and call `read` for those that are there; returns which ones are."""
        answers = [False] * len(names)
        for part in self._rounds(len(names)):
            requests = [self._request(name) for name in names[part]]
            try:
                self._load(requests)
                for number, request in enumerate(requests, part.start):
                    if request.loaded:
                        read(number, self._memory_of(request))
                        answers[number] = True
            finally:
                self._end(requests)
        return answers

    def store(self, names: Sequence[bytes], write: Fill) -> None:
        """Save blocks that are not there yet; `found` tells which are there afterwards."""
        for part in self._rounds(len(names)):
            requests = [self._request(name) for name in names[part]]
            try:
                for request in requests:
                    self._matched(request)
                for number, request in enumerate(requests, part.start):
                    self._allocate(request, 0)
                    write(number, self._memory_of(request))
                self._step(requests)
            finally:
                self._end(requests)
            self._until_named(requests, "save")

    def wipe(self) -> None:
        """Zero the blocks' memory."""
        self._cache.zero_()

    def _load(self, requests: Sequence[Any]) -> None:
        """Load the blocks of new requests that are there, and mark these requests as loaded."""
        there = [(request, *self._matched(request)) for request in requests]
        # Allocate all before the next step, which loads what is allocated.
        for request, found, asynchronous in there:
            if found and asynchronous:
                self._late[request.request_id] = request
            elif found:
                request.num_computed_tokens = self.block_tokens
            if found:
                self._allocate(request, self.block_tokens)
        bad = self._step([request for request in requests if request.num_computed_tokens])
        bad |= self._until_named(requests, "load")
        for request, found, _ in there:
            request.loaded = found and not bad.intersection(request.blocks)
            request.num_computed_tokens = self.block_tokens if request.loaded else 0

    def _rounds(self, count: int) -> Iterator[slice]:
        """Cut a call into slices of as many blocks as are free."""
        start = 0
        while start < count:
            self._until(lambda: bool(self._free), "get_finished gives no block back")
            end = min(start + len(self._free), count)
            yield slice(start, end)
            start = end

    # --- the scheduler's side ---

    def _request(self, name: bytes) -> Any:
        tokens = [*tokens_of(name, self.block_tokens), 0, 0]
        return VllmObject(
            "Request",
            request_id=f"kvbaton-{next(self._numbers)}",
            prompt_token_ids=tokens,
            all_token_ids=tokens,
            num_tokens=len(tokens),
            num_prompt_tokens=len(tokens),
            num_computed_tokens=0,
            num_output_tokens=0,
            output_token_ids=[],
            num_preemptions=0,
            block_hashes=[name],
            blocks=[],
            mm_features=[],
            prompt_embeds=None,
            sampling_params=None,
            pooling_params=None,
            lora_request=None,
            cache_salt=None,
            kv_transfer_params=None,
            skip_reading_prefix_cache=False,
            priority=0,
            arrival_time=time.time(),
            status=self._status.WAITING,
            loaded=False,
            over=False,
        )

    def _new(self, request: Any) -> Any:
        return VllmObject(
            "NewRequestData",
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            prefill_token_ids=request.prompt_token_ids,
            block_ids=([*request.blocks, _SPARE],),
            num_computed_tokens=request.num_computed_tokens,
            mm_features=[],
            sampling_params=None,
            pooling_params=None,
            lora_request=None,
            prompt_embeds=None,
        )

    def _matched(self, request: Any) -> tuple[bool, bool]:
        """Whether the block of a request is there, and whether it is loaded asynchronously."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            count, asynchronous = self._scheduler.get_num_new_matched_tokens(request, 0)
            if count is not None:
                return count == self.block_tokens, asynchronous
            if time.monotonic() > deadline:
                raise StoreError(f"get_num_new_matched_tokens says None for {self.timeout_s:g} s")
            self._step([])
            time.sleep(_POLL_S)

    def _allocate(self, request: Any, num_external: int) -> None:
        request.blocks = [self._free.pop()]
        request.status = self._status.RUNNING
        ids = [*request.blocks, _SPARE]
        blocks = VllmObject(
            "KVCacheBlocks",
            get_block_ids=lambda allow_none=False: (ids,),
            get_unhashed_block_ids=lambda: ids,
            blocks=(tuple(VllmObject("KVCacheBlock", block_id=i, is_null=False) for i in ids),),
        )
        self._scheduler.update_state_after_alloc(request, blocks, num_external)

    def _end(self, requests: Sequence[Any]) -> None:
        """Finish requests; their blocks become free, unless the connector still needs them."""
        errors = list[Exception]()
        for request in requests:
            try:
                if self._finished(request):
                    self._late[request.request_id] = request
            except Exception as error:
                errors.append(error)
            request.over = True
            self._ended.add(request.request_id)
            if request.request_id not in self._late:
                self._free += request.blocks
        if errors:
            raise errors[0]
        if requests:
            self._step([])

    def _finished(self, request: Any) -> bool:
        """Report a finished request; returns whether the connector still needs its block."""
        ids = [*request.blocks, _SPARE] if request.blocks else []
        request.status = self._status.FINISHED_LENGTH_CAPPED
        kept, params = (
            self._scheduler.request_finished_all_groups(request, (ids,))
            if self._hma
            else self._scheduler.request_finished(request, ids)
        )
        if params is not None:
            raise self.refusal("request_finished: it hands blocks to another engine")
        return bool(kept)

    # --- a step ---

    def _step(self, requests: Sequence[Any]) -> set[int]:
        """Run a step with these new requests; returns the blocks whose loads failed."""
        output, self._ended = self._scheduled(requests), set()
        metadata = self._scheduler.build_connector_meta(output)
        output.kv_connector_metadata = metadata
        worker = self._worker
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        attention = {LAYER: VllmObject("AttentionMetadata")}
        context = VllmObject(
            "ForwardContext",
            attn_metadata=attention,
            no_compile_layers={LAYER: VllmObject("Attention", kv_cache=self._cache)},
            virtual_engine=0,
        )
        try:
            worker.start_load_kv(context)
            worker.wait_for_layer_load(LAYER)
            worker.save_kv_layer(LAYER, self._cache, attention[LAYER])
            worker.wait_for_save()
            sent, received = worker.get_finished(output.finished_req_ids)
            bad = set(worker.get_block_ids_with_load_errors())
            told = worker.build_connector_worker_meta()
        finally:
            worker.clear_connector_metadata()
        self._scheduler.update_connector_output(
            VllmObject(
                "KVConnectorOutput",
                finished_sending=sent,
                finished_recving=received,
                invalid_block_ids=bad,
                kv_connector_worker_meta=told,
                kv_connector_stats=None,
                kv_cache_events=None,
                expected_finished_count=0,
            )
        )
        for name in {*(sent or ()), *(received or ())} & self._late.keys():
            request = self._late.pop(name)
            if request.over:
                self._free += request.blocks
        return bad

    def _scheduled(self, requests: Sequence[Any]) -> Any:
        """A `SchedulerOutput` with only these new requests, as far as connectors read it."""
        scheduled = {one.request_id: one.num_tokens - one.num_computed_tokens for one in requests}
        return VllmObject(
            "SchedulerOutput",
            scheduled_new_reqs=[self._new(request) for request in requests],
            scheduled_cached_reqs=VllmObject(
                "CachedRequestData",
                req_ids=[],
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[],
                num_computed_tokens=[],
                num_output_tokens=[],
                num_reqs=0,
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0],
            finished_req_ids=self._ended,
            free_encoder_mm_hashes=[],
            preempted_req_ids=set(),
            kv_connector_metadata=None,
        )

    def _until_named(self, requests: Sequence[Any], what: str) -> set[int]:
        """Run steps until the connector has named all asynchronous ones of these requests."""
        names = {request.request_id for request in requests}
        return self._until(
            lambda: not names & self._late.keys(), f"get_finished names no {what} that has ended"
        )

    def _until(self, done: Callable[[], bool], why: str) -> set[int]:
        """Run steps until `done`; returns the blocks whose loads failed meanwhile."""
        deadline, bad = time.monotonic() + self.timeout_s, set[int]()
        while not done():
            if time.monotonic() > deadline:
                raise StoreError(f"{why} for {self.timeout_s:g} s")
            time.sleep(_POLL_S)
            bad |= self._step([])
        return bad

    # --- arguments of the connector ---

    def _memory_of(self, request: Any) -> list[memoryview]:
        """The memory of a request's block."""
        [number] = request.blocks
        size = self.block_bytes // 2 if self.planes else self.block_bytes
        starts = (number, number + self._pool_blocks) if self.planes else (number,)
        return [self._memory[start * size : (start + 1) * size] for start in starts]

    def refusal(self, why: str) -> ConfigError:
        """The error that the connector can't be used; to be raised by the caller."""
        return ConfigError("connector", f"{self.path} can't be a store: {why}")

    def _base(self) -> Any:
        """The module of the base class: vLLM's own, or the stand-in in `names`."""
        provide_names()
        try:
            base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
            self._status = importlib.import_module("vllm.v1.request").RequestStatus
        except ImportError as error:
            raise ConfigError(
                "connector", f"the vllm that is installed can't be used: {error}"
            ) from error
        return base

    def _class(self, base: Any) -> Any:
        try:
            kind = resolve_name(self.path)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError("connector", f"can't load {self.path}: {error}") from error
        if not (isinstance(kind, type) and issubclass(kind, base.KVConnectorBase_V1)):
            raise self.refusal("it is no class over vLLM's KVConnectorBase_V1")
        if missing := sorted(getattr(kind, "__abstractmethods__", ())):
            raise self.refusal(f"it lacks {', '.join(missing)}")
        return kind

    def _config(self) -> Any:
        """A `VllmConfig` of one layer, one head and one rank, as far as connectors read it."""
        engine = f"kvbaton-{uuid.uuid4()}"
        return VllmObject(
            "VllmConfig",
            instance_id=engine,
            kv_transfer_config=self._transfer_config(engine),
            cache_config=VllmObject(
                "CacheConfig",
                block_size=self.block_tokens,
                cache_dtype="auto",
                num_gpu_blocks=self._pool_blocks,
                enable_prefix_caching=True,
            ),
            model_config=VllmObject(
                "ModelConfig",
                model=f"kvbaton-{self.block_bytes}",
                served_model_name=f"kvbaton-{self.block_bytes}",
                dtype=self._torch.bfloat16,
                max_model_len=self.block_tokens + 2,
                use_mla=False,
                hf_config=VllmObject("hf_config"),
                get_num_layers=lambda parallel: 1,
                get_num_kv_heads=lambda parallel: 1,
                get_total_num_kv_heads=lambda: 1,
                get_head_size=lambda: self._features,
            ),
            parallel_config=VllmObject(
                "ParallelConfig",
                rank=0,
                world_size=1,
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                data_parallel_rank=0,
                data_parallel_rank_local=0,
                distributed_executor_backend=None,
            ),
            scheduler_config=VllmObject(
                "SchedulerConfig",
                max_num_batched_tokens=self._pool_blocks * (self.block_tokens + 2),
                max_num_seqs=self._pool_blocks,
                disable_hybrid_kv_cache_manager=True,
            ),
            device_config=VllmObject(
                "DeviceConfig", device=self._torch.device("cpu"), device_type="cpu"
            ),
            speculative_config=None,
            lora_config=None,
            kv_events_config=None,
            additional_config={},
        )

    def _transfer_config(self, engine: str) -> Any:
        """A `KVTransferConfig`, as far as connectors read it."""
        extra = dict(self.extra_config)
        return VllmObject(
            "KVTransferConfig",
            kv_connector=self.path,
            kv_connector_module_path=None,
            kv_connector_extra_config=extra,
            get_from_extra_config=extra.get,
            engine_id=engine,
            kv_role="kv_both",
            kv_rank=None,
            kv_parallel_size=1,
            kv_ip="127.0.0.1",
            kv_port=14579,
            kv_buffer_device="cpu",
            kv_buffer_size=1e9,
            kv_load_failure_policy="recompute",
            is_kv_transfer_instance=True,
            is_kv_producer=True,
            is_kv_consumer=True,
        )

    def _caches(self) -> Any:
        """A `KVCacheConfig`, as far as connectors read it."""
        spec = VllmObject(
            "KVCacheSpec",
            block_size=self.block_tokens,
            page_size_bytes=self.block_bytes,
            num_kv_heads=1,
            head_size=self._features,
            dtype=self._torch.bfloat16,
        )
        group = VllmObject("KVCacheGroupSpec", layer_names=[LAYER], kv_cache_spec=spec)
        size = self._pool_blocks * self.block_bytes
        return VllmObject(
            "KVCacheConfig",
            num_blocks=self._pool_blocks,
            kv_cache_tensors=[VllmObject("KVCacheTensor", size=size, shared_by=[LAYER])],
            kv_cache_groups=[group],
        )
