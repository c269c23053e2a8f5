"""Builds an engine from its settings: model, ranks, scheduler, connectors, core."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Protocol

import msgspec
import numpy.ma  # noqa: F401 - `np.unique` would, for up to 60 ms of the first hand-over
import torch

from kvbaton.connectors.keys import IdentityRecord, dummy_model_digest, model_digest, root_key
from kvbaton.connectors.layout import GroupKind, KVLayout
from kvbaton.connectors.objects import ObjectForm
from kvbaton.connectors.registry import load_store
from kvbaton.engine.block_feed import BlockFeed
from kvbaton.engine.config import (
    MIXED_TOKENS,
    EngineConfig,
    KVEventsConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from kvbaton.engine.core import EngineCore, Mailbox
from kvbaton.engine.encoder.cache_manager import Answers, EncoderCacheManager
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.encoder.worker import encoder_executor, largest_item
from kvbaton.engine.executor import Executor
from kvbaton.engine.frontends import FrontendServer
from kvbaton.engine.grammars import Grammars
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.kv_connector import KVConnector
from kvbaton.engine.kv_events import KVEventPublisher
from kvbaton.engine.kv_groups import least_block_size
from kvbaton.engine.loader import load_kv_scales
from kvbaton.engine.model_config import ModelConfig, load_model_config, resolve_max_model_len
from kvbaton.engine.profiler import TorchProfiler
from kvbaton.engine.scheduler import Scheduler
from kvbaton.engine.store_calls import StoreCalls
from kvbaton.engine.store_connector import StoreConnector
from kvbaton.engine.store_worker import StoreWorker
from kvbaton.engine.worker import choose_device, cpu_executor
from kvbaton.errors import ConfigError
from kvbaton.image_file import processor_settings
from kvbaton.messages.engine import Ready
from kvbaton.types import NodeId, PromptLimits

log = logging.getLogger(__name__)

BLOCK_GRANULE = 16
"""Granularity of block sizes that the model determines."""


@dataclass(frozen=True)
class ConnectorContext:
    """What a connector may need of the engine besides executor and scheduler.

    Attributes:
        config: Settings of the engine.
        node: Identity of this run of the node.
        identity: Digest of the identity record, 32 bytes.
        record: The identity record, readable.
    """

    config: EngineConfig
    node: NodeId
    identity: bytes
    record: dict[str, str]


MakeConnectors = Callable[[Executor, Scheduler], Sequence[KVConnector]]
"""Makes connectors, and starts what they need."""


class ConnectorFactory(Protocol):
    """Makes connectors in the core's process; is pickled from parent to child."""

    @property
    def sends_blocks(self) -> bool:
        """Whether this node hands blocks over, so that their digests must be kept."""

    @property
    def items(self) -> ConnectorFactory:
        """The factory for an encoder beside a language model, which receives encoder outputs."""

    def __call__(self, surroundings: ConnectorContext) -> MakeConnectors:
        """Do what needs no engine, before the model is loaded."""


@dataclass(frozen=True)
class Engine:
    """An engine that is ready to run, and what its clients need to know of it."""

    core: EngineCore
    ready: Ready

    @classmethod
    def of(
        cls,
        core: EngineCore,
        context: ConnectorContext,
        encoder_identity: bytes,
        prompt_limits: PromptLimits | None = None,
    ) -> Engine:
        """Describe a core as an engine."""
        layout, limits = core.executor.layouts[0][0], core.scheduler.config
        ready = Ready(
            node=context.node,
            control_address=core.control_address,
            num_blocks=layout.num_blocks - 1,
            block_size=layout.block_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=limits.eos_token_ids,
            vocab_size=limits.vocab_size,
            tp_size=context.config.tensor_parallel_size,
            identity=context.identity,
            encoder_identity=encoder_identity,
            prompt_limits=prompt_limits,
        )
        return cls(core, ready)


