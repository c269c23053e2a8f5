"""Prompts with random images, transformers' outputs for them, and a pool with their rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers

from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.step import ItemRows
from kvbaton.engine.vision_config import VisionConfig
from kvbaton.messages.engine import Item, SamplingParams
from kvbaton.types import ENCODER_BLOCK_ROWS
from tests.support.encoder_items import item_of, values_of

Grid = tuple[int, int, int]
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@dataclass(frozen=True)
class Prompt:
    """Tokens, some of which are placeholders of images.

    Attributes:
        ids: All tokens.
        items: Positions of the images.
        patches: Patches of all images, [patches, dim].
    """

    ids: list[int]
    items: tuple[Item, ...]
    patches: torch.Tensor

    def inputs(self, more: Sequence[int] = (), device: str = "cpu") -> dict[str, Any]:
        """Inputs of transformers for the prompt followed by more tokens."""
        ids = torch.tensor([[*self.ids, *more]], device=device)
        if not self.items:
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        types = torch.zeros_like(ids)
        for item in self.items:
            types[0, item.start : item.start + item.length] = 1
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": self.patches.to(device),
            "image_grid_thw": torch.tensor([item.grid for item in self.items], device=device),
            "mm_token_type_ids": types,
        }


def squared(patches: torch.Tensor, grid: Grid, merge: int) -> torch.Tensor:
    """Convert patches [patches, dim], in the order of their rows, to pixels [3, H, W]."""
    _, rows, columns = grid
    side = math.isqrt(patches.shape[1] // 3)
    parts = patches.view(rows // merge, columns // merge, merge, merge, 3, side, side)
    return parts.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side)


class Pictures:
    """A multimodal transformers model, whose tower fills a pool for kvbaton's model.

    Args:
        folder: Folder of the model.
        dtype: dtype of both models.
        device: Device of both models and the pool.
    """

    def __init__(self, folder: Path, *, dtype: str = "float32", device: str = "cpu") -> None:
        self.folder, model = folder, load_model_config(folder)
        assert model.vision is not None
        self.vision: VisionConfig = model.vision
        self.device, kind = device, getattr(torch, dtype)
        load: Any = transformers.AutoModelForImageTextToText.from_pretrained
        self.model = load(folder, dtype=kind).to(device)
        self.pool = EncoderPool(
            64, self.vision.levels, model.hidden_size, dtype, torch.device(device)
        )
        self._free = np.random.default_rng(5).permutation(np.arange(1, 64)).tolist()
        self.pool.poison(self._free)
        self._rows: dict[bytes, tuple[int, ...]] = {}
        self._generated: dict[tuple[int, tuple[int, ...], tuple[Item, ...]], list[int]] = {}

    def prompt(self, rng: np.random.Generator, *parts: int | Grid) -> Prompt:
        """A prompt of parts: a number gives as many random tokens, a grid a random image."""
        ids: list[int] = []
        items: list[Item] = []
        vision = self.vision
        patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        patches = [torch.zeros(0, patch_dim)]
        for part in parts:
            if isinstance(part, int):
                ids += rng.integers(10, 384, part).tolist()
                continue
            values = rng.standard_normal((math.prod(part), patch_dim))
            patches.append(torch.from_numpy(values).float())
            length = math.prod(part) // self.vision.merge_size**2
            digest = hashlib.sha256(values.tobytes()).digest()
            items.append(Item(start=len(ids), length=length, digest=digest, grid=part))
            ids += [self.vision.image_token_id] * length
        return Prompt(ids, tuple(items), torch.cat(patches))

    def prompt_of(self, *parts: int | bytes, seed: int = 0) -> Prompt:
        """A prompt of parts: a number gives as many random tokens, bytes the image of that file."""
        rng = np.random.default_rng(seed)
        ids: list[int] = []
        items: list[Item] = []
        patches: list[torch.Tensor] = []
        for part in parts:
            if isinstance(part, int):
                ids += rng.integers(10, 384, part).tolist()
            else:
                item = item_of(self.folder, part)
                items.append(msgspec.structs.replace(item, start=len(ids)))
                patches.append(values_of(self.folder, part)[0])
                ids += [self.vision.image_token_id] * item.length
        return Prompt(ids, tuple(items), torch.cat(patches))

    def add(self, driver: Any, prompt: Prompt, *args: Any, **more: Any) -> int:
        """Add a sequence, with the rows of its images in the pool."""
        options = {"items": prompt.items, "item_rows": self._item_rows(prompt)} | more
        handle: int = driver.add(prompt.ids, *args, **options)
        return handle

    def uncut(self, prompt: Prompt, start: int, count: int) -> int:
        """About `count`: tokens from `start` on that do not end within a bidirectional image."""
        for item in prompt.items if self.vision.bidirectional else ():
            if item.start < start + count < item.start + item.length:
                return item.start - start or item.length
        return count

    def inputs(self, prompt: Prompt, more: Sequence[int] = ()) -> dict[str, Any]:
        """Inputs of this transformers model; see `Prompt.inputs`."""
        found = prompt.inputs(more, self.device)
        if self.vision.bidirectional and prompt.items:
            del found["image_grid_thw"]
            found["token_type_ids"] = found.pop("mm_token_type_ids")
            parts = torch.split(prompt.patches, [math.prod(item.grid) for item in prompt.items])
            pairs = zip(parts, prompt.items, strict=True)
            images = [squared(part, item.grid, self.vision.merge_size) for part, item in pairs]
            found["pixel_values"] = torch.stack(images).to(self.device)
        return found

    def generate(self, prompt: Prompt, count: int) -> list[int]:
        """Greedy output of transformers; not for a prompt that ends with an image.

        (transformers continues from the position of the last row, not from the largest.)
        """
        asked = count, tuple(prompt.ids), prompt.items
        if asked not in self._generated:
            out = self.model.generate(
                **self.inputs(prompt),
                max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            self._generated[asked] = out[0, len(prompt.ids) :].tolist()
        return self._generated[asked]

    def greedy_along(self, prompt: Prompt, tokens: Sequence[int], count: int) -> list[int]:
        """The most likely token after a prompt, and after each of `count` tokens but the last.

        They equal these tokens exactly if transformers generates them greedily. This takes one
        forward pass, where `generate` takes one per token.
        """
        assert len(tokens) == count
        if self.vision.image_token_id in tokens:  # it would be taken for an image
            return self.generate(prompt, count)
        likeliest: list[int] = self.logits(prompt, tokens).argmax(-1).tolist()
        return likeliest

    def logits(self, prompt: Prompt, generated: Sequence[int]) -> torch.Tensor:
        """Logits of all generated tokens, given the prompt and the tokens before each."""
        with torch.inference_mode():
            inputs = self.inputs(prompt, generated[:-1])
            logits: torch.Tensor = self.model(**inputs).logits[0, len(prompt.ids) - 1 :]
        return logits.float()

    @torch.inference_mode()
    def _item_rows(self, prompt: Prompt) -> tuple[ItemRows, ...]:
        inputs = self.inputs(prompt)
        if prompt.items and prompt.items[0].digest not in self._rows:
            names = [name for name in ("pixel_values", "image_grid_thw") if name in inputs]
            found = self.model.model.get_image_features(
                *(inputs[name] for name in names), return_dict=True
            )
            lengths = [item.length for item in prompt.items]
            deep = [  # transformers 5.17 does not split them by image
                torch.split(level, lengths) if isinstance(level, torch.Tensor) else level
                for level in getattr(found, "deepstack_features", None) or []
            ]
            for number, item in enumerate(prompt.items):
                levels = [found.pooler_output[number], *(level[number] for level in deep)]
                blocks = [self._free.pop() for _ in range(0, item.length, ENCODER_BLOCK_ROWS)]
                self.pool.write(blocks, torch.stack(levels, dim=1))
                self._rows[item.digest] = tuple(blocks)
        return tuple(
            ItemRows(item.start, item.length, self._rows[item.digest]) for item in prompt.items
        )
