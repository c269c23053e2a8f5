"""Weights: from the safetensors of a Hugging Face folder, a GGUF file, or random from a seed."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvbaton.engine.collectives import Shard
from kvbaton.engine.config import LoadFormat
from kvbaton.engine.gguf import WEIGHTS, GGUFTensors
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.models.deepseek import DeepseekForCausalLM
from kvbaton.engine.models.gemma import Gemma3ForCausalLM, Gemma4ForCausalLM
from kvbaton.engine.models.layers import Piece, pieces_of
from kvbaton.engine.models.llama import LlamaForCausalLM
from kvbaton.engine.models.llama4 import Llama4ForCausalLM
from kvbaton.engine.models.qwen3_next import Qwen3NextForCausalLM
from kvbaton.engine.models.vision_layers import VisionTower
from kvbaton.engine.models.vision_towers import (
    Qwen3VisionTower,
    Qwen25VisionTower,
    SiglipVisionTower,
)
from kvbaton.engine.quantized_tensors import MXFP4Tensor, ScaledTensor, Stored, find_tensor
from kvbaton.errors import ConfigError, ModelError
from kvbaton.kernels.digest import WEYL, mix
from kvbaton.kernels.mxfp4 import pack_mxfp4, quantize_mxfp4
from kvbaton.kernels.quantize_fp8 import quantize_fp8
from kvbaton.messages import UNREADABLE

logger = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOWER_PARTS = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")
STAGED_FROM = 1 << 20
"""Size in bytes from which on a tensor is copied through pinned memory."""

COMPARED_ROWS = 1 << 12
"""Rows of two tensors that are compared at a time."""

STAGED_BYTES, STAGED_PARTS = 16 << 20, 3
"""Size in bytes and number of pinned buffers: one is filled while others are copied."""

DUMMY_SCALE = 0.02
"""Standard deviation of dummy weights, as in the usual initialisation of models."""

DUMMY_CHUNK = 1 << 24
"""Number of dummy weights made at a time, which bounds the 64-bit intermediates."""

DECODERS: dict[str, type[LlamaForCausalLM]] = {
    "DeepseekV2ForCausalLM": DeepseekForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma4ForCausalLM": Gemma4ForCausalLM,
    "Llama4ForCausalLM": Llama4ForCausalLM,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
}
"""Model classes of architectures that are not Llama with other settings."""

TOWERS: dict[str, type[Qwen25VisionTower | Qwen3VisionTower | SiglipVisionTower]] = {
    "Gemma3ForCausalLM": SiglipVisionTower,
    "Qwen2_5_VLForConditionalGeneration": Qwen25VisionTower,
    "Qwen3VLForConditionalGeneration": Qwen3VisionTower,
}


def load_model(
    config: ModelConfig,
    *,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    shard: Shard | None = None,
) -> LlamaForCausalLM:
    """Build a model and fill it.

    Args:
        config: Configuration of the model.
        device: Device of the weights.
        load_format: ``dummy`` makes random weights from `seed`, equal on every device and for any
            number of ranks.
        seed: Seed of dummy weights.
        shard: This rank's share; None for the whole model.

    Raises:
        ConfigError: A file or tensor is missing, broken or of the wrong shape.
    """
    shard = shard or Shard()
    _check_shard(config, shard)
    if config.tie_word_embeddings and load_format != "dummy" and has_own_head(config.folder):
        logger.warning(
            "%s has an output projection (lm_head) that differs from its embedding: it is used, "
            "although config.json says tie_word_embeddings",
            config.folder,
        )
        config = replace(config, tie_word_embeddings=False)
    with empty_weights(config.dtype, device):
        model = DECODERS.get(config.architecture, LlamaForCausalLM)(config, shard)
    fill_weights(pieces_of(model), config, load_format, seed, device)
    return model.eval()


def load_vision(
    config: ModelConfig, *, device: torch.device, load_format: LoadFormat = "auto", seed: int = 0
) -> VisionTower:
    """Build the vision tower of a model, without its language model, and fill it.

    Args:
        config: Configuration of the whole model; the tower has its dtype.
        device: Device of the weights.
        load_format: See `load_model`.
        seed: Seed of dummy weights.

    Raises:
        ConfigError: The model has no tower, or a file or tensor is missing, broken or of the wrong
            shape.
    """
    vision = config.require_vision()
    with empty_weights(config.dtype, device):
        tower = TOWERS[config.architecture](vision)
    fill_weights(pieces_of(tower), config, load_format, seed, device)
    return tower.eval()


def fill_weights(
    pieces: Iterable[Piece],
    config: ModelConfig,
    load_format: LoadFormat,
    seed: int,
    device: torch.device,
) -> None:
    """Fill the weights of a model, or of a part of it.

    Args:
        pieces: Pieces to fill; other tensors of the folder are not read.
        config: Configuration of the model, whose folder has the weights, quantised or not.
        load_format: See `load_model`.
        seed: Seed of dummy weights.
        device: Device of the weights.

    Raises:
        ConfigError: A file or tensor is missing, broken or of the wrong shape.
    """
    if load_format == "dummy":
        for piece in pieces:
            _fill_dummy(piece, seed)
        return
    quantization = config.quantization
    with stored_tensors(config.folder, device) as tensors:
        for piece in pieces:
            stored = find_tensor(tensors, piece.name, quantization)
            _fill(piece, stored, online=quantization is not None and quantization.online)


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, ordered by name, or its GGUF file.

    Raises:
        ConfigError: There are none, or the index is broken or names a missing file.
    """
    if not (folder / INDEX).exists():
        whole = [folder / name for name in (SINGLE, WEIGHTS) if (folder / name).exists()]
        if not whole:
            raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}")
        return whole[:1]
    path = folder / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        weight_map = msgspec.convert(index.get("weight_map"), dict[str, str])
    except UNREADABLE as error:
        raise ModelError(f"{path} is broken: {error}") from error
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.exists():
            raise ModelError(f"{path} names {file.name}, which is missing")
    return files