def build_engine(
    config: EngineConfig, node: NodeId, factories: Sequence[ConnectorFactory], mailbox: Mailbox
) -> Engine:
    """Load the model, allocate the pool, and start the connectors.

    Args:
        config: Settings of the engine.
        node: Identity of this run of the node.
        factories: Make the connectors of hand-overs; store and KV events come from `config`.
        mailbox: Source of messages and destination of outputs.

    Raises:
        ConfigError: A setting or the model folder is wrong.
    """
    model = load_model_config(
        config.model, config.dtype, config.quantization, config.kv_cache_dtype
    )
    if config.encoder_only:
        return build_encoder(config, model, node, factories, mailbox)
    profiler = TorchProfiler(config.profile_dir, node.node)
    config = replace(config, block_size=enough_tokens(config.block_size, model))
    identity = identity_record(config, model)
    surroundings = ConnectorContext(config, node, identity.digest(), identity.record())
    answers = Answers()
    encoder = None if model.vision is None else beside(config, model, node, factories, answers)
    track_sums = config.store is not None or any(f.sends_blocks for f in factories)
    makers = open_connectors(factories, surroundings)
    executor = make_executor(config, model, track_sums=track_sums)
    try:
        scheduler = make_scheduler(config, model, executor.layouts[0], identity.digest())
        tried = executor.try_steps(scheduler.config)
        connectors = make_connectors(executor, scheduler, makers, surroundings)
    except BaseException:
        executor.close()
        raise
    scheduler.grammars = grammars = Grammars(
        model.folder, model.vocab_size, model.eos_token_ids, scheduler.unpark
    )
    connectors.append(grammars)
    roles = {connector.transfer_role: connector for connector in connectors}
    scheduler.both_sides = {"source", "target"} <= roles.keys()
    target = roles.get("target")
    limits = scheduler.prompt_limits(None if target is None else target.most_blocks)
    if target is None:
        limits = PromptLimits(limits.computed, lent=limits.lent)
    if isinstance(mailbox, FrontendServer):
        connectors.append(BlockFeed(scheduler.blocks, mailbox))
    if encoder is not None:
        (worker,) = encoder.executor.workers
        assert isinstance(worker.cache, EncoderPool)
        executor.attach_encoder(worker.cache)
        scheduler.items = items = EncoderCacheManager(encoder, answers, scheduler)
        connectors.append(items)
    # While a device computes one step, the next can be planned: two are in flight.
    depth = 2 if choose_device(config).type == "cuda" else 1
    core = EngineCore(
        executor, scheduler, mailbox, connectors=connectors, depth=depth, profiler=profiler
    )
    core.step_costs.start(tried)
    of_items = b"" if encoder is None else encoder_identity(config, model).digest()
    return Engine.of(core, surroundings, of_items, limits)


def beside(
    config: EngineConfig,
    model: ModelConfig,
    node: NodeId,
    factories: Sequence[ConnectorFactory],
    answers: Answers,
) -> EngineCore:
    """The encoder's core beside a language model, which asks it instead of frontends.

    Raises:
        ConfigError: A setting or the model folder is wrong.
    """
    alone = replace(config, kv_events_config=None, tensor_parallel_size=1)
    name = NodeId(f"{node.node}-items", node.generation)
    receivers = [factory.items for factory in factories][:1]  # one receives for all
    return build_encoder(alone, model, name, receivers, answers).core


