"""Trial steps of made-up prompts before any request: to measure memory, compile and capture."""

from __future__ import annotations

import gc
import logging
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from kvbaton.engine.config import EngineConfig
from kvbaton.engine.cuda.graphs import DecodeGraphs
from kvbaton.engine.cuda.prompt_graphs import PADDED_TOKENS, PromptGraphs
from kvbaton.engine.cuda.runner import SHORT_CONTEXT, CudaRunner
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.models.llama import LlamaForCausalLM
from kvbaton.engine.step import WHOLE_TOKENS, ItemRows, NewSequence, SequenceStep, StepPlan
from kvbaton.engine.worker import WorkerSettings
from kvbaton.kernels.fused_moe import token_counts
from kvbaton.kernels.jit import cdiv
from kvbaton.kernels.prefill_attention import (
    MIN_QUERIES,
    PREFIX_GRANULE,
    plan_ahead,
    planning,
)
from kvbaton.messages.engine import Item, SamplingParams
from kvbaton.types import ENCODER_BLOCK_ROWS

log = logging.getLogger(__name__)

GREEDY = SamplingParams(temperature=0.0)

EVERYTHING = SamplingParams(
    temperature=1.0, top_p=0.9, top_k=50, repetition_penalty=1.1, logprobs=20,
    allowed_token_ids=(1,),
)  # fmt: skip

GRAPHS_AND_LIBRARIES = 2 << 30
"""Bytes reserved for CUDA graphs, attention plans, and what transports map."""

SMALL_BYTES, SMALL_BUFFERS = 1 << 20, 64
"""Largest allocation in bytes that torch makes in small segments, and how many to reserve."""

ATTENTION_BYTES = 20 << 20
"""Bytes for partial attention results of few queries over a long prefix, before they are merged.
The steps that need most memory elsewhere have none of these."""

SIDE_STREAM_BYTES = 32 << 20
"""Bytes for digests of a long prompt; an allocator's memory belongs to the stream that asked."""

PINNED_SIZES = [1 << power for power in range(2, 22)]
"""Sizes of pinned buffers in bytes: torch pins powers of two, from one number to a large step's."""

PINNED_BUFFERS = 4
"""Pinned buffers of each size: for the steps in flight and their results."""

SMALL_PINNED_BYTES, SMALL_PINNED_BUFFERS = 1 << 16, 16
"""Size in bytes up to which a step may have several pinned arrays, and how many buffers to hold."""

SHORT_CHUNKS = (2, 3, 5, 9, 17, 33, 65, 128)
"""Chunk lengths in tokens, one for each power of two of queries, for which attention takes another
tile; also tried after a long prefix, where tiles are others again."""

LONG_CHUNK = MIN_QUERIES
"""Length in tokens of a chunk that cuDNN attends to, where it can."""


