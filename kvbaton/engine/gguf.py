"""GGUF files as models: files made for llama.cpp, served without conversion.

`model_folder` writes what a file says about its model and tokenizer into a small folder in the
user's cache, once, with a link to the file in place of safetensors, so that all other code sees a
Hugging Face folder. `GGUFTensors` reads the weights under Hugging Face's names, dequantised.

The header is parsed here, since ``gguf.GGUFReader`` takes seconds for a large vocabulary; blocks of
quantised weights are decoded by ``gguf.quants``. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvbaton.errors import ConfigError, ModelError, stand_in

if TYPE_CHECKING:
    import tokenizers

WEIGHTS = "model.gguf"
"""Name of the link to the file, in a folder written by `model_folder`."""
NEEDS_CACHE = "a GGUF file needs a folder that can be written, which XDG_CACHE_HOME may name"
MAGIC = b"GGUF"
FORM = 1
"""Version of the folders; incremented when their content changes."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"} | {
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, ARRAY = 8, 9
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens: special ones, and added ones that are not special."""

DIGITS_AND_GPT2 = "digits"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS = {"default": "", "gpt-2": "", "smollm": DIGITS_AND_GPT2, "qwen2": QWEN2} | dict.fromkeys(
    ("llama-bpe", "llama3", "llama-v3"), LLAMA3
)
"""Patterns that split text before merges, by ``tokenizer.ggml.pre``; empty for GPT-2's own."""

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192}


def model_folder(model: str | Path) -> str:
    """The folder to serve: for a GGUF file, the one that describes it; else the path itself.

    Raises:
        ConfigError: The file is not GGUF, is truncated, or can't be served; or the folder can't be
            written.
    """
    if not str(model).endswith(".gguf"):
        return str(model)
    path = Path(model).absolute()
    with GGUFFile(path) as file:
        stat = path.stat()
        said = f"{FORM} {path} {stat.st_size} {stat.st_mtime_ns}".encode() + file.header
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError as error:  # the user has no home folder
            raise ModelError(f"{NEEDS_CACHE}: {error}") from error
        folder = cache / "kvbaton" / "gguf" / hashlib.blake2b(said, digest_size=16).hexdigest()
        if not folder.is_dir():
            _write_folder(file, folder)
    return str(folder)


