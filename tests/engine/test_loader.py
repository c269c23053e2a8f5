"""Weights: files as they come, what is wrong with them by name, dummies, and shares of ranks."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvbaton.engine.attention import attention_with_sinks, rotate
from kvbaton.engine.collectives import Barrier, HostCollectives, Shard
from kvbaton.engine.loader import INDEX, SINGLE, load_model
from kvbaton.engine.model_config import ModelConfig, load_model_config
from kvbaton.engine.models.layers import Heads, Rotary
from kvbaton.engine.models.llama import LlamaForCausalLM
from kvbaton.errors import ConfigError
from tests.support.families import FamilySpec, make_family

Checkpoint = Callable[..., Path]
CPU = torch.device("cpu")


class FreshAttention:
    """Attention of one sequence without a cache."""

    states = None

    def attend(self, layer: int, heads: Heads, rotary: Rotary) -> Tensor:
        query, key, value, scale, sinks, norms, _ = heads
        assert key is not None
        assert value is not None
        if norms is not None:
            query, key = norms.apply((query, key))
        query, key = rotate(query, rotary), rotate(key, rotary)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        if sinks is not None:
            number, count, _ = query.shape[1:]
            key, value = (x.repeat_interleave(number // x.shape[1], 1) for x in (key, value))
            hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
            out = attention_with_sinks(query, key, value, hidden, scale, sinks[:, None, None])
            return out[0].transpose(0, 1)
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def logits(model: LlamaForCausalLM) -> Tensor:
    with torch.inference_mode():
        tokens = torch.arange(20, 40)
        return model.logits(model(tokens, torch.arange(20), FreshAttention()))


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


def test_shards_and_one_file_give_the_same_model(checkpoint: Checkpoint) -> None:
    one, three = checkpoint(), checkpoint(shards=3)
    assert (three / INDEX).exists()
    assert not (three / SINGLE).exists()
    models = [load_model(load_model_config(folder), device=CPU) for folder in (one, three)]
    assert torch.equal(logits(models[0]), logits(models[1]))


@pytest.mark.parametrize("own", [True, False])
def test_a_stored_output_projection_is_used_even_if_the_folder_says_tied(
    own: bool,
    checkpoint: Checkpoint,
    tmp_path: Path,
    reference: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As transformers does: a fine-tune may have changed it, and kept ``tie_word_embeddings``."""
    folder = copy_of(checkpoint(tied=True), tmp_path)
    tensors = load_file(folder / SINGLE)
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1] += own
    save_file(tensors | {"lm_head.weight": head}, folder / SINGLE, {"format": "pt"})
    model = load_model(load_model_config(folder), device=CPU)
    with torch.inference_mode():
        expected = reference(folder)(torch.arange(20, 40)[None]).logits[0]
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
    assert (model.lm_head is not None) == own
    assert ("tie_word_embeddings" in caplog.text) == own


