"""Compiles kernels, builds attention plans and captures graphs before a node says it is ready."""

from __future__ import annotations

import logging
import time

import torch

from kvbaton.engine.config import EngineConfig
from kvbaton.engine.cuda.runner import SHORT_CONTEXT, CudaRunner
from kvbaton.engine.cuda.trial import Trial
from kvbaton.kernels.prefill_attention import GRANULE, MIN_QUERIES, cudnn_fits
from kvbaton.messages.engine import SamplingParams

log = logging.getLogger(__name__)

SHORT_PROMPTS = (2, 3, 9, 17, 32, 65, 128, 1040)
"""One of each kind for which some kernel is compiled on its own."""

SHORT_CHUNKS = (2, 9, 32, 128)
"""Likewise after a long prefix, where the attention of chunks takes other tiles."""


@torch.inference_mode()
def warm_up(runner: CudaRunner, config: EngineConfig) -> None:
    """Run one step of every kind that serving will need."""
    began = time.monotonic()
    trial = Trial(runner)
    for count in SHORT_PROMPTS:
        if trial.fits(count) and count <= config.max_num_batched_tokens:
            trial.run([count], SamplingParams(temperature=1.0, seed=1))
    for count in SHORT_CHUNKS:
        if trial.fits(SHORT_CONTEXT + count) and count <= config.max_num_batched_tokens:
            trial.run([count], prefixes=[SHORT_CONTEXT])
    _prompts_beside_decodes(trial, config)
    _attention_plans(trial, runner, config)
    torch.cuda.synchronize()
    compiled = time.monotonic()
    if runner.graphs is not None:
        for size in reversed(runner.graphs.sizes):  # the largest first: the others share its pool
            runner.graphs.capture(size)
    runner.cache.counted[:] = 0
    torch.cuda.synchronize()
    log.info(
        "warm-up: %.1f s for kernels, %.1f s for graphs",
        compiled - began, time.monotonic() - compiled,
    )  # fmt: skip


def _prompts_beside_decodes(trial: Trial, config: EngineConfig) -> None:
    """Batches of each power of two, and the largest: kernels are compiled for classes of them."""
    if config.max_num_seqs == 1:
        return
    most = max(1, config.max_num_seqs - 2)
    for size in dict.fromkeys((*(1 << power for power in range(most.bit_length())), most)):
        counts = [1] * size + [2, 32]
        if trial.fits(16 * len(counts)) and sum(counts) <= config.max_num_batched_tokens:
            trial.run(counts)


def _attention_plans(trial: Trial, runner: CudaRunner, config: EngineConfig) -> None:
    """One chunk of each padded length, and full chunks after each number of full chunks."""
    heads, dim = runner.model.config.num_heads, runner.model.config.head_dim
    dtype = runner.cache.data.dtype
    query = torch.empty((1, heads, dim), dtype=dtype, device=runner.device)
    if not cudnn_fits(query, runner.cache.block_size):
        return
    chunk = config.max_num_batched_tokens
    for count in range(MIN_QUERIES, chunk + 1, GRANULE):
        alike = 1
        while trial.fits(alike * count) and alike * count <= chunk:
            trial.run([count] * alike)
            alike *= 2
    prefix = chunk
    while trial.fits(prefix + chunk) and prefix < 8 * chunk:
        trial.run([chunk], prefixes=[prefix])
        prefix += chunk
