"""Images of all kinds against transformers' own reading, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from kvbaton.engine.config import EngineConfig
from kvbaton.engine.encoder.images import ImageReader, decode
from kvbaton.engine.encoder.worker import encoder_executor
from kvbaton.engine.model_config import load_model_config
from kvbaton.errors import ConfigError, RequestError
from tests.support.encoder_items import values_of

Checkpoint = Callable[..., Path]
FAMILIES = ["qwen2_5_vl", "qwen3_vl"]
family = pytest.mark.parametrize("family", FAMILIES)


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def expected(folder: Path, data: bytes) -> tuple[Any, tuple[int, ...]]:
    """As transformers reads it."""
    from transformers import AutoImageProcessor
    from transformers.image_utils import load_image

    processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")  # type: ignore[no-untyped-call]
    with Image.open(BytesIO(data)) as image:
        result = processor(images=load_image(image), return_tensors="np")
    return result["pixel_values"], tuple(result["image_grid_thw"][0].tolist())


@family
@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        ("RGB", "PNG", {}),
        ("RGB", "JPEG", {"quality": 90}),
        ("CMYK", "JPEG", {}),
        ("L", "PNG", {}),
        ("1", "PNG", {}),
        ("RGBA", "PNG", {}),
        ("LA", "PNG", {}),
        ("P", "GIF", {}),
        ("RGB", "WEBP", {"lossless": True}),
        ("RGB", "BMP", {}),
    ],
)
def test_formats_and_modes_equal_transformers(
    family: str,
    mode: str,
    kind: str,
    options: dict[str, Any],
    checkpoint: Checkpoint,
) -> None:
    folder = checkpoint(family=family)
    data = encoded(picture(53, 37, mode), kind, **options)
    read, read_grid = values_of(folder, data)
    values, grid = expected(folder, data)
    assert read.dtype == torch.float32
    assert read_grid == grid
    np.testing.assert_array_equal(read, values)


def test_grey_of_16_bits_is_read_like_colours_of_16_bits() -> None:
    """By the high byte; transformers makes everything white that is not almost black."""
    grey = np.random.default_rng(0).integers(0, 1 << 16, (16, 24), dtype=np.uint16)
    with Image.open(BytesIO(encoded(Image.fromarray(grey)))) as stored:
        assert stored.mode == "I;16"
    high = (grey >> 8).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 3
    data = encoded(Image.fromarray(grey), exif=exif)
    np.testing.assert_array_equal(decode(data), np.stack([high[::-1, ::-1]] * 3, -1))


@family
def test_any_size_equals_transformers(family: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(family=family)
    side = st.integers(1, 150)

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(side, side)
    def check(width: int, height: int) -> None:
        data = encoded(picture(width, height))
        read, read_grid = values_of(folder, data)
        values, grid = expected(folder, data)
        assert read_grid == grid
        np.testing.assert_array_equal(read, values)

    check()


def test_patches_are_the_pixels_square_by_square(checkpoint: Checkpoint) -> None:
    """An image that needs no resizing: the tokens' 8 x 8 squares, four patches of 4 x 4 in each."""
    image = picture(24, 16)
    read, grid = values_of(checkpoint(family="qwen3_vl"), encoded(image))
    assert grid == (1, 4, 6)
    pixels = (np.asarray(image) / 255 - 0.5) / 0.5
    for number, patch in enumerate(read.numpy().reshape(24, 3, 2, 4, 4)):
        square, part = divmod(number, 4)
        top = square // 3 * 8 + part // 2 * 4
        left = square % 3 * 8 + part % 2 * 4
        wanted = pixels[top : top + 4, left : left + 4].transpose(2, 0, 1)
        for frame in (0, 1):
            np.testing.assert_allclose(patch[:, frame], wanted, atol=1e-6)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_beside_odd_tags(kind: str, orientation: int) -> None:
    """Of a camera whose maker is a number, which Pillow reads and can't write."""
    image, exif = picture(24, 16), Image.Exif()
    exif[0x0112] = orientation
    with Image.open(BytesIO(encoded(image, kind, exif=exif))) as opened:
        upright = ImageOps.exif_transpose(opened).convert("RGB")
    tags = struct.pack("<HHII", 0x010F, 12, 1, 38) + struct.pack(
        "<HHIHH", 0x0112, 3, 1, orientation, 0
    )
    odd = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + tags + struct.pack("<Id", 0, 1.5)
    np.testing.assert_array_equal(decode(encoded(image, kind, exif=odd)), upright)


