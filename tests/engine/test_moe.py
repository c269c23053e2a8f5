"""A mixture of experts against the module of transformers: the same choice in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvbaton.engine.build import make_executor, make_scheduler
from kvbaton.engine.collectives import Shard
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.loader import fill_weights, load_model
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.models.layers import pieces_of
from kvbaton.engine.models.moe import MoE
from kvbaton.engine.moe_config import read_moe
from tests.support.quantized_files import quantized_folders

CLOSE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 5e-2}
"""What is added up is 4 to 8, where bfloat16 has steps of 0.03."""

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("family", ["dots1", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_layer_is_that_of_transformers(
    family: str, dtype: str, checkpoint: Callable[..., Path], reference: Any
) -> None:
    folder = checkpoint(family=family, dtype=dtype)
    ours: Any = load_model(load_model_config(folder), device=CPU).layers
    theirs = reference(folder, dtype).model.layers
    for layer in range(family == "dots1", 2):  # its first is dense
        x = torch.randn(50, 64, generator=torch.Generator().manual_seed(layer))
        x = x.to(getattr(torch, dtype))
        with torch.inference_mode():
            weights, ids = ours[layer].mlp.gate(x)
            _, their_weights, their_ids = theirs[layer].mlp.gate(x)
            out, expected = ours[layer].mlp(x), theirs[layer].mlp(x[None])[0]
        assert weights.dtype == their_weights.dtype
        at, their_at = ids.argsort(-1), their_ids.argsort(-1)  # theirs come in any order
        assert torch.equal(ids.gather(1, at), their_ids.gather(1, their_at).int())
        torch.testing.assert_close(weights.gather(1, at), their_weights.gather(1, their_at))
        torch.testing.assert_close(out, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy", "noaux_tc"])
def test_a_mixture_of_deepseek_is_that_of_transformers(method: str) -> None:
    from transformers import DeepseekV2Config, DeepseekV3Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    settings: dict[str, Any] = {
        "hidden_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "first_k_dense_replace": 2,
        "n_routed_experts": 32,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 2.5,
        "topk_method": method,
    }
    v3 = method == "noaux_tc"
    config: Any = (DeepseekV3Config if v3 else DeepseekV2Config)(**settings)
    theirs: Any = (DeepseekV3MoE if v3 else DeepseekV2Moe)(config)
    moe = read_moe(config.to_dict(), f"DeepseekV{3 if v3 else 2}ForCausalLM")
    assert moe is not None
    assert moe.layers == (False, False, True, True, True)
    torch.manual_seed(3)
    ours: Any = MoE("layer", 48, moe, Shard())
    for piece in pieces_of(ours):
        piece.target.normal_(0, 0.2)
    with torch.inference_mode():
        theirs.gate.weight.copy_(ours.gate.weight)
        if v3:
            theirs.gate.e_score_correction_bias.copy_(ours.gate.choice_bias)
        theirs.experts.gate_up_proj.copy_(ours.experts.gate_up_proj[:32])
        theirs.experts.down_proj.copy_(ours.experts.down_proj[:32])
        assert ours.experts.shared == config.n_shared_experts
        gate, up = ours.experts.gate_up_proj[32:].split(16, dim=1)
        theirs.shared_experts.gate_proj.weight.copy_(gate.flatten(0, 1))
        theirs.shared_experts.up_proj.weight.copy_(up.flatten(0, 1))
        down = ours.experts.down_proj[32:].transpose(0, 1).flatten(1)
        theirs.shared_experts.down_proj.weight.copy_(down)
        for tokens in (70, 9):
            x = torch.randn(tokens, 48)
            torch.testing.assert_close(ours(x), theirs(x[None])[0], atol=1e-5, rtol=1e-4)


GPT_OSS: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "swiglu_limit": 1.5,
}


def gpt_oss(folder: Path, shard: Shard, load_format: Any = "auto") -> Any:
    """Our mixture, filled from a folder, or with dummy weights."""
    moe = read_moe(GPT_OSS, "GptOssForCausalLM")
    assert moe is not None
    ours = MoE("model.layers.0", 64, moe, shard)
    config: Any = SimpleNamespace(folder=folder, quantization=None)
    fill_weights(pieces_of(ours), config, load_format, 0, CPU)
    return ours


@pytest.mark.parametrize("experts", [False, True])
def test_a_mixture_of_gpt_oss_is_that_of_transformers(experts: bool, tmp_path: Path) -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    make: Any = GptOssMLP
    theirs = make(GptOssConfig(**GPT_OSS))
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)) * 2
    torch.manual_seed(2)
    with torch.inference_mode():
        for weight in theirs.parameters():
            weight.normal_(0, 0.3)
        expected = theirs(x[None])[0][0]
    state = {f"model.layers.0.mlp.{name}": part for name, part in theirs.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    with torch.inference_mode():
        whole = gpt_oss(tmp_path, Shard())(x)
        parts = [gpt_oss(tmp_path, Shard(rank, 2, expert_parallel=experts))(x) for rank in (0, 1)]
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(sum(parts), expected, atol=1e-5, rtol=1e-4)


def test_stacks_of_dummy_experts_are_equal_however_they_are_split(tmp_path: Path) -> None:
    whole = gpt_oss(tmp_path, Shard(), "dummy").experts
    for shard in (Shard(1, 2), Shard(1, 2, expert_parallel=True)):
        part = gpt_oss(tmp_path, shard, "dummy").experts
        held, rows = (slice(4, 8), slice(0, 64)) if shard.expert_parallel else (slice(0, 8),) * 2
        if not shard.expert_parallel:
            rows = slice(32, 64)
        assert torch.equal(part.gate_up_proj, whole.gate_up_proj[held, rows])
        assert torch.equal(part.gate_up_bias, whole.gate_up_bias[held, rows])
        columns = slice(rows.start // 2, rows.stop // 2)
        assert torch.equal(part.down_proj, whole.down_proj[held, :, columns])
    assert len(whole.gate_up_proj.unique()) > 30_000  # of 32,768, in steps of 2^-23 of their range


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("tokens", [0, 1, 40, 700])
@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3", "GptOss", "Mixtral", "Qwen2Moe"])
def test_a_mixture_on_a_gpu_is_that_on_the_cpu(name: str, tokens: int) -> None:
    groups = {"n_group": 4, "topk_group": 2} if name.startswith("Deepseek") else {}
    shared = {"n_shared_experts": 1} if groups else {}
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 0}
    if name == "Qwen2Moe":
        sizes["shared_expert_intermediate_size"] = 48
    moe = read_moe(GPT_OSS | sizes | groups | shared, f"{name}ForCausalLM")
    assert moe is not None
    torch.manual_seed(4)
    ours = MoE("layer", 64, moe, Shard())
    for piece in pieces_of(ours):
        piece.target.normal_(0, 0.2)
    x = torch.randn(tokens, 64)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        expected = ours(x)
        found = ours.cuda()(x.cuda()).cpu()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["fp8-block", "packed"])
def test_ranks_take_whole_quantised_experts(
    kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint(family="qwen3_moe", config={"norm_topk_prob": False})
    folders = quantized_folders(source, tmp_path, kind)
    for rank in range(2):
        shard = Shard(rank, 2, expert_parallel=True)
        found, wanted = (
            load_model(load_model_config(x), device=CPU, shard=shard).state_dict() for x in folders
        )
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


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


def test_steps_that_decode_have_more_tokens_where_few_experts_see_each(
    checkpoint: Callable[..., Path],
) -> None:
    def mixed(family: str, **settings: Any) -> int:
        config = EngineConfig(model=str(checkpoint(family=family)), device="cpu", **settings)
        model = load_model_config(Path(config.model))
        layouts = make_executor(config, model, track_sums=False).layouts[0]
        return make_scheduler(config, model, layouts, bytes(32)).config.max_num_mixed_tokens

    moe = load_model_config(checkpoint(family="mixtral")).moe
    assert moe is not None
    assert moe.num_experts > moe.top_k
    assert mixed("mixtral") == 512 * moe.num_experts // moe.top_k
    assert mixed("mixtral", max_num_mixed_tokens=700) == 700
    assert mixed("llama") == 512
