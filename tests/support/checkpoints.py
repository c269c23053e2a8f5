"""Small random models in real Hugging Face folders, for tests, demos and benchmarks.

A folder holds ``config.json``, ``generation_config.json``, ``model.safetensors``, and a byte-level
BPE ``tokenizer.json`` with ``tokenizer_config.json`` and chat template. Equal arguments give equal
files. Generated text is noise, but every part of the path to it is real.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

BOS, EOS, TURN = "<|begin|>", "<|endoftext|>", "<|turn|>"
TOKENIZER_SIZE = 384
CORPUS = (
    "A prefill node computes the keys and values of a prompt, block by block.",
    "A decode node takes over the baton and writes the answer, one token at a time.",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "What is the capital of France? The capital of France is Paris, a city on the Seine.",
    "Write a short story about a relay race in which the runners hand over a baton.",
    "def add(first: int, second: int) -> int:\n    return first + second\n",
    "One, two, three, four, five, six, seven, eight, nine, ten. Straße, naïve, 東京, Ελλάδα.",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Specification of a model of the family ``llama``; subclasses are for other families.

    Attributes:
        seed: Seed of the weights.
        vocab_size: Vocabulary size of the model; at least the tokenizer's 384.
        dtype: dtype of the stored weights.
        tied: Whether the output projection shares the embedding.
    """

    seed: int = 0
    vocab_size: int = TOKENIZER_SIZE
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_position_embeddings: int = 512
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    tied: bool = False

    @property
    def special_tokens(self) -> list[str]:
        """Special tokens of the tokenizer."""
        return [BOS, EOS, TURN]

    def files(self, tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
        """Contents of the folder's JSON files (``config.json`` and others), by name."""
        begin, end, turn = map(tokenizer.token_to_id, (BOS, EOS, TURN))
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied,
            "bos_token_id": begin,
            "eos_token_id": end,
            "torch_dtype": self.dtype,
        }
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        }
        return {
            "config.json": config,
            "generation_config.json": {"bos_token_id": begin, "eos_token_id": [end, turn]},
            "tokenizer_config.json": tokenizer_config,
        }

    def shapes(self, config: dict[str, Any]) -> Shapes:
        """Names and shapes of all tensors, as in published checkpoints with this config."""
        hidden, middle = self.hidden_size, self.intermediate_size
        rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}"
            yield f"{name}.self_attn.q_proj.weight", (rows, hidden)
            yield f"{name}.self_attn.k_proj.weight", (kv_rows, hidden)
            yield f"{name}.self_attn.v_proj.weight", (kv_rows, hidden)
            yield f"{name}.self_attn.o_proj.weight", (hidden, rows)
            yield f"{name}.mlp.gate_proj.weight", (middle, hidden)
            yield f"{name}.mlp.up_proj.weight", (middle, hidden)
            yield f"{name}.mlp.down_proj.weight", (hidden, middle)
            yield f"{name}.input_layernorm.weight", (hidden,)
            yield f"{name}.post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab_size, hidden)

    def weight(self, name: str, noise: Tensor) -> Tensor:
        """Make a weight from normal noise; activations stay near 1, so that every part matters."""
        if noise.dim() == 1:
            return 1 + 0.2 * noise
        if "embed_tokens" in name:
            return noise * (0.3 if self.tied else 1.0)
        scale: float = math.prod(noise.shape[1:]) ** -0.5
        return noise * 1.5 * scale


def make_checkpoint(folder: str | Path, spec: CheckpointSpec | None = None) -> Path:
    """Write a model folder and return it."""
    spec = spec or CheckpointSpec()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = write_config(folder, spec)
    generator = torch.Generator().manual_seed(spec.seed)
    weights, dtype = dict[str, Tensor](), getattr(torch, spec.dtype)
    for name, shape in spec.shapes(config):
        noise = torch.randn(shape, generator=generator)
        weights[name] = spec.weight(name, noise).to(dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_config(folder: Path, spec: CheckpointSpec) -> dict[str, Any]:
    """Write all files of a folder except the weights; returns ``config.json``."""
    tokenizer = _tokenizer(spec.special_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = spec.files(tokenizer)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return files["config.json"]


def _tokenizer(special_tokens: list[str]) -> Tokenizer:
    """A byte-level BPE trained on `CORPUS`; it puts `BOS` before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def main() -> None:
    """``python -m tests.support.checkpoints FOLDER``: make a model for the demo."""
    parser = argparse.ArgumentParser(description="Make a small model with random weights.")
    parser.add_argument("folder", metavar="FOLDER", help="folder to write; created if missing")
    folder = parser.parse_args().folder
    spec = CheckpointSpec(
        hidden_size=512,
        intermediate_size=1536,
        num_layers=8,
        num_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
    )
    print(make_checkpoint(folder, spec))


if __name__ == "__main__":
    main()
