"""Tokenizer of a Hugging Face folder, by `tokenizers`, or by `fastokens` if its ids are equal."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.models import WordLevel

from kvbaton.errors import ConfigError, stand_in
from kvbaton.text.chat import ChatTemplate
from kvbaton.text.vision import VisionText

logger = logging.getLogger(__name__)

# Each text is encoded by itself; handing it to a thread pool costs more than encoding it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SPECIAL_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
PROBE = (
    "Don't we'LL  3141592653\t½²Ⅷ\u00a0\r\n\n  if (x!=0) { return\u3000[a_b, \"c\"]; } // 'sK\u200b"
    "Größe \u017ftraße e\u0301a\u0308 ﬁn Привет мир Ελλάδα 東京へ行きます。カﾀ 한국어 "
    "العربية हिन्दी ภาษาไทย "
    "👩‍🚀🏳️‍🌈🎉\x00\x7f\ufffd\U0010fffd   end \n"
)
"""Test text: libraries that encode it alike, around every added token, are taken as equal."""


class Tokenizer:
    """Turns text into token ids and back, as `transformers` does for the same folder.

    Args:
        backend: The loaded ``tokenizer.json``; its truncation and padding are switched off.
        special_tokens: Special tokens by name (``bos_token``), for the chat template.
        chat_template: Chat template; None if the model has none.
        vision: Places images in prompts; None if the model takes none.

    Attributes:
        quick_characters: Length of a text up to which encoding takes at most a few hundred us, or
            8 ms if none of its words was seen before.
        vocab_size: Number of token ids, 1 above the largest.
        decodes_bytes: Whether a text is the joined bytes of its tokens, as UTF-8.
        all_bytes: Bytes of each token, if `decodes_bytes`.
        text_bytes: `all_bytes`, with no bytes for special tokens.
        added_tokens: Ids of added tokens, special or not, by text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        vision: VisionText | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._fast = _fast_encoder(backend)
        self.quick_characters = 4096 if self._fast is None else 32_768
        self.special_tokens = special_tokens or {}
        self.chat_template = chat_template
        self.vision = vision
        self.vocab_size: int = 1 + max(
            backend.get_vocab(with_added_tokens=True).values(), default=-1
        )
        self._added = backend.get_added_tokens_decoder()
        self._decoder_types = _decoder_types(backend)
        self.decodes_bytes = self._decoder_types - {"Sequence"} == {"ByteLevel"}
        self.all_bytes = TokenBytes(backend, frozenset())
        special = frozenset(number for number, token in self._added.items() if token.special)
        self.text_bytes = TokenBytes(backend, special)
        self.added_tokens = {token.content: number for number, token in self._added.items()}

    @classmethod
    def load(cls, folder: str | Path, chat_template: str | Path | None = None) -> Tokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

        The post-processor decides which tokens start and end a text; ``add_bos_token`` in the
        configuration is ignored, as in `transformers` 5.

        Args:
            folder: Folder of the model; only the first of these files must exist.
            chat_template: File with a chat template that replaces the model's.

        Raises:
            ConfigError: A file is missing or broken, or the tokenizer is of another model; the
                error names the file.
        """
        folder = Path(folder)
        config = _read_config(folder / "tokenizer_config.json")
        special = _special_tokens(folder, config)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                str(path), "is missing; a model folder needs its fast tokenizer there"
            )
        data = b""
        try:
            data = path.read_bytes()
            backend = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception
            why = stand_in(data) or f": {error}"
            raise ConfigError(str(path), f"is no tokenizer{why}") from error
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_special_tokens([token for token in special.values() if token not in known])
        template: Any = config.get("chat_template")
        if chat_template is None and (folder / "chat_template.jinja").exists():
            chat_template = folder / "chat_template.jinja"
        if chat_template is not None:
            template = read_template(chat_template)
        elif isinstance(template, list):  # several, by name
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if template is not None and not isinstance(template, str):
            problem = "chat_template must be a string"
            raise ConfigError(str(folder / "tokenizer_config.json"), problem)
        compiled = None if template is None else ChatTemplate(template, special)
        loaded = cls(backend, special, compiled, VisionText.load(folder, backend.id_to_token))
        loaded._check_vocabulary(path)
        return loaded

    def _check_vocabulary(self, path: Path) -> None:
        """Warn of tokens that the model in the file's folder does not have.

        Raises:
            ConfigError: Every text begins or ends with such a token.
        """
        model = _read_config(path.parent / "config.json")
        text = model.get("text_config")
        size = (model | text if isinstance(text, dict) else model).get("vocab_size")
        if not isinstance(size, int) or self.vocab_size <= size:
            return
        needed = [self.token_text(token) for token in self.encode("") if token >= size]
        if needed:
            problem = f"puts {needed[0]!r} into every text, which no model of {size} tokens has"
            raise ConfigError(str(path), f"{problem} (vocab_size of config.json)")
        logger.warning(
            "%s: token ids go up to %d, but the model has %d (vocab_size of config.json): texts "
            "with those beyond are refused",
            path, self.vocab_size - 1, size,
        )  # fmt: skip

    @classmethod
    def of_nothing(cls) -> Tokenizer:
        """Make an empty tokenizer, for nodes that serve no texts."""
        return cls(tokenizers.Tokenizer(WordLevel({}, unk_token="")))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, by default with the model's own start and end tokens."""
        if self._fast is not None:
            found = self._fast.encode(text, add_special_tokens=add_special_tokens)
        else:  # the same ids as `encode` in three quarters of the time, as no offsets are made
            (found,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids: list[int] = found.ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; incomplete UTF-8 becomes U+FFFD."""
        text: str
        (text,) = self._backend.decode_batch(  # `decode` would hold the GIL
            [token_ids], skip_special_tokens=skip_special_tokens
        )
        return text

    def token_text(self, token_id: int) -> str:
        """Text of a single token, special ones included; its invalid bytes become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token, which may be only a part of a character."""
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._added:
            return (token or "").encode()
        if "ByteLevel" in self._decoder_types:
            return bytes(_BYTE_OF_CHAR[c] for c in token if c in _BYTE_OF_CHAR)
        if "ByteFallback" in self._decoder_types and BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if "▁" in token:
            return token.replace("▁", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()


class TokenBytes(dict[int, bytes]):
    """Bytes of each token of a byte-level tokenizer, computed at first use.

    Args:
        backend: The tokenizer.
        hidden: Tokens that have no bytes; unknown tokens have none, too.
    """

    def __init__(self, backend: tokenizers.Tokenizer, hidden: Set[int]) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._backend = backend

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        try:
            found = bytes(_BYTE_OF_CHAR[character] for character in token)
        except KeyError:  # an added token with other characters stands for itself
            found = token.encode()
        self[token_id] = found
        return found


def _fast_encoder(backend: tokenizers.Tokenizer) -> Any:
    """Load the tokenizer in `fastokens`: a thirtieth of the time per text, a second to load.

    None if that library is not installed, does not support the tokenizer (it supports most BPE
    models and no others), or encodes `PROBE` differently; and if the vocabulary is empty.
    """
    if not backend.get_vocab_size():
        return None
    try:
        import fastokens

        fast = fastokens.Tokenizer.from_json_str(backend.to_str())
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        for text in (PROBE, *(PROBE[:40] + f"{token} {token}{PROBE[40:80]}" for token in added)):
            if fast.encode(text, add_special_tokens=True).ids != backend.encode(text).ids:
                raise ValueError(f"other tokens of {text!r}")
    except (ImportError, ValueError) as error:
        logger.info("texts are encoded by tokenizers, not fastokens: %s", error)
        return None
    return fast


def read_template(path: str | Path) -> str:
    """Read a chat template from its own file.

    Raises:
        ConfigError: The file can't be read; the error names its path.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"can't be read: {error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        if not path.exists():
            return {}
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(str(path), "must hold a JSON object")
    return value


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name; older folders keep them in ``special_tokens_map.json``."""
    merged = {**_read_config(folder / "special_tokens_map.json"), **config}
    special = {}
    for name in SPECIAL_NAMES:
        value = merged.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise ConfigError(str(folder / "tokenizer_config.json"), f"{name} must be a string")
        special[name] = value
    return special


def _decoder_types(backend: tokenizers.Tokenizer) -> frozenset[str]:
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    parts = [decoder, *decoder.get("decoders", [])]
    return frozenset(part["type"] for part in parts if "type" in part)


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(b for b in range(256) if b not in _PRINTABLE)
}
"""Inverse of GPT-2's alphabet: printable bytes map to themselves, others to U+0100 and above."""