def _check_shard(config: ModelConfig, shard: Shard) -> None:
    """Check that ranks get equal parts; with fewer KV heads than ranks, all are shared alike."""
    moe, split = config.moe, {"heads": config.num_heads}
    if moe is None or not all(moe.layers):
        split["intermediate size"] = config.intermediate_size
    if moe is not None and shard.expert_parallel:
        split["experts"] = moe.num_experts
    elif moe is not None:
        split["experts' intermediate size"] = moe.intermediate_size
    elif shard.expert_parallel:
        raise ConfigError("--enable-expert-parallel", f"{config.architecture} has no experts")
    if config.linear_attention is not None:
        split["linear_num_key_heads"] = config.linear_attention.num_key_heads
    if moe is not None and moe.shared_intermediate_size:
        split["shared experts' intermediate size"] = moe.shared_intermediate_size

    kv_heads = {config.heads_of(layer)[0] for layer in range(config.num_layers)}

    def fits(size: int) -> bool:
        pairs = [sorted((heads, size)) for heads in kv_heads]
        replicated = not any(more % fewer for fewer, more in pairs)
        return replicated and not any(number % size for number in split.values())

    if fits(shard.size):
        return
    sizes = [size for size in range(1, config.num_heads + 1) if fits(size)]
    numbers = ", ".join(f"{name} {number}" for name, number in split.items())
    raise ConfigError(
        "--tensor-parallel-size",
        f"{shard.size} does not divide the model's {numbers} and KV heads "
        f"{', '.join(map(str, sorted(kv_heads)))}; "
        f"give one of {', '.join(map(str, sizes))}",
    )


class _Floats(TorchFunctionMode):
    """Sets the dtype of new tensors in this thread; torch's default would be for all ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({"dtype": self._dtype} | kwargs if func is torch.empty else kwargs))


@contextmanager
def empty_weights(dtype: str, device: torch.device) -> Iterator[None]:
    """Give new weights of this thread a dtype and a device.

    Raises:
        ConfigError: They do not fit into memory.
    """
    try:
        with device, _Floats(getattr(torch, dtype)):
            yield
    except RuntimeError as error:
        is_full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not is_full:
            raise
        reason = str(error).partition("\n")[0]
        problem = f"its weights in {dtype} do not fit into the memory of {device}: {reason}"
        raise ModelError(problem) from error


# --- from files ---


class Uploader:
    """Copies tensors to a device; to a GPU through pinned memory, which torch's threads fill.

    From a file's pages, the driver's own copies reach 8 GB/s, and these 44 (H200, 16 cores).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def __call__(self, x: Tensor) -> Tensor:
        """Copy a tensor to the device, on its current stream; on the CPU, return it unchanged."""
        if self._device.type != "cuda" or x.nbytes < STAGED_FROM:
            return x.to(self._device)
        there = torch.empty(x.shape, dtype=x.dtype, device=self._device)
        while len(self._ring) < STAGED_PARTS:
            part = torch.empty(STAGED_BYTES, dtype=torch.uint8, pin_memory=True)
            self._ring.append((part, torch.cuda.Event()))  # type: ignore[no-untyped-call]
        both = (side.view(-1).view(torch.uint8) for side in (x.contiguous(), there))
        for source, target in zip(*(torch.split(b, STAGED_BYTES) for b in both), strict=True):
            part, over = self._ring.popleft()
            over.synchronize()
            target.copy_(part[: len(source)].copy_(source), non_blocking=True)
            over.record()
            self._ring.append((part, over))
        return there


