"""Drafts on a GPU, in CUDA graphs and without: the tokens of a node that makes none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbaton.messages.engine import Shutdown
from tests.engine.test_speculative import REPEATED, SPECULATIVE, answers
from tests.support.engine_node import Node
from tests.support.prompts import prompt_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "head_dim": 64, "hidden_size": 256},
    "gpt-oss": {"family": "gpt_oss", "num_layers": 4, "head_dim": 64, "hidden_size": 256},
    "deepseek-v3": {"family": "deepseek_v3", "head_dim": 64, "hidden_size": 256},
}
GPU: dict[str, Any] = {"device": "cuda", "block_size": 16, "max_num_seqs": 16, "max_model_len": 256}


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_the_same(shape: str, eager: bool, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(**SHAPES[shape])
    settings = GPU | {"enforce_eager": eager, "num_blocks": 512}
    nodes = [
        Node(name, folder, **settings, **more) for name, more in (("a", {}), ("b", SPECULATIVE))
    ]
    plain, drafting = nodes
    try:
        for params in (
            {"max_tokens": 40},
            {"max_tokens": 40, "temperature": 0.8, "seed": 5},
            {"max_tokens": 40, "frequency_penalty": 0.5, "logprobs": 2},
            {"max_tokens": 40, "repetition_penalty": 1.02, "presence_penalty": 0.1},
            {"max_tokens": 40, "temperature": 0.7, "frequency_penalty": 0.8, "seed": 8},
        ):
            for tokens in (REPEATED, prompt_of(30)):
                pair = (answers(node, tokens, **params) for node in nodes)
                for one, other in zip(*pair, strict=True):
                    assert one[:3] == other[:3]  # tokens, and why they end
                    logprobs = ([logprob for _, logprob in told] for *_, told in (one, other))
                    assert next(logprobs) == pytest.approx(next(logprobs), abs=0.01)
        calls = [drafting.generate(REPEATED[i:], max_tokens=40) for i in range(12)]
        for i, call in enumerate(calls):
            assert call.result() == plain.generate(REPEATED[i:], max_tokens=40).result()
        assert drafting.counters()["kvbaton_spec_decode_num_accepted_tokens_total"] > 0
    finally:
        for node in nodes:
            node.mailbox.post(Shutdown(grace_s=0.0))
            node.bury()
