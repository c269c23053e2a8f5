"""Prompts with random pictures, what transformers makes of them, and a pool with their rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.model_config import VisionConfig, load_model_config
from kvbaton.engine.step import ItemRows
from kvbaton.messages.engine import Item, SamplingParams
from kvbaton.types import ENCODER_BLOCK_ROWS

Grid = tuple[int, int, int]
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@dataclass(frozen=True)
class Prompt:
    """Tokens, some of which stand for pictures.

    Attributes:
        ids: all tokens.
        items: the pictures' places.
        patches: of all pictures, [patches, dim].
    """

    ids: list[int]
    items: tuple[Item, ...]
    patches: torch.Tensor

    def inputs(self, more: Sequence[int] = (), device: str = "cpu") -> dict[str, Any]:
        """What transformers wants, for the prompt with more tokens after it."""
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


class Pictures:
    """A multimodal model of transformers, whose tower fills a pool for ours.

    Args:
        folder: of the model.
        dtype: of both models.
        device: of both models and the pool.
    """

    def __init__(self, folder: Path, *, dtype: str = "float32", device: str = "cpu") -> None:
        model = load_model_config(folder)
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
        """So many random tokens for a number, a random picture for a grid."""
        ids: list[int] = []
        items: list[Item] = []
        patches = [torch.zeros(0, self.vision.patch_dim)]
        for part in parts:
            if isinstance(part, int):
                ids += rng.integers(10, 384, part).tolist()
                continue
            values = rng.standard_normal((math.prod(part), self.vision.patch_dim))
            patches.append(torch.from_numpy(values).float())
            length = math.prod(part) // self.vision.merge_size**2
            digest = hashlib.sha256(values.tobytes()).digest()
            items.append(Item(start=len(ids), length=length, digest=digest, grid=part))
            ids += [self.vision.image_token_id] * length
        return Prompt(ids, tuple(items), torch.cat(patches))

    def add(self, driver: Any, prompt: Prompt, *args: Any, **more: Any) -> int:
        """Start a sequence, with the rows of its pictures in the pool."""
        options = {"items": prompt.items, "item_rows": self._item_rows(prompt)} | more
        handle: int = driver.add(prompt.ids, *args, **options)
        return handle

    def generate(self, prompt: Prompt, count: int) -> list[int]:
        """What transformers generates greedily; not for a prompt that ends with a picture.

        (It goes on from the position of its last row, not from the largest.)
        """
        asked = count, tuple(prompt.ids), prompt.items
        if asked not in self._generated:
            out = self.model.generate(
                **prompt.inputs(device=self.device),
                max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            self._generated[asked] = out[0, len(prompt.ids) :].tolist()
        return self._generated[asked]

    def logits(self, prompt: Prompt, generated: Sequence[int]) -> torch.Tensor:
        """Of the tokens after the prompt's last one and after each but the last generated."""
        with torch.inference_mode():
            inputs = prompt.inputs(generated[:-1], self.device)
            logits: torch.Tensor = self.model(**inputs).logits[0, len(prompt.ids) - 1 :]
        return logits.float()

    @torch.inference_mode()
    def _item_rows(self, prompt: Prompt) -> tuple[ItemRows, ...]:
        inputs = prompt.inputs(device=self.device)
        if prompt.items and prompt.items[0].digest not in self._rows:
            found = self.model.model.get_image_features(
                inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
            )
            lengths = [item.length for item in prompt.items]
            deep = [  # transformers 5.17 does not split them by picture
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