class FileTensor:
    """`Stored` in a file; parts are read to a device, where they may be dequantised."""

    def __init__(
        self, name: str, file: Path, handle: safe_open | GGUFTensors, upload: Uploader
    ) -> None:
        self.where, self._upload = f"tensor {name!r} in {file}", upload
        self._part: Callable[[tuple[slice, ...]], Tensor]
        if isinstance(handle, GGUFTensors):
            self.shape, self.dtype = handle.shape(name), "F32"
            self._part = partial(handle.read, name)
        else:
            there: Any = handle.get_slice(name)  # type: ignore[no-untyped-call]
            self.shape, self.dtype = tuple(there.get_shape()), str(there.get_dtype())
            self._part = there.__getitem__

    def read(self, *index: slice) -> Tensor:
        """See `Stored.read`."""
        return self._upload(self._part(index))


@contextmanager
def stored_tensors(folder: Path, device: torch.device) -> Iterator[dict[str, Stored]]:
    """Open a folder's files; yields their tensors by our names.

    Raises:
        ConfigError: A file is missing or broken.
    """
    upload = Uploader(device)
    with ExitStack() as stack:
        tensors: dict[str, Stored] = {}
        for file in shard_files(folder):
            handle: safe_open | GGUFTensors
            try:
                if file.name == WEIGHTS:
                    handle = GGUFTensors(file.resolve())
                else:
                    handle = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} is broken or truncated: {error}") from error
            stack.enter_context(handle)
            for name in handle.keys():
                # Multimodal checkpoints prefix their parts differently: unify the names.
                ours = name.removeprefix("model.") if name.startswith(TOWER_PARTS) else name
                ours = ours.replace("vision_tower.vision_model.", "vision_tower.", 1)
                ours = ours.replace("model.language_model.", "model.", 1)
                ours = ours.removeprefix("language_model.")
                tensors[ours] = FileTensor(name, file, handle, upload)
        yield tensors


def has_own_head(folder: Path) -> bool:
    """Whether a folder has an output projection that differs from its embedding.

    Raises:
        ConfigError: A file is missing or broken.
    """
    with stored_tensors(folder, torch.device("cpu")) as tensors:
        head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
        if head is None or embedding is None:
            return False
        if head.shape != embedding.shape:
            return True
        parts = (slice(i, i + COMPARED_ROWS) for i in range(0, head.shape[0], COMPARED_ROWS))
        return any(
            not torch.equal(head.read(part).float(), embedding.read(part).float()) for part in parts
        )


def load_kv_scales(config: ModelConfig, load_format: LoadFormat) -> dict[int, tuple[float, float]]:
    """Scales of K and V for an FP8 cache, for each layer whose scales in the checkpoint are not 1.

    A latent row, which is key and value at once, has the scale of K.

    Raises:
        ConfigError: A file is missing or broken, or a scale is not a positive number.
    """
    if config.kv_dtype == config.dtype or load_format == "dummy":
        return {}
    with stored_tensors(config.folder, torch.device("cpu")) as tensors:
        found = {
            layer: (
                _kv_scale(tensors, layer, "k"),
                _kv_scale(tensors, layer, "k" if config.mla else "v"),
            )
            for layer in range(config.num_layers)
        }
    return {layer: scales for layer, scales in found.items() if scales != (1.0, 1.0)}


