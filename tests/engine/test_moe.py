"""A mixture of experts against the module of transformers: the same choice in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbaton.engine.loader import load_model
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.moe_config import read_moe

CLOSE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_layer_is_that_of_transformers(
    family: str, dtype: str, checkpoint: Callable[..., Path], reference: Any
) -> None:
    folder = checkpoint(family=family)
    ours: Any = load_model(load_model_config(folder, dtype), device=CPU).layers
    theirs = reference(folder, dtype).model.layers
    for layer in range(2):
        x = torch.randn(50, 64, generator=torch.Generator().manual_seed(layer))
        x = x.to(getattr(torch, dtype))
        with torch.inference_mode():
            weights, ids = ours[layer].mlp.gate(x)
            _, their_weights, their_ids = theirs[layer].mlp.gate(x)
            out, expected = ours[layer].mlp(x), theirs[layer].mlp(x[None])[0]
        assert torch.equal(ids, their_ids.int())
        assert weights.dtype == their_weights.dtype
        assert torch.equal(weights, their_weights)
        torch.testing.assert_close(out, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def test_which_layers_have_experts() -> None:
    content: dict[str, Any] = {
        "num_hidden_layers": 6,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,  # as transformers 5 writes it; published models say num_experts
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    moe = read_moe(content, "Qwen3MoeForCausalLM")
    assert moe is not None
    assert moe.layers == (False, True, False, False, False, True)
    assert (moe.num_experts, moe.norm_topk_prob) == (8, False)
    assert read_moe(content, "Qwen3ForCausalLM") is None
