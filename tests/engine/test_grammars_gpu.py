"""Grammars on a GPU, in CUDA graphs: texts follow them, and who decodes beside them is as ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbaton.messages.engine import Shutdown
from kvbaton.text.tokenizer import Tokenizer
from tests.engine.test_grammars import FREE, check_json, json_grammar
from tests.engine.test_speculative_gpu import GPU, SHAPES
from tests.support.engine_node import Node
from tests.support.prompts import prompt_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BESIDE: list[dict[str, Any]] = [
    {"max_tokens": 60, **({"temperature": 0.9, "seed": i} if i % 2 else {})} for i in range(8)
]


def test_eight_follow_a_schema_beside_eight_without(checkpoint: Callable[..., Path]) -> None:
    pytest.importorskip("llguidance", reason="GPU machines may lack it")
    folder = checkpoint(**SHAPES["llama"])
    tokenizer, node = Tokenizer.load(folder), Node("a", folder, **GPU, num_blocks=512)

    def start_others() -> list[Any]:
        return [node.generate(prompt_of(20 + i), **params) for i, params in enumerate(BESIDE)]

    try:
        alone = [call.result() for call in start_others()]
        others = start_others()
        governed = [
            node.generate(prompt_of(9 + i), **FREE, seed=i, grammar=json_grammar())
            for i in range(8)
        ]
        for call in governed:
            *tokens, end = call.result()
            assert (call.finish_reason, end in (1, 2)) == ("stop", True), call.outputs[-1]
            check_json(tokenizer.decode(tokens, skip_special_tokens=False))
        texts = {tuple(call.tokens) for call in governed}
        assert len(texts) > 1, "sampled, not forced"
        assert [call.result() for call in others] == alone
    finally:
        node.mailbox.post(Shutdown(grace_s=0.0))
        node.bury()
    assert node.imbalance == 0
