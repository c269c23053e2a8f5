"""Images in prompts: images are only decoded to check that they can be.

In a prompt an image has as many placeholders as its encoder output has rows. Their number follows
from the image's size alone, by the rule of the model's image processor (`image_file.Resizing`), so
prompts and their keys need no encoder.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from sys import getsizeof
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from kvbaton import image_file
from kvbaton.errors import ConfigError, RequestError
from kvbaton.messages import UNREADABLE
from kvbaton.messages.engine import Item

KNOWN_IMAGES = 4096
"""Number of images whose digests are remembered because their bytes could be decoded."""
RECENT_BYTES = 64 << 20
"""Maximum bytes of remembered inline images and their URLs together."""
DECODERS = 2
"""Images decoded at a time, each with at most `image_file.MAX_PIXELS` pixels of memory."""
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)

Grid = tuple[int, int, int]
K = TypeVar("K")
V = TypeVar("V")


class _Config(msgspec.Struct):
    architectures: list[str] | None = None
    image_token_id: int | None = None
    image_token_index: int | None = None
    boi_token_index: int = 255_999
    eoi_token_index: int = 256_000
    vision_config: dict[str, Any] | None = None


class Recent(Generic[K, V]):
    """A thread-safe cache that evicts the least recently used entries.

    Args:
        room: Maximum weight of all entries.
        weigh: Weight of a key and its value; by default 1.
    """

    def __init__(self, room: int, weigh: Callable[[K, V], int] = lambda key, value: 1) -> None:
        self._left, self._weigh = room, weigh
        self._found: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Value of a key; None if it is not there or was evicted."""
        with self._lock:
            if (value := self._found.get(key)) is not None:
                self._found.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Add an entry, and evict the least recently used ones beyond `room`."""
        with self._lock:
            if key not in self._found:
                self._found[key] = value
                self._left -= self._weigh(key, value)
            while self._left < 0:
                self._left += self._weigh(*self._found.popitem(last=False))


def item_bytes(text: str, item: Item) -> int:
    """Bytes of an inline image and of its URL, which takes 4 bytes per 3 of the image."""
    return getsizeof(text) + len(item.data)


class VisionText:
    """Places images in prompts of one model.

    Args:
        image_token_id: Token id of the placeholder.
        settings: Settings of the model's image processor, see `image_file.processor_settings`.
        frame: Text of an image in the chat template, and the text that replaces it before the
            prompt is tokenized; None if the template has the placeholder itself.

    Attributes:
        merge_size: Side of the square of patches that becomes one row, in patches.
        recent: The latest inline images, by their whole URL. Conversations repeat their images in
            every turn, and many users send the same ones; a lookup takes a tenth of the time of
            decoding the URL and hashing the image.

    Raises:
        ConfigError: The image processor is not supported.
    """

    def __init__(
        self, image_token_id: int, settings: dict[str, Any], frame: tuple[str, str] | None = None
    ) -> None:
        self._frame = frame
        self._resizing = image_file.Resizing.of(settings)
        self.image_token_id = image_token_id
        self.merge_size = self._resizing.merge_size
        canonical = json.dumps(settings, sort_keys=True).encode()
        self._settings = hashlib.blake2b(canonical, digest_size=32).digest()
        self.recent = Recent(RECENT_BYTES, item_bytes)
        self._known = Recent[bytes, tuple[int, int]](KNOWN_IMAGES)
        self._decoders = threading.Semaphore(DECODERS)

    @classmethod
    def load(
        cls, folder: str | Path, token_text: Callable[[int], str | None] | None = None
    ) -> VisionText | None:
        """Load a Hugging Face folder; None if its model takes no images.

        Args:
            folder: Folder of the model.
            token_text: Returns the text of a special token; None if no images are placed in texts.

        Raises:
            ConfigError: The model takes images, but the settings of its image processor can't be
                used, or its tokenizer lacks a token.
        """
        path, config = Path(folder) / "config.json", _Config()
        try:
            if path.exists():
                config = msgspec.json.decode(path.read_bytes(), type=_Config)
        except (OSError, *UNREADABLE) as error:
            raise ConfigError(str(path), f"can't be read: {error}") from error
        sees = not set(image_file.ARCHITECTURES).isdisjoint(config.architectures or ())
        token = config.image_token_index or config.image_token_id
        if not sees or config.vision_config is None:
            return None
        if (config.architectures or [""])[0] != "Gemma3ForConditionalGeneration":
            settings = image_file.processor_settings
            return None if token is None else cls(token, settings(Path(folder)))
        if not image_file.has_processor(Path(folder)):
            return None  # the language model alone is served
        token = 262_144 if token is None else token
        frame = None
        if token_text is not None:
            # The model's processor frames an image like this before it tokenizes.
            ids = {
                "boi_token_index": config.boi_token_index,
                "image_token_index": token,
                "eoi_token_index": config.eoi_token_index,
            }
            begin, middle, end = (_token_text(token_text, *named) for named in ids.items())
            frame = begin, f"\n\n{begin}{middle}{end}\n\n"
        return cls(token, image_file.processor_settings(Path(folder)), frame)

    # --- one image ---

    def digest(self, data: bytes) -> bytes:
        """32-byte digest of an image's content and the processor's settings."""
        digest = hashlib.blake2b(self._settings, digest_size=32, person=b"kvbaton-image")
        digest.update(data)
        return digest.digest()

    def measure(self, width: int, height: int) -> tuple[Grid, int]:
        """Patches of an upright image in time, height and width, and its number of placeholders.

        Raises:
            RequestError: It is empty, or too narrow for the model.
        """
        rows, columns = self._resizing.grid(width, height)
        return (1, rows, columns), rows * columns // self.merge_size**2

    def item(self, data: bytes) -> Item:
        """Turn an image into an item at position 0. May block to decode it, unless it is known.

        Raises:
            RequestError: It can't be decoded to its end, is too large, or the model can't take it.
        """
        digest = self.digest(data)
        size = self._known.get(digest)
        if size is None:
            with self._decoders:
                size = _decode(data)
            self._known.put(digest, size)
        grid, length = self.measure(*size)
        return Item(start=0, length=length, digest=digest, grid=grid, data=data)

    # --- prompts ---

    def prepare(self, text: str) -> str:
        """Give a rendered conversation one placeholder for each image."""
        return text if self._frame is None else text.replace(*self._frame)

    def expand(
        self, token_ids: Sequence[int], images: Sequence[Item]
    ) -> tuple[list[int], tuple[Item, ...]]:
        """Repeat each placeholder of a prompt as often as its image has rows.

        Args:
            token_ids: Prompt with one placeholder per image.
            images: Images in the order of the placeholders.

        Returns:
            The prompt, and its items.

        Raises:
            RequestError: The numbers of placeholders and images differ.
        """
        found = sum(token == self.image_token_id for token in token_ids)
        if found != len(images):
            why = "a text must not hold the placeholder itself"
            if found < len(images):
                why = "the model's chat template does not show images in all of these messages"
            raise RequestError(
                f"the prompt has {found} placeholders for {len(images)} images; {why}",
                param="messages",
            )
        ids: list[int] = []
        items: list[Item] = []
        rest = iter(images)
        for token in token_ids:
            if token == self.image_token_id:
                items.append(replace(next(rest), start=len(ids)))
                ids += [token] * items[-1].length
            else:
                ids.append(token)
        return ids, tuple(items)

    def check(self, token_ids: Sequence[int], items: Sequence[Item]) -> None:
        """Check items of a tokenized prompt, so that no wrong output is ever cached under a key.

        Raises:
            RequestError: An item is wrong; the error names it and says why.
        """
        end = 0
        for number, item in enumerate(items):
            error: str | None
            start, end = end, item.start + item.length
            if item.start < start or end > len(token_ids):
                error = "items must be in order, must not overlap, and must lie within the prompt"
            elif any(token != self.image_token_id for token in token_ids[item.start : end]):
                token = self.image_token_id
                error = f"tokens {item.start} to {end - 1} must be {token}, the placeholder"
            elif not item.data and item.transfer is None:
                error = "an item needs its data, or a transfer that brings its encoder output"
            else:
                error = self.mismatch(item)
            if error is not None:
                raise RequestError(error, param=f"items[{number}]")

    def mismatch(self, item: Item) -> str | None:
        """Error text for a field of an item that is wrong; None if all are right."""
        frames, rows, columns = item.grid
        merge = self.merge_size
        if self._resizing.square and (rows, columns) != self._resizing.grid(1, 1):
            return f"grid must be {(1, *self._resizing.grid(1, 1))}"
        if frames != 1 or rows % merge or columns % merge:
            return f"grid must be 1, and two multiples of {merge}"
        if rows * columns != item.length * merge**2:
            return f"a grid of {item.grid} has {rows * columns // merge**2} rows, not {item.length}"
        if item.data and self.digest(item.data) != item.digest:
            return "digest is not that of data with this model's image processor"
        return None


def _token_text(token_text: Callable[[int], str | None], name: str, token: int) -> str:
    text = token_text(token)
    if text is None:
        raise ConfigError(name, f"the tokenizer has no token {token}")
    return text


def _decode(data: bytes) -> tuple[int, int]:
    """Upright width and height of an image that can be decoded to its end."""
    with image_file.opened(data) as image:
        width, height = image.size
        image.draft(image.mode, (1, 1))  # a JPEG is read to its end, but into little memory
        image.load()
        sideways = image.getexif().get(ORIENTATION) in SIDEWAYS
    return (height, width) if sideways else (width, height)
