"""How much of a GPU the engine needs beside its KV pool: measured by running its largest steps."""

from __future__ import annotations

import logging

import torch

from kvbaton.engine.config import EngineConfig
from kvbaton.engine.cuda.cache import CudaKVCache
from kvbaton.engine.cuda.runner import CudaRunner
from kvbaton.engine.cuda.trial import Trial
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.models.llama import LlamaForCausalLM
from kvbaton.engine.shard import Shard
from kvbaton.wire import SamplingParams

log = logging.getLogger(__name__)

GRAPHS_AND_LIBRARIES = 2 << 30
"""Bytes left for CUDA graphs, attention plans, and what transports map."""

EVERYTHING = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, repetition_penalty=1.1)


def measure_reserve(
    config: EngineConfig, model_config: ModelConfig, model: LlamaForCausalLM, max_model_len: int
) -> int:
    """Bytes to leave free beside weights and pool.

    Runs a step of `max_num_batched_tokens` in one prompt, and one in `max_num_seqs` prompts that
    all ask for the sampler's most expensive options.
    """
    device = model.embed_tokens.weight.device
    budget = config.max_num_batched_tokens
    longest = min(max_model_len, budget)
    cache = CudaKVCache(
        model_config,
        num_blocks=budget // config.block_size + config.max_num_seqs + 2,
        block_size=config.block_size,
        device=device,
        shard=Shard(),
        track_sums=False,
    )
    runner = CudaRunner(
        model,
        cache,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        use_graphs=False,
    )
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    trial = Trial(runner)
    trial.run([longest])
    each = max(1, min(budget // config.max_num_seqs, max_model_len))
    trial.run([each] * min(config.max_num_seqs, budget), EVERYTHING)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    log.info("activations take up to %.2f GiB", peak / 2**30)
    # Sequences' own tables stay, twice for a moment when they grow.
    return peak + GRAPHS_AND_LIBRARIES
