"""Images in prompts: their sizes as the model's processor cuts them, and what is refused."""

from __future__ import annotations

import io
import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from PIL import Image

from kvbaton.engine.encoder.images import ImageReader
from kvbaton.errors import ConfigError, RequestError
from kvbaton.messages.engine import Item, TransferSpec
from kvbaton.text import vision as module
from kvbaton.text.vision import Recent, VisionText, item_bytes
from tests.support.waiting import PATIENCE_S

PAD = 7
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "min_pixels": 3136,
        "max_pixels": 12845056,
    },
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16,
        "merge_size": 2,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    },
    "defaults": {"image_processor_type": "Qwen2VLImageProcessor"},
}


def encoded(width: int, height: int, kind: str = "PNG", seed: int = 0, **options: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, kind, **options)
    return data.getvalue()


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(family=request.param)


@pytest.fixture
def vision(folder: Path) -> VisionText:
    found = VisionText.load(folder)
    assert found is not None
    return found


# --- sizes ---


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from(sorted(PUBLISHED)))
def test_sizes_are_those_of_the_models_processor(width: int, height: int, name: str) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
        smart_resize,
    )

    given: dict[str, Any] = PUBLISHED[name]
    processor: Any = Qwen2VLImageProcessorPil(**given)
    bounds = processor.size["shortest_edge"], processor.size["longest_edge"]
    measure = VisionText(PAD, given).measure
    try:
        tall, wide = smart_resize(
            height, width, processor.patch_size * processor.merge_size, *bounds
        )
    except ValueError:
        with pytest.raises(RequestError, match="200-fold"):
            measure(width, height)
        return
    grid, length = measure(width, height)
    assert grid == (1, tall // processor.patch_size, wide // processor.patch_size)
    assert length == grid[1] * grid[2] // processor.merge_size**2


@pytest.mark.parametrize("size", [(40, 32), (17, 90), (100, 9), (8, 8), (1, 1), (500, 300)])
def test_items_are_what_the_reader_makes(
    folder: Path, vision: VisionText, size: tuple[int, int]
) -> None:
    data = encoded(*size)
    item = vision.item(data)
    patches = ImageReader(folder).read(data)
    assert item.grid == patches.grid
    assert item.length * vision.merge_size**2 == len(patches.pixels)
    assert vision.mismatch(item) is None


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(
    folder: Path, vision: VisionText, kind: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[module.ORIENTATION] = orientation
    data = encoded(64, 24, kind, exif=exif)
    assert vision.item(data).grid == ImageReader(folder).read(data).grid
    turned = vision.item(data).grid != vision.item(encoded(64, 24, kind)).grid
    assert turned == (orientation > 4)


# --- digests ---


def test_digests_tell_content_and_settings_apart() -> None:
    one, other = (VisionText(PAD, PUBLISHED[name]) for name in ("qwen2_5_vl", "defaults"))
    assert one.digest(b"a") == VisionText(PAD, PUBLISHED["qwen2_5_vl"]).digest(b"a")
    assert len({one.digest(b"a"), one.digest(b"b"), other.digest(b"a")}) == 3
    shuffled = dict(reversed(PUBLISHED["qwen2_5_vl"].items()))
    assert VisionText(PAD, shuffled).digest(b"a") == one.digest(b"a")


# --- what can't be decoded ---


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.9])
def test_truncated_images_are_refused(vision: VisionText, kind: str, share: float) -> None:
    data = encoded(64, 48, kind)
    vision.item(data)
    with pytest.raises(RequestError, match="can't decode the image"):
        vision.item(data[: int(len(data) * share)])


def test_text_is_no_image(vision: VisionText) -> None:
    with pytest.raises(RequestError, match="one of JPEG, PNG"):
        vision.item(b"<svg xmlns='http://www.w3.org/2000/svg'/>")


def test_huge_images_are_refused_unread(
    vision: VisionText, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = io.BytesIO()
    Image.new("1", (8200, 8200)).save(data, "PNG")
    assert len(data.getvalue()) < 20_000, "a bomb"
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(RequestError, match="8200 x 8200 pixels"):
        vision.item(data.getvalue())


def test_no_pixels_are_refused(vision: VisionText) -> None:
    for size in ((0, 5), (5, 0)):
        with pytest.raises(RequestError, match="at least one"):
            vision.measure(*size)


def test_a_known_image_is_not_decoded_again(
    vision: VisionText, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(40, 40)
    item = vision.item(data)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("decoded again"))
    assert vision.item(data) == item


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=40))
def test_recent_items_are_the_last_that_were_used(used: list[tuple[int, bool]]) -> None:
    """As many as fit, under their own texts alone."""
    most = 2000
    recent, order = Recent(most, item_bytes), list[int]()
    texts = ["é" * number + "x" * 100 * (number + 1) for number in range(8)]
    items = [
        Item(start=0, length=1, digest=bytes([n]) * 32, grid=(1, 2, 2), data=bytes(50 * n))
        for n in range(8)
    ]
    size = [sys.getsizeof(text) + len(item.data) for text, item in zip(texts, items, strict=True)]
    for number, puts in used:
        if puts and number not in order:
            order.append(number)
            while sum(size[n] for n in order) > most:
                order.pop(0)
            recent.put(texts[number], items[number])
        elif number in order:
            order.append(order.pop(order.index(number)))
            recent.get(texts[number])
    for number in range(8):
        found = recent.get("".join(list(texts[number])))
        assert found is (items[number] if number in order else None)