def _kv_scale(tensors: Mapping[str, Stored], layer: int, kind: str) -> float:
    """A layer's scale of K or V, by any of its names; 1 if there is none."""
    name = f"model.layers.{layer}.self_attn"
    for each in (f"{kind}_scale", f"{kind}_proj.{kind}_scale", f"{kind}_proj.output_scale"):
        stored = tensors.get(f"{name}.{each}")
        if stored is not None:
            scale = float(stored.read()) if math.prod(stored.shape) == 1 else math.nan
            if not 0 < scale < math.inf:
                raise ModelError(f"{stored.where} must be one positive number")
            return scale
    return 1.0


def _fill(piece: Piece, stored: Stored, *, online: bool) -> None:
    """Fill a piece; if `online`, quantise floats for FP8 targets."""
    if stored.shape != piece.shape:
        raise ModelError(
            f"{stored.where} has shape {list(stored.shape)}, "
            f"config.json asks for {list(piece.shape)}"
        )
    number = piece.target.shape[piece.dim] if piece.number is None else piece.number
    part = slice(piece.start, piece.start + number)
    index: tuple[slice, ...] = (*(slice(None),) * piece.dim, part)
    if piece.index is not None:
        index = (slice(piece.index, piece.index + 1), *index)
    if piece.scales is None:
        wide = stored.read(*index)
        piece.target.copy_(wide if piece.index is None else wide[0])
        return
    packed = piece.number is not None
    if packed and isinstance(stored, MXFP4Tensor):
        numbers, scales = (x[0] for x in pack_mxfp4(*stored.read_parts(*index)))
    elif not packed and isinstance(stored, ScaledTensor):
        numbers, scales = stored.read_parts(*index, runs=piece.scales.shape[1])
    elif not packed and online:
        wide = stored.read(*index)
        numbers, scales = quantize_fp8(wide, wide.shape[1])
    else:
        need = f"{piece.name}_blocks" if packed else "F8_E4M3"
        raise ModelError(
            f"{stored.where} has dtype {stored.dtype}; need {need}, or its module among those "
            "that quantization_config leaves alone"
        )
    piece.target.copy_(numbers)
    piece.scales.copy_(scales)


# --- dummy ---


def _fill_dummy(piece: Piece, seed: int) -> None:
    """Fill with dummy weights: 1 for scales and norms; else uniform, with `DUMMY_SCALE`.

    A weight depends on its element's number in the whole tensor. MXFP4 is rounded from these.
    """
    if piece.number is not None:
        assert piece.scales is not None
        shape = list(piece.shape[1:])
        shape[piece.dim] = piece.number
        floats = torch.empty(shape, dtype=torch.float32, device=piece.target.device)
        _fill_dummy(replace(piece, target=floats, scales=None, number=None), seed)
        words, scales = pack_mxfp4(*quantize_mxfp4(floats.t()))
        piece.target.copy_(words)
        piece.scales.copy_(scales)
        return
    if piece.scales is not None:
        piece.scales.fill_(1.0)
    if piece.norm:
        piece.target.fill_(1.0)
        return
    name = hashlib.sha256(f"{seed}:{piece.name}".encode()).digest()
    salt = int.from_bytes(name[:8], "little", signed=True)
    for target, index in _element_numbers(piece):
        numbers = mix((index + salt) * WEYL - WEYL)  # SplitMix64's: `mix` adds a step itself
        target.copy_((numbers >> 40).float() * (DUMMY_SCALE * math.sqrt(3) / 2**23))


def _element_numbers(piece: Piece) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of rows of the target, and the numbers of their elements in the whole tensor."""
    shape = piece.shape if piece.index is None else piece.shape[1:]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    rest = torch.full((), (piece.index or 0) * math.prod(shape), device=piece.target.device)
    rows = rest
    for axis, (size, stride) in enumerate(zip(piece.target.shape, strides, strict=True)):
        first = piece.start if axis == piece.dim else 0
        numbers = torch.arange(first, first + size, device=piece.target.device) * stride
        if axis == 0:
            rows = numbers
        else:
            rest = rest[..., None] + numbers
    step = max(1, DUMMY_CHUNK // rest.numel())
    for part, first_numbers in zip(
        torch.split(piece.target, step), torch.split(rows, step), strict=True
    ):
        yield part, first_numbers.view(-1, *(1,) * rest.dim()) + rest