def build_encoder(
    config: EngineConfig,
    model: ModelConfig,
    node: NodeId,
    factories: Sequence[ConnectorFactory],
    mailbox: Mailbox,
) -> Engine:
    """Do as `build_engine`, for an encoder: its prompts are items, its blocks their outputs.

    Raises:
        ConfigError: A setting or the model folder is wrong.
    """
    if config.tensor_parallel_size != 1:
        raise ConfigError("--tensor-parallel-size", "an encoder has one rank")
    profiler = TorchProfiler(config.profile_dir, node.node)
    identity = encoder_identity(config, model)
    surroundings = ConnectorContext(config, node, identity.digest(), identity.record())
    makers = open_connectors(factories, surroundings)
    executor = encoder_executor(config, model)
    (layout,) = executor.layouts[0]
    scheduler = Scheduler(
        SchedulerConfig(
            groups=(GroupSpec(layout.block_size, layout.num_blocks, layout.kind),),
            max_model_len=(layout.num_blocks - 1) * layout.block_size + 1,
            vocab_size=1,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_encoder_tokens,
            kv_load_failure_policy=config.kv_load_failure_policy,
            debug_forbid_prompt_compute=config.debug_forbid_prompt_compute,
            whole_prompts=True,
        ),
        root_key=partial(root_key, surroundings.identity),
    )
    connectors = make_connectors(executor, scheduler, makers, surroundings)
    core = EngineCore(executor, scheduler, mailbox, connectors=connectors, profiler=profiler)
    return Engine.of(core, surroundings, surroundings.identity)


