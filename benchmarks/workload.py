"""Workload of the baselines (Llama-3-8B's shape, random prompts), and a small model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests.support.checkpoints import CheckpointSpec, make_checkpoint

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
SMALL = CheckpointSpec(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1376,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
    tied=True,
)
"""A model of about 25 million parameters; a block of 16 tokens has 256 KiB of KV."""

MAX_MODEL_LEN = 16640
MAX_BATCHED_TOKENS = 8192


def llama_8b(folder: Path) -> Path:
    """Write the 8B model's `dummy_folder`."""
    return dummy_folder(folder, LLAMA_8B)


def dummy_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a configuration and a small tokenizer for ``--load-format dummy``; the folder."""
    make_checkpoint(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_prompts(count: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts without a common prefix, of ids that the small tokenizer knows."""
    rng = np.random.default_rng(seed)
    return [tuple(row) for row in rng.integers(10, 380, (count, length)).tolist()]


def compared(rows: Sequence[tuple[str, float, float | None]]) -> list[dict[str, Any]]:
    """Rows of name, our figure and vLLM's, for `kvbaton.bench.report.publish`."""
    return [
        {
            "what": name,
            "kvbaton": ours,
            "vLLM 0.26.0": theirs or "",
            "ratio": ours / theirs if theirs else "",
        }
        for name, ours, theirs in rows
    ]


async def counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Metrics of a node or router, by name with labels."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


@contextmanager
def cluster_of(
    words: Sequence[str], env: Mapping[str, str] | None = None, *, echo: bool = False
) -> Iterator[tuple[str, int]]:
    """Run a cluster with ``kvbaton up``; yields the router's URL and the process id.

    Args:
        words: Further arguments of the command.
        env: Further environment variables.
        echo: Whether to print its output until it is ready.

    Raises:
        SystemExit: The cluster did not start.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "kvbaton", "up", "--port=0", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert process.stdout is not None
    rest = threading.Thread(target=process.stdout.read, daemon=True)
    try:
        for line in process.stdout:
            if echo:
                print(line, end="", flush=True)
            if found := re.match(r"ready: (http://\S+)/v1", line):
                rest.start()
                yield found[1], process.pid
                return
        raise SystemExit("the cluster did not start")
    finally:
        process.terminate()
        process.wait(60)
        if rest.is_alive():
            rest.join(10)
        process.stdout.close()