def test_few_are_decoded_at_once(vision: VisionText, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, lock, counts = threading.Event(), threading.Lock(), {"now": 0, "most": 0}
    decode = module._decode

    def slow(data: bytes) -> tuple[int, int]:
        with lock:
            counts["now"] += 1
            counts["most"] = max(counts.values())
            if counts["most"] == module.DECODERS:
                gate.set()
        assert gate.wait(PATIENCE_S)
        with lock:
            counts["now"] -= 1
        return decode(data)

    monkeypatch.setattr(module, "_decode", slow)
    threads = [
        threading.Thread(target=vision.item, args=(encoded(20, 20, seed=seed),))
        for seed in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts["most"] == module.DECODERS


# --- prompts ---


def item(length: int, **fields: Any) -> Item:
    return Item(start=0, length=length, digest=bytes(32), grid=(1, 2 * length, 2), **fields)


@given(st.lists(st.integers(0, 9), max_size=12), st.data())
def test_placeholders_become_as_many_as_rows(ids: list[int], data: st.DataObject) -> None:
    lengths = [data.draw(st.integers(1, 5)) for token in ids if token == PAD]
    vision = VisionText(PAD, PUBLISHED["defaults"])
    expanded, items = vision.expand(ids, [item(length) for length in lengths])
    assert [found.length for found in items] == lengths
    for found in items:
        assert expanded[found.start : found.start + found.length] == [PAD] * found.length
    for found in reversed(items):
        expanded[found.start : found.start + found.length] = [PAD]
    assert expanded == ids
    vision.check(*vision.expand(ids, [item(length, transfer=TRANSFER) for length in lengths]))


TRANSFER = TransferSpec(role="target", transfer_id=bytes(16), peer="tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("count", "why"), [(0, "a text must not"), (1, "a text must not"), (3, "does not show images")]
)
def test_other_numbers_of_placeholders_are_refused(count: int, why: str) -> None:
    with pytest.raises(RequestError, match=f"2 placeholders for {count} images; .*{why}"):
        VisionText(PAD, PUBLISHED["defaults"]).expand([PAD, 1, PAD], [item(1)] * count)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"start": 2}, "placeholder"),
        ({"start": 30}, "within the prompt"),
        ({"digest": bytes(32)}, "digest"),
        ({"data": b"other"}, "digest"),
        ({"data": b""}, "needs its data"),
        ({"grid": (2, 4, 4)}, "grid"),
        ({"grid": (1, 5, 4)}, "grid"),
        ({"grid": (1, 6, 4)}, "rows"),
    ],
)
def test_items_that_lie_are_refused(vision: VisionText, change: dict[str, Any], match: str) -> None:
    pad = vision.image_token_id
    good = vision.item(encoded(16, 16))
    ids, (good,) = vision.expand([1, pad, 2], [good])
    vision.check(ids, [good])
    with pytest.raises(RequestError, match=match) as caught:
        vision.check(ids, [replace(good, **change)])
    assert caught.value.param == "items[0]"
    with pytest.raises(RequestError, match="overlap") as caught:
        vision.check(ids, [good, good])
    assert caught.value.param == "items[1]"


# --- folders ---


def test_a_text_model_takes_no_images(checkpoint: Callable[..., Path]) -> None:
    assert VisionText.load(checkpoint()) is None


@pytest.mark.parametrize("content", [b"{", b'{"architectures": ["\xff"]}'])
def test_a_configuration_that_nobody_can_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json: can't be read"):
        VisionText.load(tmp_path)


def test_settings_may_lie_in_the_processors_file(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    alone = tmp_path / "preprocessor_config.json"
    joint = {"processor_class": "X", "image_processor": json.loads(alone.read_text())}
    (tmp_path / "processor_config.json").write_text(json.dumps(joint))
    before = VisionText.load(tmp_path)
    alone.unlink()
    after = VisionText.load(tmp_path)
    assert before is not None
    assert after is not None
    assert before.digest(b"x") == after.digest(b"x")
    (tmp_path / "processor_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="settings"):
        VisionText.load(tmp_path)