class TrialSteps:
    """Runs steps on a runner whose pool is unused, in its first blocks.

    Prompts of a multimodal model consist of one image, whose encoder outputs are one block over and
    over. If tokens of an image attend to each other, steps are run with text prompts too.
    """

    def __init__(self, runner: CudaRunner) -> None:
        self._runner, config = runner, runner.model.config
        self._vision = config.vision
        if self._vision is not None:
            levels, device = self._vision.levels, runner.device
            pool = EncoderPool(2, levels, config.hidden_size, config.dtype, device)
            runner.attach_encoder(pool)

    def run(
        self,
        counts: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        prefixes: Sequence[int] | None = None,
    ) -> None:
        """Run one step of sequences with these numbers of new tokens.

        Args:
            counts: Number of tokens to compute of each sequence; ones first.
            params: Sampling parameters of all.
            prefixes: Number of tokens before them; their KV is whatever the pool contains.
        """
        before = prefixes or [0] * len(counts)
        # Bidirectional attention of images is another kernel than that of text.
        both = self._vision is not None and self._vision.bidirectional
        for seeing in (True, False) if both else (self._vision is not None,):
            self._run(counts, params, before, seeing)

    def _run(
        self, counts: Sequence[int], params: SamplingParams, before: Sequence[int], seeing: bool
    ) -> None:
        new, steps, first = [], [], 1
        for handle, (count, prefix) in enumerate(zip(counts, before, strict=True)):
            total = prefix + count
            blocks = -(-total // self._runner.cache.block_size)
            starts = (first + g * blocks for g in range(len(self._runner.cache.groups)))
            tables = tuple(tuple(range(start, start + blocks)) for start in starts)
            first += blocks * len(tables)
            items, rows = self._image(total) if seeing and count > 1 else ((), ())
            new.append(NewSequence(~handle, array("I", [1]) * total, total, 0, params, items))
            steps.append(SequenceStep(~handle, prefix, count, tables, 1, rows))
        self._runner.run(StepPlan(0, new=tuple(new), steps=tuple(steps)))
        self._runner.run(StepPlan(0, ended=tuple(step.handle for step in steps)))

    def _image(self, tokens: int) -> tuple[tuple[Item, ...], tuple[ItemRows, ...]]:
        """An image of `tokens` encoder rows in one line."""
        assert self._vision is not None
        side = self._vision.merge_size
        grid = (1, side, side * tokens)
        blocks = (1,) * -(-tokens // ENCODER_BLOCK_ROWS)
        item = Item(start=0, length=tokens, digest=bytes(32), grid=grid)
        return (item,), (ItemRows(0, tokens, blocks),)

    def fits(self, tokens: int) -> bool:
        """Whether the pool can hold one sequence of so many tokens."""
        return tokens <= self._longest and self._held([tokens])

    def split(self, tokens: int) -> list[int]:
        """Split so many new tokens into as few prompts as possible; empty if they do not fit."""
        prompts = cdiv(tokens, self._longest)
        each, more = divmod(tokens, prompts)
        counts = [each] * (prompts - more) + [each + 1] * more
        return counts if self._held(counts) else []

    @property
    def _longest(self) -> int:
        return self._runner.sequences.tokens.shape[1] - 2

    def _held(self, counts: Sequence[int]) -> bool:
        cache = self._runner.cache
        blocks = sum(cdiv(count, cache.block_size) for count in counts)
        return len(cache.groups) * blocks <= cache.num_blocks - 2


def measure_activations(settings: WorkerSettings, model: LlamaForCausalLM) -> int:
    """Maximum number of bytes that a step takes beside weights and pool.

    Runs a step of `max_num_batched_tokens` in one prompt, and one of `max_num_seqs` prompts that
    all use the sampler's most expensive options.
    """
    config, device = settings.config, settings.device
    budget = config.max_num_batched_tokens
    longest = min(settings.max_model_len, budget)
    num_groups = len(settings.model.kv_groups())
    num_blocks = num_groups * (budget // config.block_size + config.max_num_seqs + 1) + 1
    runner = CudaRunner(
        model,
        settings.make_cache(num_blocks, track_sums=False),
        max_model_len=settings.max_model_len,
        max_num_seqs=config.max_num_seqs,
        use_graphs=False,
    )
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    trial = TrialSteps(runner)
    each = max(1, min(budget // config.max_num_seqs, settings.max_model_len))
    with layers_of_each_kind(model), planning():
        trial.run([longest])
        trial.run([each] * min(config.max_num_seqs, budget), EVERYTHING)
    torch.cuda.synchronize(device)
    # The tables of sequences are included, which exist twice for a moment when they grow.
    peak = torch.cuda.max_memory_allocated(device) - before
    log.info("activations take up to %.2f GiB", peak / 2**30)
    return peak


@contextmanager
def layers_of_each_kind(model: LlamaForCausalLM) -> Iterator[None]:
    """Reduce a model to one layer of each kind: kernels and memory depend on shapes alone."""
    layers = model.layers
    kinds: dict[tuple[object, ...], nn.Module] = {}
    for layer, window in zip(layers, model.config.windows, strict=True):
        shapes = tuple((name, p.shape, p.dtype) for name, p in layer.named_parameters())
        kinds.setdefault((window, shapes), layer)
    model.layers = nn.ModuleList(kinds.values())
    try:
        yield
    finally:
        model.layers = layers


def fill_allocators(activations: int, side_streams: Sequence[torch.cuda.Stream]) -> None:
    """Let torch's allocators take from the driver the memory that steps will need.

    Else a step that is larger than those before, or whose tensors do not fit into the cached
    segments, asks the driver, which may wait for the device.

    Args:
        activations: Maximum number of bytes that a step takes.
        side_streams: Streams that only small kernels run on.
    """
    most = activations + activations // 8 + ATTENTION_BYTES
    of_steps = torch.empty(most, dtype=torch.uint8, device="cuda")
    small = [
        torch.empty(SMALL_BYTES, dtype=torch.uint8, device="cuda") for _ in range(SMALL_BUFFERS)
    ]
    del of_steps, small
    for stream in side_streams:
        with torch.cuda.stream(stream):
            torch.empty(SIDE_STREAM_BYTES, dtype=torch.uint8, device="cuda")
            torch.empty(SMALL_BYTES, dtype=torch.uint8, device="cuda")
    pinned = [
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for size in PINNED_SIZES
        for _ in range(SMALL_PINNED_BUFFERS if size <= SMALL_PINNED_BYTES else PINNED_BUFFERS)
    ]
    del pinned


@torch.inference_mode()
def warm_up(runner: CudaRunner, config: EngineConfig) -> None:
    """Run one step of every kind that serving will need."""
    began = time.monotonic()
    trial = TrialSteps(runner)
    graphs, runner.graphs = runner.graphs, None  # else they would capture the reduced model
    with layers_of_each_kind(runner.model):
        most = config.max_num_batched_tokens
        with planning():
            for count in (*SHORT_CHUNKS, LONG_CHUNK):
                if trial.fits(count) and count <= most:
                    trial.run([count], SamplingParams(temperature=1.0, seed=1))
            for count in (*SHORT_CHUNKS, LONG_CHUNK):
                prefix = SHORT_CONTEXT + (PREFIX_GRANULE - 1 if count == LONG_CHUNK else 0)
                if trial.fits(prefix + count) and count <= most:
                    trial.run([count], prefixes=[prefix])
        _products(trial, config)
        _prompts_beside_decodes(trial, config)
        _expert_tiles(trial, runner, config)
    torch.cuda.synchronize()
    compiled = time.monotonic()
    runner.graphs = graphs
    _capture_and_plan(runner, config)
    runner.cache.counted[:] = 0
    torch.cuda.synchronize()
    log.info(
        "warm-up: %.1f s for kernels, %.1f s for graphs and plans",
        compiled - began, time.monotonic() - compiled,
    )  # fmt: skip


def _capture_and_plan(runner: CudaRunner, config: EngineConfig) -> None:
    """Capture graphs in a second thread while cuDNN plans attention in this one.

    Capturing needs the interpreter, planning does not. But each thread has its own plans, so graphs
    that contain cuDNN attention are captured in this thread.
    """
    device, longest = runner.device, runner.sequences.tokens.shape[1] - 2

    @torch.inference_mode()
    def capture(graphs: PromptGraphs | DecodeGraphs, sizes: Sequence[int]) -> None:
        torch.cuda.set_device(device)
        for number, size in enumerate(reversed(sizes)):  # smaller ones share the largest's memory
            with layers_of_each_kind(runner.model) if number else nullcontext():
                graphs.load(size)
            graphs.capture(size)

    prompt_sizes = [] if runner.prompt_graphs is None else runner.prompt_graphs.sizes
    long = bisect_right(prompt_sizes, WHOLE_TOKENS)

    def capture_others() -> None:
        if runner.prompt_graphs is not None:
            capture(runner.prompt_graphs, prompt_sizes[:long])
        if runner.graphs is not None:
            capture(runner.graphs, runner.graphs.sizes)

    # If the collector freed an earlier runner's graph meanwhile, a capture would fail.
    gc.collect()
    gc.disable()
    try:
        if runner.prompt_graphs is not None:
            capture(runner.prompt_graphs, prompt_sizes[long:])
        with ThreadPoolExecutor(1, "graphs") as thread:
            others = thread.submit(capture_others)
            plan_ahead(config.max_num_batched_tokens, longest, device)
            others.result()
        if runner.prompt_graphs is not None:
            runner.prompt_graphs.drop_slow_sizes()
    finally:
        gc.enable()


def _products(trial: TrialSteps, config: EngineConfig) -> None:
    """Run steps of many sizes, by which libraries choose kernels that CUDA loads when called."""
    most = config.max_num_batched_tokens
    for tokens in (*range(48, min(1024, most), 32), *range(1024, most, PADDED_TOKENS), most):
        counts = trial.split(tokens)
        if 0 < len(counts) <= config.max_num_seqs:
            trial.run(counts)


def _prompts_beside_decodes(trial: TrialSteps, config: EngineConfig) -> None:
    """Run prompts beside 2^n, 16 n and the most decoding sequences, for each class of kernels."""
    if config.max_num_seqs == 1:
        return
    most = max(1, config.max_num_seqs - 2)
    powers = (1 << power for power in range(most.bit_length()))
    for size in dict.fromkeys((*powers, *range(16, most, 16), most)):
        counts = [1] * size + [2, 32]
        if trial.fits(16 * len(counts)) and sum(counts) <= config.max_num_batched_tokens:
            trial.run(counts)


def _expert_tiles(trial: TrialSteps, runner: CudaRunner, config: EngineConfig) -> None:
    """Run a step with the smallest number of tokens of each form of the experts' products."""
    moe = runner.model.config.moe
    for tokens in () if moe is None else token_counts(moe.top_k, moe.num_experts):
        counts = trial.split(tokens)
        if 0 < len(counts) <= config.max_num_seqs and tokens <= config.max_num_batched_tokens:
            trial.run(counts)
