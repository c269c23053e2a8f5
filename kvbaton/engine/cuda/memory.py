"""How much of a GPU the engine needs beside its KV pool: measured by running its largest steps."""

from __future__ import annotations

import logging

import torch

from kvbaton.engine.cuda.cache import CudaKVCache
from kvbaton.engine.cuda.runner import CudaRunner
from kvbaton.engine.cuda.trial import Trial
from kvbaton.engine.models.llama import LlamaForCausalLM
from kvbaton.engine.worker import WorkerSettings
from kvbaton.messages.engine import SamplingParams

log = logging.getLogger(__name__)

GRAPHS_AND_LIBRARIES = 2 << 30
"""Bytes left for CUDA graphs, attention plans, and what transports map."""

EVERYTHING = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, repetition_penalty=1.1)


def measure_reserve(settings: WorkerSettings, model: LlamaForCausalLM) -> int:
    """Bytes to leave free beside weights and pool.

    Runs a step of `max_num_batched_tokens` in one prompt, and one in `max_num_seqs` prompts that
    all ask for the sampler's most expensive options.
    """
    config, device = settings.config, settings.device
    budget = config.max_num_batched_tokens
    longest = min(settings.max_model_len, budget)
    cache = CudaKVCache(
        settings.model,
        num_blocks=budget // config.block_size + config.max_num_seqs + 2,
        block_size=config.block_size,
        device=device,
        shard=settings.shard,
        track_sums=False,
    )
    runner = CudaRunner(
        model,
        cache,
        eos_token_ids=settings.model.eos_token_ids,
        max_model_len=settings.max_model_len,
        max_num_seqs=config.max_num_seqs,
        use_graphs=False,
    )
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    trial = Trial(runner)
    trial.run([longest])
    each = max(1, min(budget // config.max_num_seqs, settings.max_model_len))
    trial.run([each] * min(config.max_num_seqs, budget), EVERYTHING)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    log.info("activations take up to %.2f GiB", peak / 2**30)
    # Sequences' own tables stay, twice for a moment when they grow.
    return peak + GRAPHS_AND_LIBRARIES
