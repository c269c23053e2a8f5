"""Every family against transformers: the same tokens, whatever the batch looks like."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.models.layers import inverse_frequencies
from kvbaton.errors import ConfigError
from tests.support.prompts import random_tokens

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
LITE = {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-tied-sharded": {"family": "llama", "tied": True, "shards": 3},
    "llama3-rope": {"family": "llama", "config": {"rope_scaling": LLAMA3_ROPE}},
    "llama-biases": {"family": "llama", "config": {"attention_bias": True, "mlp_bias": True}},
    "llama-no-gqa": {"family": "llama", "num_kv_heads": 4, "head_dim": 32},
    "gemma3": {"family": "gemma3", "num_layers": 7, "tied": True},
    "gemma4": {"family": "gemma4", "num_layers": 9},
    "gemma4-keys-are-values": {
        "family": "gemma4",
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 4,
        "tied": True,
        "config": {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 24,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": None,
        },
    },
    "llama-linear-rope": {
        "family": "llama",
        "config": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    },
    "llama-yarn": {"family": "llama", "config": {"rope_scaling": YARN}},
    "gpt-oss": {"family": "gpt_oss", "num_layers": 3},
    "llama4": {"family": "llama4", "num_layers": 6},
    "llama4-dense-top-2": {
        "family": "llama4",
        "num_layers": 3,
        "config": {
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 1,
            "moe_layers": [1],
            "attention_chunk_size": 6,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
        },
    },
    "llama4-yarn": {"family": "llama4", "num_layers": 3, "config": {"rope_scaling": YARN}},
    "mistral": {"family": "mistral"},
    "mistral-window": {"family": "mistral", "config": {"sliding_window": 11}},
    "qwen2": {"family": "qwen2"},
    "qwen2-windows": {"family": "qwen2", "config": QWEN_WINDOWS},
    "qwen3": {"family": "qwen3"},
    "mixtral": {"family": "mixtral", "shards": 2},
    "mixtral-window": {"family": "mixtral", "config": {"sliding_window": 11}},
    "deepseek-v2": {"family": "deepseek_v2"},
    "deepseek-v2-lite": {"family": "deepseek_v2", "num_layers": 3, "config": LITE},
    "deepseek-v3": {"family": "deepseek_v3", "num_layers": 3, "shards": 2},
    "deepseek-v3-halves": {
        "family": "deepseek_v3",
        "config": {"rope_interleave": False, "n_group": 1, "topk_group": 1},
    },
    "dots1": {  # transformers does not read its topk_method
        "family": "dots1",
        "num_layers": 3,
        "config": {"topk_method": "greedy"},
    },
    "dots1-windows": {
        "family": "dots1",
        "config": {"sliding_window": 11, "max_window_layers": 1, "n_group": 1, "topk_group": 1},
    },
    "qwen2-moe": {"family": "qwen2_moe"},
    "qwen3-moe": {"family": "qwen3_moe"},
    "qwen3-moe-dense-layers": {
        "family": "qwen3_moe",
        "num_layers": 5,
        "config": {"mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False},
    },
    "qwen3-next": {"family": "qwen3_next", "num_layers": 4, "head_dim": 32},
    "qwen3-next-other-sizes": {
        "family": "qwen3_next",
        "num_layers": 3,
        "head_dim": 64,
        "config": {
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "linear_num_key_heads": 1,
            "linear_conv_kernel_dim": 3,
        },
    },
    "qwen3-moe-window": {
        "family": "qwen3_moe",
        "config": {"use_sliding_window": True, "sliding_window": 12, "attention_bias": True},
    },
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
V2 = {"architectures": ["DeepseekV2ForCausalLM"]}
LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8,
}
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_act": None,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
}
QWEN3_NEXT = MOE | {"architectures": ["Qwen3NextForCausalLM"]}
SLIDING = {"use_sliding_window": True, "sliding_window": 8}
CPU = torch.device("cpu")
MIXTURES = [(name, "float32") for name in ("deepseek_v2", "deepseek_v3", "gpt_oss")]
DTYPES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


def greedy_along(model: Any, ids: list[int], tokens: list[int], count: int) -> list[int]:
    """The likeliest token after a prompt, and after each of `count` tokens but the last.

    They are these tokens exactly if transformers generates them greedily: one forward pass tells,
    where generating takes one a token.
    """
    assert len(tokens) == count
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids, *tokens[:-1]]])).logits[0, len(ids) - 1 :]
    likeliest: list[int] = logits.argmax(-1).tolist()
    return likeliest


@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_batch_generates_what_transformers_does(
    name: str, checkpoint: Callable[..., Path], reference: Any, drive: Any
) -> None:
    folder = checkpoint(**MODELS[name])
    driver = drive(folder, block_size=16 if name == "qwen3" else 4, num_blocks=1024)
    driver.poisons = True
    rng = np.random.default_rng(1)
    prompts = [random_tokens(rng, count) for count in (1, 2, 5, 17, 33, 64)]
    handles = [driver.add(prompt) for prompt in prompts]
    generated = driver.generate_mixed(handles, 16, rng)
    for prompt, got in zip(prompts, generated, strict=True):
        expected = greedy_along(reference(folder), prompt, got, len(got))
        assert got == expected, f"prompt of {len(prompt)}"


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_and_block_sizes_do_not_matter(
    block_size: int, chunk: int, checkpoint: Callable[..., Path], reference: Any, drive: Any
) -> None:
    folder = checkpoint(family="qwen3", num_kv_heads=1, head_dim=32)
    prompt = random_tokens(np.random.default_rng(2), 41)
    driver = drive(folder, block_size=block_size)
    got = driver.generate(driver.add(prompt), 20, chunk=chunk)
    assert got == greedy_along(reference(folder), prompt, got, 20)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_a_cached_prefix_is_used_through_the_block_table(
    name: str, checkpoint: Callable[..., Path], reference: Any, drive: Any
) -> None:
    folder = checkpoint(**MODELS[name])
    driver = drive(folder, block_size=8)
    rng = np.random.default_rng(3)
    prefix = random_tokens(rng, 24)
    first = driver.add(prefix + random_tokens(rng, 3))
    driver.generate(first, 2)
    prompt = prefix + random_tokens(rng, 9)
    second = driver.add(prompt, cached=driver.tables[first][:3])
    assert driver.left(second) == 9
    got = driver.generate(second, 16)
    assert got == greedy_along(reference(folder), prompt, got, 16)


def test_attention_tiles_a_long_prompt(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path], reference: Any, drive: Any
) -> None:
    monkeypatch.setattr("kvbaton.engine.attention.TILE_ELEMENTS", 300)
    for name in ("llama", "mistral-window"):
        folder = checkpoint(**MODELS[name])
        prompt = random_tokens(np.random.default_rng(4), 90)
        driver = drive(folder)
        got = driver.generate(driver.add(prompt), 6, chunk=50)
        assert got == greedy_along(reference(folder), prompt, got, 6)


def test_decoding_sequences_of_any_lengths_share_a_step(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path], reference: Any, drive: Any
) -> None:
    monkeypatch.setattr("kvbaton.engine.attention.BUCKET_ELEMENTS", 4000)
    folder = checkpoint(**MODELS["qwen2"])
    driver = drive(folder, block_size=4)
    rng = np.random.default_rng(5)
    prompts = [random_tokens(rng, count) for count in (3, 100, 4, 9, 5, 31, 32, 8, 99)]
    handles = [driver.add(prompt) for prompt in prompts]
    driver.step(*((handle, driver.left(handle), 1) for handle in handles))
    for _ in range(11):
        driver.step(*((handle, 1, 1) for handle in handles))
    for handle, prompt in zip(handles, prompts, strict=True):
        got = driver.tokens[handle][len(prompt) :]
        assert got == greedy_along(reference(folder), prompt, got, 12)


@pytest.mark.parametrize(
    ("family", "dtype"),
    # Of mixtures float32 only: two experts that a router rates almost alike change places.
    [*product(["llama", "mistral", "qwen2", "qwen3"], DTYPES), *MIXTURES],
)
def test_logits_are_close_in_every_dtype(
    family: str,
    dtype: str,
    checkpoint: Callable[..., Path],
    reference: Any,
    drive: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint(family=family)
    ids = random_tokens(np.random.default_rng(6), 30)
    driver = drive(folder, dtype=dtype)
    seen = driver.record_logits(monkeypatch)
    driver.generate(driver.add(ids), 4, chunk=13)
    full = driver.tokens[1][:-1]
    with torch.inference_mode():
        expected = reference(folder, dtype)(torch.tensor([full])).logits[0, len(ids) - 1 :].float()
    torch.testing.assert_close(torch.cat(seen), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


def test_llama3_frequencies_equal_those_of_transformers(
    checkpoint: Callable[..., Path], reference: Any
) -> None:
    folder = checkpoint(**MODELS["llama3-rope"])
    config = load_model_config(folder)
    expected = reference(folder).model.rotary_emb.inv_freq
    assert torch.equal(inverse_frequencies(config.rope, config.head_dim), expected)
    plain = checkpoint(**MODELS["llama"])
    assert not torch.equal(expected, reference(plain).model.rotary_emb.inv_freq)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
        {"attention_factor": 0.8},
        {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3},
        {"original_max_position_embeddings": None},
    ],
)
def test_yarn_is_that_of_transformers(
    family: str, more: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {name: x for name, x in (YARN | more).items() if x is not None}
    folder = edit(checkpoint(family=family, head_dim=64), tmp_path, rope_scaling=scaling)
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(folder), CPU)
    config = load_model_config(folder)
    found = inverse_frequencies(config.rope, config.head_dim)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert config.rope.attention_factor == factor
    reached = scaling["factor"] * scaling.get("original_max_position_embeddings", 512)
    assert config.max_position_embeddings == max(512, reached)


def edit(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    """A folder whose config.json is another folder's with changes."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"architectures": []}, "supported"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "trust_remote_code.* Qwen3ForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"], "hidden_size": None}, "Qwen3ForCausalLM"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"type": "yarn"}}, "'yarn' needs a factor"),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling says 'yarn', rope_parameters 'default'",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "a factor from 1 on, not 0.5"),
        ({"rope_scaling": YARN | {"beta_fast": 1}}, "beta_fast 1 above beta_slow 1"),
        ({"rope_scaling": YARN | {"beta_fast": 1e308}}, "beta_fast 1e[+]308"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor 0"),
        (GPT_OSS | {"sliding_window": None}, "sliding_window is missing"),
        (GPT_OSS | {"layer_types": None}, "sliding_window needs layer_types"),
        (GPT_OSS | {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        (GPT_OSS | {"hidden_act": "gelu"}, "gelu"),
        (DEEPSEEK | {"attention_bias": True}, "attention_bias of DeepseekV3ForCausalLM"),
        (DEEPSEEK | {"kv_lora_rank": 0}, "kv_lora_rank"),
        (DEEPSEEK | {"v_head_dim": 193}, "v_head_dim 193 is not within 1 and 192"),
        (DEEPSEEK | {"qk_rope_head_dim": 31}, "qk_rope_head_dim 31 must be even"),
        (DEEPSEEK | {"q_lora_rank": "much"}, "q_lora_rank"),
        (DEEPSEEK | {"scoring_func": "softmax"}, "scoring_func 'softmax'.* need 'sigmoid'"),
        (DEEPSEEK | {"topk_method": "greedy"}, "topk_method 'greedy'.* need 'noaux_tc'"),
        (DEEPSEEK | V2 | {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'.* need 'softmax'"),
        (DEEPSEEK | V2 | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs a factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"torch_dtype": "int8"}, "int8"),
        ({"architectures": ["MixtralForCausalLM"]}, "num_experts_per_tok"),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2}, "num_experts 0"),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is not within 1 and 8"),
        (MOE | {"moe_intermediate_size": 0}, "moe_intermediate_size 0"),
        (MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step 0"),
        (MOE | {"mlp_only_layers": 3}, "mlp_only_layers"),
        (MOE | {"n_group": 3, "topk_group": 3}, "n_group 3 does not divide 8"),
        (MOE | {"n_group": 8}, "n_group 8 is not within 1 and 4"),
        (MOE | {"n_group": 2, "topk_group": 3}, "topk_group 3 is not within 1 and 2"),
        (MOE | {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok 3"),
        (LLAMA4 | {"attention_chunk_size": None}, "attention_chunk_size is missing"),
        (LLAMA4 | {"no_rope_layers": [1]}, "no_rope_layers and num_hidden_layers differ"),
        (LLAMA4 | {"floor_scale": 0}, "floor_scale"),
        (GEMMA4 | {"layer_types": None}, "layer_types must name 2 layers"),
        (GEMMA4 | {"num_kv_shared_layers": 1}, "num_kv_shared_layers 1: each kind of layer"),
        (GEMMA4 | {"enable_moe_block": True}, "enable_moe_block is unsupported"),
        (GEMMA4 | {"global_head_dim": 0}, "global_head_dim 0"),
        (GEMMA4 | {"hidden_size_per_layer_input": -1}, "[$].hidden_size_per_layer_input"),
        (GEMMA4 | {"vocab_size_per_layer_input": -1}, "[$].vocab_size_per_layer_input"),
        (GEMMA4 | {"vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input 300"),
        (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        (QWEN3_NEXT | {"linear_num_value_heads": 6}, "linear_num_value_heads 6 is no multiple"),
        (QWEN3_NEXT | {"linear_conv_kernel_dim": 1}, ">= 2 - at `[$].linear_conv_kernel_dim`"),
        (QWEN3_NEXT | {"linear_conv_kernel_dim": 1 << 70}, "`[$].linear_conv_kernel_dim`"),
        (QWEN3_NEXT | {"layer_types": ["linear_attention"]}, "layer_types and num_hidden_layers"),
        (QWEN3_NEXT | {"layer_types": ["linear_attention"] * 2}, "a layer of 'full_attention'"),
        (QWEN3_NEXT | {"layer_types": ["full_attention", "mamba"]}, "mamba"),
        (QWEN3_NEXT | {"partial_rotary_factor": 0.3}, "partial_rotary_factor 0.3"),
        (
            GEMMA4 | {"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.0}}},
            "rope_type 'linear' of windows",
        ),
        ({"rope_theta": -10_000.0}, "> 1.0 - at `[$].rope_theta`"),
        ({"rope_theta": 0}, "> 1.0 - at `[$].rope_theta`"),
        ({"rope_scaling": {"rope_theta": -1}}, "> 1.0 - at `[$].rope_scaling.rope_theta`"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": -8}}, "> 0.0 - at `[$].rope_scaling.factor`"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 40}}, "a high_freq_factor above that"),
        ({"head_dim": -64}, ">= 1 - at `[$].head_dim`"),
        ({"head_dim": 15}, "head_dim 15 must be even"),
        ({"num_key_value_heads": 0}, ">= 1 - at `[$].num_key_value_heads`"),
        ({"rms_norm_eps": -1e-6}, ">= 0.0 - at `[$].rms_norm_eps`"),
        (GPT_OSS | {"sliding_window": -11}, ">= 0 - at `[$].sliding_window`"),
        (GPT_OSS | {"swiglu_limit": -7}, "> 0.0 - at `[$].swiglu_limit`"),
        (MOE | {"n_shared_experts": -1}, ">= 0 - at `[$].n_shared_experts`"),
        (MOE | {"routed_scaling_factor": -2.5}, "> 0.0 - at `[$].routed_scaling_factor`"),
        ({"num_hidden_layers": 10**9}, "<= 4096 - at `[$].num_hidden_layers`"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is unsupported"),
        (
            MOE | SLIDING | {"architectures": ["Qwen2MoeForCausalLM"]},
            "sliding_window needs layer_types",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    changes: dict[str, Any], told: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        load_model_config(edit(checkpoint(), tmp_path, **changes))


def test_gpt_oss_as_published_names_no_dtype(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    unsaid = dict.fromkeys(("torch_dtype", "attention_bias", "rope_theta"))
    config = load_model_config(edit(checkpoint(family="gpt_oss"), tmp_path, **unsaid))
    assert (config.dtype, config.rope.theta) == ("bfloat16", 150_000.0)
    assert config.qkv_bias
    assert config.output_bias
    assert config.windows == (11, 0)


@pytest.mark.parametrize(
    "config",
    [
        {},
        MODELS["gemma4-keys-are-values"]["config"],
        {"global_head_dim": 16},  # as wide as those of layers with a window
        {"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ],
    ids=str,
)
def test_gemma4_as_transformers_saves_it(
    config: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """It names each layer's heads, and no longer those of a kind of layers."""
    from transformers import AutoConfig

    folder = checkpoint(family="gemma4", num_layers=9, num_kv_heads=4, config=config)
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(saved | {"architectures": ["Gemma4ForCausalLM"]})
    )
    assert "global_head_dim" not in saved
    assert load_model_config(tmp_path).gemma4 == load_model_config(folder).gemma4


def test_deepseek_as_published_names_code_that_is_not_needed(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    config = load_model_config(edit(checkpoint(family="deepseek_v3"), tmp_path, auto_map=code))
    (group,) = config.kv_groups()
    assert (group.heads, group.head_dim, group.planes) == (1, 64, 1)


def test_missing_and_broken_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder") as raised:
        load_model_config(tmp_path / "nothing")
    assert raised.value.field == "--model"
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not a JSON object"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("content", [b'{"a": "\xff"}', b'{"a":' * 100_000], ids=["bytes", "deep"])
def test_configuration_that_nobody_can_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json is not a JSON object"):
        load_model_config(tmp_path)


def test_end_tokens_come_from_both_files(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = edit(checkpoint(), tmp_path, eos_token_id=7)
    generation = {"eos_token_id": [1, 5]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    config = load_model_config(folder)
    assert config.eos_token_ids == (1, 5, 7)


@pytest.mark.parametrize("as_object", [False, True])
def test_the_tokenizers_end_token_ends_a_text(
    checkpoint: Callable[..., Path], tmp_path: Path, as_object: bool
) -> None:
    """As of fine-tuned chat models, whose config.json has that of the model they began from."""
    folder = edit(checkpoint(), tmp_path, eos_token_id=7)
    end = {"content": "<|im_end|>"} if as_object else "<|im_end|>"
    added = [{"id": 8, "content": "<s>"}, {"id": 9, "content": "<|im_end|>", "special": True}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {}, "added_tokens": added}))
    assert load_model_config(folder).eos_token_ids == (7, 9)


@pytest.mark.parametrize("end", [None, [], 1 << 20])
def test_a_model_without_an_end_token_is_told(
    checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, end: Any
) -> None:
    folder = edit(checkpoint(), tmp_path, eos_token_id=end)
    assert load_model_config(folder).eos_token_ids == ()
    assert f"{folder} names no end token (eos_token_id of config.json" in caplog.text


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("DeepseekV2ForCausalLM", "deepseek_v2"),
        ("DeepseekV3ForCausalLM", "deepseek_v3"),
        ("Dots1ForCausalLM", "dots1"),
        ("Gemma4ForCausalLM", "gemma4_text"),
        ("GptOssForCausalLM", "gpt_oss"),
        ("Llama4ForCausalLM", "llama4_text"),
        ("LlamaForCausalLM", "llama"),
        ("MistralForCausalLM", "mistral"),
        ("MixtralForCausalLM", "mixtral"),
        ("Qwen2MoeForCausalLM", "qwen2_moe"),
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("Qwen3NextForCausalLM", "qwen3_next"),
    ],
)
def test_what_a_folder_leaves_out_is_what_transformers_takes(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    """What no shape of a weight would tell; else tokens were others, and nothing said so."""
    whole = CONFIG_MAPPING[kind]().to_dict() | {"architectures": [architecture]}
    if kind == "deepseek_v2":  # whose own defaults make no model
        whole |= {"num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
    if kind == "dots1":  # likewise
        whole |= {"num_experts_per_tok": 2, "n_routed_experts": 8, "max_window_layers": 9}
        del whole["layer_types"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(whole))
    expected = load_model_config(tmp_path)
    named = {
        "attention_bias", "first_k_dense_replace", "n_group", "n_shared_experts",
        "norm_topk_prob", "rms_norm_eps", "rope_parameters", "routed_scaling_factor",
        "shared_expert_intermediate_size", "sliding_window", "tie_word_embeddings", "topk_group",
        "topk_method", "use_sliding_window",
    }  # fmt: skip
    for name in named & whole.keys():
        config.write_text(json.dumps({k: v for k, v in whole.items() if k != name}))
        assert load_model_config(tmp_path) == expected, name