@pytest.mark.parametrize(
    ("name", "value"), [("patch_size", None), ("merge_size", 1), ("temporal_patch_size", 1)]
)
def test_a_processor_of_another_tower_is_refused(
    name: str, value: int | None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """At the start: the first image ended the engine, with all requests."""
    folder = Path(shutil.copytree(checkpoint(family="qwen3_vl"), tmp_path / "model"))
    path = folder / "preprocessor_config.json"
    settings = {**json.loads(path.read_text()), name: value}
    path.write_text(json.dumps({k: x for k, x in settings.items() if x is not None}))
    config = EngineConfig(model=str(folder), device="cpu")
    with pytest.raises(ConfigError, match=f"{name} of the image processor is .* tower"):
        encoder_executor(config, load_model_config(folder)).close()


def test_of_an_animation_the_first_frame_counts(checkpoint: Checkpoint) -> None:
    reader = ImageReader(checkpoint(family="qwen3_vl"))
    first, second = picture(24, 16, "P"), picture(24, 17, "P").crop((0, 0, 24, 16))
    moving = encoded(first, "GIF", save_all=True, append_images=[second])
    np.testing.assert_array_equal(reader.read(moving).pixels, reader.read(encoded(first)).pixels)


def huge_png(width: int, height: int) -> bytes:
    """A bilevel image of which only the first rows are there: its header is what counts."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content).to_bytes(4, "big")
        return len(content).to_bytes(4, "big") + kind + content + check

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    rows = zlib.compress(bytes((1 + -(-width // 8)) * min(height, 16)))
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "can't decode"),
        (b"no image at all", "can't decode"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "can't decode"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "can't decode"),
        (encoded(picture(64, 64))[:-3000], "can't decode"),
        (encoded(picture(64, 64), "JPEG")[:400], "can't decode"),
        (encoded(picture(64, 64), "TIFF"), "can't decode"),
        (huge_png(8300, 8300), "8300 x 8300"),
        (huge_png(60000, 60000), "can't decode"),
        (huge_png(0, 10), "can't decode"),
        (encoded(picture(402, 2)), "200-fold"),
    ],
    ids=[
        "empty", "text", "svg", "eps", "cut-png", "cut-jpeg", "tiff", "68-megapixels",
        "bomb", "no-pixels", "strip",
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused(data: bytes, message: str, checkpoint: Checkpoint) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ImageReader(checkpoint(family="qwen2_5_vl")).read(data)
    assert caught.value.status == 400


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_damaged_bytes_are_read_or_refused(kind: str, checkpoint: Checkpoint) -> None:
    reader = ImageReader(checkpoint(family="qwen2_5_vl"))
    whole = encoded(picture(40, 30), kind)
    rng = random.Random(kind)
    refused = 0
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(3):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            reader.read(bytes(data[: rng.randrange(len(data)) + 1]))
        except RequestError:
            refused += 1
    assert refused > 0


def test_processor_must_be_known(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint(family="qwen3_vl"), tmp_path / "model"))
    path = folder / "preprocessor_config.json"
    for name in ("NoSuchImageProcessor", "PreTrainedModel", ""):
        path.write_text(json.dumps({"image_processor_type": name}))
        with pytest.raises(ConfigError, match="image_processor_type"):
            ImageReader(folder)
    for broken in (b"{", b'{"image_processor_type": "\xff"}', b'{"a":' * 100_000):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
            ImageReader(folder)
    path.unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        ImageReader(folder)


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"do_normalize": False, "resample": 2},
        {"do_rescale": False, "image_mean": [9.0, 8.0, 7.0]},
        {"rescale_factor": 0.01, "image_std": [0.3, 0.2, 0.1], "max_pixels": 40_000},
    ],
    ids=lambda named: "-".join(named) or "nothing",
)
def test_what_settings_do_not_name_is_as_in_transformers(
    checkpoint: Checkpoint, tmp_path: Path, named: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(checkpoint(family="qwen2_5_vl"), tmp_path / "model"))
    settings = {"image_processor_type": "Qwen2VLImageProcessor", **named}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    data = encoded(picture(301, 205))
    read, read_grid = values_of(folder, data)
    values, grid = expected(folder, data)
    assert read_grid == grid
    np.testing.assert_array_equal(read, values)