def enough_tokens(block_size: int, model: ModelConfig) -> int:
    """Block size with room for the model's states: the one asked for, or as much as vLLM takes."""
    least = least_block_size(model.kv_groups(), model.kv_dtype)
    if block_size >= least:
        return block_size
    enough = -(-least // BLOCK_GRANULE) * BLOCK_GRANULE
    log.info("--block-size %d raised to %d: a block holds a state", block_size, enough)
    return enough


def open_connectors(
    factories: Sequence[ConnectorFactory], surroundings: ConnectorContext
) -> list[MakeConnectors]:
    """Prepare connectors as far as possible before the model is loaded, which may take minutes.

    UCX rewrites the first instructions of `mmap`, `cuMemAlloc` and others when the first NIXL agent
    is made. A thread that loads a model calls these all the time, and two starts of some 700 ended
    by a signal while one did; UCX's own test of that (``test_hooks``) crashes now and then, too.

    Returns:
        Makers of connectors, the store's first.

    Raises:
        ConfigError: A setting is wrong.
    """
    config, makers = surroundings.config, list[MakeConnectors]()
    if config.store is not None:
        makers.append(partial(open_store, config, make_store(config), surroundings.identity))
    if (device := choose_device(config)).type == "cuda":
        torch.cuda.set_device(device)  # UCX looks for GPUs by the thread's context
    return [*makers, *(factory(surroundings) for factory in factories)]


def make_connectors(
    executor: Executor,
    scheduler: Scheduler,
    makers: Sequence[MakeConnectors],
    surroundings: ConnectorContext,
) -> list[KVConnector]:
    """Make the connectors that the settings want: the store, which is asked first, and the others.

    Raises:
        ConfigError: A setting is wrong, a store can't be opened, or an address is in use.
    """
    config, connectors = surroundings.config, list[KVConnector]()
    for make in makers:
        connectors += make(executor, scheduler)
    settings = KVEventsConfig.parse(config.kv_events_config)
    if settings.enabled:
        connectors.append(KVEventPublisher(settings, scheduler.blocks))
    return connectors


def make_executor(config: EngineConfig, model: ModelConfig, *, track_sums: bool) -> Executor:
    """The executor for the device that the settings choose.

    Raises:
        ConfigError: A setting, the model folder or the size of the pool is wrong.
    """
    if choose_device(config).type == "cuda":
        from kvbaton.engine.cuda.executor import cuda_executor

        return cuda_executor(config, model, track_sums=track_sums)
    return cpu_executor(config, model, track_sums=track_sums)


def make_store(config: EngineConfig) -> StoreCalls:
    """The store that the settings name, not open yet.

    Raises:
        ConfigError: It is unknown, or can't be built, or lacks what the settings want.
    """
    assert config.store is not None
    store = StoreCalls(load_store(config.store))
    if config.store_ttl is not None:
        if config.store_ttl <= 0:
            raise ConfigError("--store-ttl", f"must be more than 0, not {config.store_ttl:g}")
        if not store.capabilities.expires:
            raise ConfigError("--store-ttl", f"{store.name} can't let single objects expire")
    return store


def open_store(
    config: EngineConfig,
    store: StoreCalls,
    identity: bytes,
    executor: Executor,
    scheduler: Scheduler,
) -> list[KVConnector]:
    """Open a store, and make its connector.

    Raises:
        ConfigError: It can't be opened, or can't store what this model computes.
    """
    groups = range(len(executor.layouts[0]))
    forms = tuple(ObjectForm([rank[group] for rank in executor.layouts]) for group in groups)
    worker = StoreWorker(store, executor, forms, identity)
    worker.start()
    connector = StoreConnector(
        scheduler,
        worker,
        lookup_timeout_s=config.store_lookup_timeout,
        load_timeout_s=config.store_load_timeout,
        ttl_s=config.store_ttl,
    )
    return [connector]


def identity_record(config: EngineConfig, model: ModelConfig) -> IdentityRecord:
    """Everything that determines a token's KV on this engine.

    A field is empty if the engine has no such thing: there are no adapters or draft models yet, and
    a folder's revision is covered by the digest of its weights.
    """
    scales = load_kv_scales(model, config.load_format)
    kv_scales = hashlib.blake2b(msgspec.json.encode(scales), digest_size=32).hexdigest()
    if config.load_format == "dummy":
        weights = dummy_model_digest((model.folder / "config.json").read_bytes(), config.seed)
    else:
        weights = model_digest(model.folder)
    return IdentityRecord(
        weights=weights,
        revision="",
        rope=msgspec.json.encode(asdict(model.rope), order="deterministic").decode(),
        dtype="/".join(filter(None, (model.dtype, config.quantization))),
        kv_dtype=model.kv_dtype,
        kv_scales=kv_scales if scales else "",
        adapter="",
        encoder="" if model.vision is None else processor_digest(model),
        draft="",
    )


def encoder_identity(config: EngineConfig, model: ModelConfig) -> IdentityRecord:
    """Everything, besides the item, that determines its encoder output on this engine.

    Raises:
        ConfigError: The model has no encoder, or its folder is incomplete.
    """
    model.require_vision()
    return msgspec.structs.replace(
        identity_record(config, model),
        rope="",
        dtype=model.dtype,
        kv_dtype=model.dtype,
        kv_scales="",
    )


def processor_digest(model: ModelConfig) -> str:
    """Digest of the image processor's settings, independent of their formatting."""
    data = msgspec.json.encode(processor_settings(model.folder), order="deterministic")
    return hashlib.blake2b(data, digest_size=32, person=b"kvbaton-images").hexdigest()


def make_scheduler(
    config: EngineConfig, model: ModelConfig, layouts: Sequence[KVLayout], identity: bytes
) -> Scheduler:
    """Make a scheduler over pools with these layouts.

    Raises:
        ConfigError: `speculative_config` is wrong, or the model does not support it.
    """
    speculative = SpeculativeConfig.parse(config.speculative_config)
    if speculative and any(layout.kind is GroupKind.STATE for layout in layouts):
        raise ConfigError(
            "--speculative-config", "a state can't go back behind a rejected token; leave it out"
        )
    rows = 0
    if model.vision is not None and model.vision.bidirectional:
        rows = largest_item(model)
    mixed = MIXED_TOKENS
    if model.moe is not None:  # a step reads all experts, while a token uses few
        mixed = mixed * model.moe.num_experts // model.moe.top_k
    return Scheduler(
        SchedulerConfig(
            groups=tuple(GroupSpec.of(layout, config.block_size) for layout in layouts),
            max_model_len=resolve_max_model_len(config.max_model_len, model),
            vocab_size=model.vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_mixed_tokens=config.max_num_mixed_tokens or mixed,
            enable_prefix_caching=config.enable_prefix_caching,
            eos_token_ids=model.eos_token_ids,
            kv_load_failure_policy=config.kv_load_failure_policy,
            speculative=speculative,
            debug_forbid_prompt_compute=config.debug_forbid_prompt_compute,
            whole_items=rows,
        ),
        root_key=partial(root_key, identity),
    )
