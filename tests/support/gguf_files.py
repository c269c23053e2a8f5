"""Writes GGUF files from Hugging Face folders, with llama.cpp's package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file


def permute(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Permute q or k of a Llama as llama.cpp's convert_hf_to_gguf.py does."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    folder: Path, target: Path, kind: Kind = Kind.F32, pre: str = "gpt-2", **more: Any
) -> dict[str, npt.NDArray[np.float32]]:
    """Write a folder's model as one file.

    Args:
        folder: Folder of a small model.
        target: File to write.
        kind: Type of all matrices.
        pre: Name of the pre-tokenizer.
        more: Further fields; their keys have two underscores for a dot.

    Returns:
        The dequantised weights by Hugging Face's names.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if config["num_key_value_heads"] != config["num_attention_heads"]:  # else it may be left out
        writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokenizer(writer, folder, pre)
    for key, value in more.items():
        writer.add_uint32(key.replace("__", "."), value)
    ours = gguf.get_tensor_name_map(
        {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture], config["num_hidden_layers"]
    )
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        heads = 0
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            which = "num_attention_heads" if ".q_" in name else "num_key_value_heads"
            heads = config[which]
        order = permute(np.arange(len(values)), heads) if heads else np.arange(len(values))
        stored = values[order]
        its = ours.get_name(name, (".weight", ".bias"))
        assert its is not None
        if values.ndim > 1 and kind != Kind.F32:
            packed = quantize(stored, kind)
            writer.add_tensor(its, packed, raw_dtype=kind)
            stored = dequantize(packed, kind)
        else:
            writer.add_tensor(its, stored)
        weights[name] = np.empty_like(values)
        weights[name][order] = stored
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _add_tokenizer(writer: Any, folder: Path, pre: str) -> None:
    said = json.loads((folder / "tokenizer.json").read_text())
    named = json.loads((folder / "tokenizer_config.json").read_text())
    special = {token["content"] for token in said["added_tokens"]}
    tokens = sorted(said["model"]["vocab"], key=said["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in said["model"]["merges"]])
    writer.add_bos_token_id(tokens.index(named["bos_token"]))
    writer.add_eos_token_id(tokens.index(named["eos_token"]))
    writer.add_add_bos_token(True)
    writer.add_chat_template(named["chat_template"])