def _write_folder(file: GGUFFile, folder: Path) -> None:
    """Write a folder under another name and rename it, since several processes may write it.

    Raises:
        ConfigError: The file can't be served, or the folder can't be written.
    """
    config, parts = _config(file), _tokenizer(file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder.parent))
        for name, content in {"config.json": config, **parts}.items():
            (aside / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        (aside / WEIGHTS).symlink_to(file.path)
        try:
            aside.rename(folder)
        except OSError:
            shutil.rmtree(aside)
            if not folder.is_dir():  # else another process has written it
                raise
    except OSError as error:
        raise ModelError(f"{NEEDS_CACHE}: {folder}: {error.strerror}") from error


# --- the file ---


@dataclass(frozen=True)
class TensorInfo:
    """A tensor: its shape (rows first), its ggml type, and the offset of its bytes in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


class GGUFFile:
    """An open file: what it says about the model, and where its tensors are.

    Attributes:
        path: Path of the file.
        fields: Values by key.
        tensors: Tensors by their names in the file.
        header: All bytes before the tensors' data.

    Raises:
        ConfigError: It is not a GGUF file, or is truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # mmap refuses an empty file with a ValueError
            raise ModelError(f"can't read {path}: {error}") from error
        self._at = 0
        try:
            self._read_header()
        except BaseException:
            self._data.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._data.close()  # fails if an array still uses it

    def _read_header(self) -> None:
        if self._take(4) != MAGIC:
            raise ModelError(f"{self.path} is no GGUF file{stand_in(self._data[:64])}")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ModelError(f"{self.path} has GGUF version {version}; need 2 or 3")
        num_tensors, num_fields = self._scalar("<Q"), self._scalar("<Q")
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            self.fields[key] = self._value(self._scalar("<I"))
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._string()
            shape = tuple(self._scalar("<Q") for _ in range(self._scalar("<I")))
            infos[name] = shape[::-1], self._scalar("<I"), self._scalar("<Q")
        self.header = self._data[: self._at]
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self.refuse(f"general.alignment is {alignment!r}")
        data = -(-self._at // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, (shape, kind, start) in infos.items():
            values, size = self._block(kind)
            if not shape or shape[-1] % values:
                raise self.refuse(f"tensor {name!r} has shape {list(shape)}")
            end = data + start + math.prod(shape) // values * size
            if end > len(self._data):
                raise ModelError(
                    f"{self.path} is truncated: tensor {name!r} ends at byte {end:,} "
                    f"of {len(self._data):,}"
                )
            self.tensors[name] = TensorInfo(shape, kind, data + start)

    def _block(self, kind: int) -> tuple[int, int]:
        """Number of values and of bytes per block of a ggml type."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            values, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError):
            raise self.refuse(f"tensor type {kind} is unknown") from None
        return int(values), int(size)

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """Read a tensor, dequantised.

        Raises:
            ConfigError: Its type can't be decoded.
        """
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        values, size = self._block(info.kind)
        count = math.prod(info.shape) // values * size
        data = np.frombuffer(self._data[info.start : info.start + count], np.uint8)
        rows = data.reshape(*info.shape[:-1], info.shape[-1] // values * size)
        kind = GGMLQuantizationType(info.kind)
        try:
            found: npt.NDArray[np.float32] = dequantize(rows, kind)
            return found
        except NotImplementedError as error:
            raise self.refuse(f"tensors of type {kind.name} can't be decoded") from error

    def field(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a key.

        Raises:
            ConfigError: It is missing and has no default, or is of another type.
        """
        value = self.fields.get(key, default)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.refuse(f"{key} is {'missing' if value is None else f'{value!r:.60}'}")
        return value

    def refuse(self, what: str) -> ConfigError:
        """An error that says why the file can't be served."""
        return ModelError(f"{self.path} can't be served: {what}")

    # --- the header ---

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise ModelError(f"{self.path} is truncated: its header is cut off")
        start, self._at = self._at, end
        return self._data[start:end]

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _string(self) -> str:
        return self._take(self._scalar("<Q")).decode(errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY:
            raise self.refuse(f"a field of type {kind}")
        inner, count = self._scalar("<I"), self._scalar("<Q")
        if inner in SCALARS:
            form = np.dtype(SCALARS[inner])
            return np.frombuffer(self._take(count * form.itemsize), form).tolist()
        if inner != STRING:
            raise self.refuse(f"an array of type {inner}")
        return [self._string() for _ in range(count)]


# --- weights ---


class GGUFTensors(GGUFFile):
    """The tensors of a file under Hugging Face's names."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._names: dict[str, str] = {}
        for stored in self.tensors:
            # ``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``; others stay.
            match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored)
            name = stored
            if match is not None and match[2] in NAMES:
                layer = "" if match[1] is None else f"model.layers.{match[1]}."
                name = f"{layer}{NAMES[match[2]]}.{match[3]}"
            self._names[name] = stored
        architecture = self.field("general.architecture", str)
        heads = self.field(f"{architecture}.attention.head_count", int)
        kv_heads = self.field(f"{architecture}.attention.head_count_kv", int, heads)
        self._heads = {"attn_q": heads, "attn_k": kv_heads}
        # llama.cpp rotates pairs of adjacent features, Hugging Face the two halves of a head.
        self._permuted = architecture == "llama"

    def keys(self) -> Iterable[str]:
        """Hugging Face names of all tensors."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return self.tensors[self._names[name]].shape

    def read(self, name: str, part: Any) -> Any:
        """Read a part of a tensor in Hugging Face's order: float32."""
        import torch

        stored = self._names[name]
        values = self.floats(stored)
        heads = self._heads.get(stored.rpartition("blk.")[2].partition(".")[2].split(".")[0], 0)
        if self._permuted and heads:
            pairs = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        return torch.from_numpy(np.require(values[part], requirements=["C", "W"]))


# --- configuration and tokenizer ---


def _config(file: GGUFFile) -> dict[str, Any]:
    """Content of ``config.json``."""
    architecture = file.field("general.architecture", str)
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise file.refuse(f"architecture {architecture!r} is none of {known}")

    def said(key: str, kind: Any = int, default: Any = None) -> Any:
        return file.field(f"{architecture}.{key}", kind, default)

    scaling = said("rope.scaling.type", str, "none")
    window = said("attention.sliding_window", int, 0)
    if scaling != "none" or window:
        what = f"sliding window {window}" if window else f"rope scaling {scaling!r}"
        raise file.refuse(f"{what} of a GGUF file is not supported")
    heads = said("attention.head_count")
    hidden = said("embedding_length")
    tokens = file.field("tokenizer.ggml.tokens", list)
    ends = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.fields.get(f"tokenizer.ggml.{name}") for name in ends]
    if heads < 1:
        raise file.refuse(f"{heads} heads")
    head_dim = said("attention.key_length", int, hidden // heads)
    if (turned := said("rope.dimension_count", int, head_dim)) != head_dim:
        raise file.refuse(f"{turned} features of a head of {head_dim} are turned")
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": said("feed_forward_length"),
        "num_hidden_layers": said("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": said("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": said("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": said("context_length"),
        "rope_theta": said("rope.freq_base", float, 10_000.0),
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "hidden_act": "silu",
        "bos_token_id": file.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({number for number in found if isinstance(number, int)}),
        "torch_dtype": "float32",
    }
    _check_shapes(file, config)
    return config


def _check_shapes(file: GGUFFile, config: dict[str, Any]) -> None:
    """Refuse sizes that the tensors do not have, before a model of these sizes is made."""
    hidden, middle, dim = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    wanted = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "blk.0.attn_q.weight": (config["num_attention_heads"] * dim, hidden),
        "blk.0.attn_k.weight": (config["num_key_value_heads"] * dim, hidden),
        "blk.0.ffn_up.weight": (middle, hidden),
    }
    for name, shape in wanted.items():
        found = file.tensors[name].shape if name in file.tensors else None
        if found != shape:
            raise file.refuse(f"tensor {name!r} has shape {found}, not {shape}")
    blocks = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if blocks != config["num_hidden_layers"]:
        raise file.refuse(f"it has {blocks} blocks, not {config['num_hidden_layers']}")


def _rope_scaling(file: GGUFFile) -> dict[str, Any] | None:
    """Llama 3's rope scaling, if the file has factors of frequencies, and they are Llama 3's.

    Raises:
        ConfigError: The factors are others.
    """
    if "rope_freqs.weight" not in file.tensors:
        return None
    factors = file.floats("rope_freqs.weight")
    factor = float(factors.max())
    theta = file.field("llama.rope.freq_base", float, 10_000.0)
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    frequencies = theta ** -(np.arange(len(factors)) / len(factors))
    turns = LLAMA3_ROPE["original"] * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / (smooth + (1 - smooth) / factor), rtol=1e-3):
        raise file.refuse("its rope_freqs are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": LLAMA3_ROPE["original"],
    }


def _tokenizer(file: GGUFFile) -> dict[str, Any]:
    """Contents of ``tokenizer.json`` and ``tokenizer_config.json``."""
    from tokenizers.processors import TemplateProcessing

    tokens = file.field("tokenizer.ggml.tokens", list)
    if not all(isinstance(token, str) for token in tokens):
        raise file.refuse("a token is no string")
    model = file.field("tokenizer.ggml.model", str)
    pre = file.field("tokenizer.ggml.pre", str, "default")
    if model != "gpt2" or pre not in SPLITS:  # not byte-level BPE, or an unknown one
        raise file.refuse(f"its tokenizer ({model}, {pre}) is not supported")
    split = SPLITS[pre]
    backend = _backend(file, tokens, split)

    def token_of(name: str) -> str | None:
        number = file.fields.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None

    config = {
        f"{ours}_token": token
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token := token_of(theirs)) is not None
    }
    bos = config.get("bos_token")
    if bos and file.field("tokenizer.ggml.add_bos_token", bool, split == LLAMA3):
        special = [(bos, tokens.index(bos))]
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=special
        )
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if "tokenizer.chat_template" in file.fields:
        config["chat_template"] = file.field("tokenizer.chat_template", str)
    return {"tokenizer.json": json.loads(backend.to_str()), "tokenizer_config.json": config}


def _backend(file: GGUFFile, tokens: list[str], split: str) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer with the file's vocabulary, merges and added tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    pairs = (str(pair).partition(" ") for pair in file.field("tokenizer.ggml.merges", list))
    merges = [(left, right) for left, _, right in pairs]
    types = file.field("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(types) != len(tokens):
        raise file.refuse(f"{len(tokens)} tokens, but {len(types)} types of tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split == LLAMA3))
    except Exception as error:  # the library raises bare Exception
        raise file.refuse(f"its tokenizer: {error}") from error
    if split in ("", DIGITS_AND_GPT2):
        own = ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), own]) if split else own
    else:
        own = ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = Sequence([Split(Regex(split), "isolated"), own])
    if split == QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    for kind, add in ((CONTROL, backend.add_special_tokens), (USER_DEFINED, backend.add_tokens)):
        chosen = (token for token, its in zip(tokens, types, strict=True) if its == kind)
        add([AddedToken(token, special=kind == CONTROL, normalized=False) for token in chosen])
    return backend