def test_dtype_is_converted_on_the_way(checkpoint: Checkpoint) -> None:
    config = load_model_config(checkpoint(), "bfloat16")
    model = load_model(config, device=CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.rotary.frequencies.dtype == torch.float32


@pytest.mark.parametrize(
    ("asked", "meant"), [("half", "float16"), ("float", "float32"), ("float16", "float16")]
)
def test_a_dtype_may_be_named_as_elsewhere(asked: str, meant: str, checkpoint: Checkpoint) -> None:
    config = load_model_config(checkpoint(), asked, kv_cache_dtype="fp8_e4m3")
    assert (config.dtype, config.kv_dtype) == (meant, "float8_e4m3fn")


def test_models_of_several_threads_keep_their_dtypes(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are built at the same time, and torch's default dtype belongs to the process."""
    both_are_building = threading.Barrier(2, timeout=20)

    def build(config: ModelConfig, shard: Shard) -> LlamaForCausalLM:
        both_are_building.wait()
        return LlamaForCausalLM(config, shard)

    monkeypatch.setattr("kvbaton.engine.loader.LlamaForCausalLM", build)
    found: dict[str, set[torch.dtype]] = {}

    def load(dtype: str) -> None:
        model = load_model(load_model_config(checkpoint(), dtype), device=CPU)
        found[dtype] = {parameter.dtype for parameter in model.parameters()}

    threads = [threading.Thread(target=load, args=(name,)) for name in ("float16", "bfloat16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == {name: {getattr(torch, name)} for name in ("float16", "bfloat16")}
    assert torch.get_default_dtype() == torch.float32


def test_a_missing_shard_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copy_of(checkpoint(shards=3), tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00003\.safetensors, which is missing"):
        load_model(load_model_config(folder), device=CPU)


def test_a_truncated_file_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copy_of(checkpoint(), tmp_path)
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"model\.safetensors is broken or truncated"):
        load_model(load_model_config(folder), device=CPU)


def test_a_folder_without_weights_and_a_broken_index(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = copy_of(checkpoint(), tmp_path)
    (folder / SINGLE).unlink()
    with pytest.raises(ConfigError, match="has neither"):
        load_model(load_model_config(folder), device=CPU)
    for broken in (b'{"weight_map": 3}', b'{"weight_map": "\xff"}', b'{"a":' * 100_000):
        (folder / INDEX).write_bytes(broken)
        with pytest.raises(ConfigError, match=r"index\.json is broken"):
            load_model(load_model_config(folder), device=CPU)


def test_a_missing_tensor_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copy_of(checkpoint(tied=True), tmp_path)
    config = replace(load_model_config(folder), tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"no tensor 'lm_head\.weight'"):
        load_model(config, device=CPU)


def test_a_tensor_of_the_wrong_shape_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copy_of(checkpoint(), tmp_path)
    weights = load_file(folder / SINGLE)
    weights["model.norm.weight"] = torch.ones(65)
    save_file(weights, folder / SINGLE)
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' in .*\[65\].*\[64\]"):
        load_model(load_model_config(folder), device=CPU)


# --- dummy ---


def dummy(folder: Path, seed: int, shard: Shard | None = None) -> LlamaForCausalLM:
    config = load_model_config(folder)
    return load_model(config, device=CPU, load_format="dummy", seed=seed, shard=shard)


def test_dummy_weights_follow_the_seed_and_need_no_files(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    shutil.copy(checkpoint() / "config.json", tmp_path)
    first, again, other = dummy(tmp_path, 1), dummy(tmp_path, 1), dummy(tmp_path, 2)
    layers: Any = first.layers
    assert torch.equal(logits(first), logits(again))
    assert not torch.equal(logits(first), logits(other))
    weight = layers[0].mlp.down_proj.weight
    assert float(weight.std()) == pytest.approx(0.02, rel=0.05)
    assert float(weight.mean()) == pytest.approx(0.0, abs=0.001)
    assert not torch.equal(weight, layers[1].mlp.down_proj.weight)
    assert (first.norm.weight == 1).all()


# --- tensor parallelism ---


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "dots1", "qwen2_moe-experts"])
def test_ranks_together_are_the_whole_model(
    family: str, load_format: str, size: int, checkpoint: Checkpoint
) -> None:
    family, _, whole_experts = family.partition("-")
    biases = {"config": {"attention_bias": True, "mlp_bias": True}} if family == "llama" else {}
    config = load_model_config(checkpoint(family=family, **biases))
    whole = load_model(config, device=CPU, load_format=load_format)  # type: ignore[arg-type]
    barrier = Barrier(size)
    found: dict[int, Tensor] = {}

    def run(rank: int) -> None:
        shard = Shard(rank, size, HostCollectives(barrier, rank), bool(whole_experts))
        part = load_model(config, device=CPU, load_format=load_format, shard=shard)  # type: ignore[arg-type]
        found[rank] = logits(part)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for rank in range(size):
        torch.testing.assert_close(found[rank], logits(whole), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [3, 8])
def test_a_size_that_does_not_divide_is_refused(size: int, checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=f"{size} does not divide .* one of 1, 2, 4") as raised:
        load_model(load_model_config(checkpoint()), device=CPU, shard=Shard(0, size))
    assert raised.value.field == "--tensor-parallel-size"


# --- the checkpoints themselves ---


def test_equal_specs_give_equal_folders(tmp_path: Path) -> None:
    spec = FamilySpec(family="qwen3", seed=5, shards=2)
    first, second = (make_family(tmp_path / name, spec) for name in ("a", "b"))
    assert sorted(p.name for p in first.iterdir()) == sorted(p.name for p in second.iterdir())
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_transformers_reads_the_tokenizer(family: str, checkpoint: Checkpoint) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint(family=family))
    text = "The quick brown fox, Straße 東京\n"
    ids = tokenizer(text)["input_ids"]
    assert max(ids) < 384
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    chat = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|begin|><|turn|>user\nHello<|turn|>\n<|turn|>assistant\n"


def test_weights_that_do_not_fit_into_memory(checkpoint: Checkpoint) -> None:
    config = replace(load_model_config(checkpoint()), vocab_size=10**12)
    with pytest.raises(ConfigError, match=r"--model: its weights in \w+ do not fit .* of cpu"):
        load_model(config, device=CPU)
