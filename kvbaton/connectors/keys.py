"""Names for content: who computed it (identity), which tokens (keys), from which weights (digest).

A key is a chained hash over the identity record and the tokens (as in vLLM's prefix caching and in
Preble, arXiv 2407.00023), so equal keys mean equal KV. Two requests that must not share can't
share: whatever may change a KV value is a mandatory field of `IdentityRecord` or enters the root.

All hashes are BLAKE2b-256 (RFC 7693), one `person` string per purpose, over length-prefixed
fields; so no two different inputs have the same encoding. Nothing depends on the process, the
machine's byte order or the Python version; `KEY_SCHEMA` changes when anything here does.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbaton.errors import ConfigError, stand_in
from kvbaton.types import KEY_BYTES

KEY_SCHEMA = 1
"""Version of everything that this file computes; part of every identity."""

RUN_TOKENS = 512
"""`iter_block_keys` computes the keys of the blocks of so many tokens at once."""
KNOWN_RUNS = 8192
"""So many runs are remembered, of 5 kB each in blocks of 16: the turns of a chat begin alike."""
SAMPLES = 64
SAMPLE_BYTES = 64 << 10
"""`model_digest` reads this many samples of this many bytes of each shard."""


class IdentityRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides what a token's KV is, besides the tokens; every field is mandatory.

    Values are text; the empty string says "none". Two nodes whose digests differ never exchange KV.

    Attributes:
        weights: `model_digest` of the folder, or `dummy_model_digest`.
        revision: the checkpoint's revision, as its publisher names it.
        rope: overrides of the rotary embedding, as canonical JSON.
        dtype: of weights and activations.
        kv_dtype: of the KV cache.
        kv_scales: digest of static KV scales.
        adapter: digest of an adapter merged into the weights.
        encoder: digest of the multimodal encoder and its processor.
        draft: digest of the draft model whose KV travels along.
        key_schema: `KEY_SCHEMA` of the release.
    """

    weights: str
    revision: str
    rope: str
    dtype: str
    kv_dtype: str
    kv_scales: str
    adapter: str
    encoder: str
    draft: str
    key_schema: int = KEY_SCHEMA

    def record(self) -> dict[str, str]:
        """The fields by name, as text: what a refusal shows of both sides."""
        return {name: str(getattr(self, name)) for name in self.__struct_fields__}

    def digest(self) -> bytes:
        """32 bytes that are equal only for equal records."""
        fields = (part.encode() for item in self.record().items() for part in item)
        return _hash(b"kvbaton-identity", fields)


class Extra(NamedTuple):
    """A multimodal item in a prompt: tokens [start, start + length) stand for it.

    `digest` covers its content and its processor's settings.
    """

    start: int
    length: int
    digest: bytes


def root_key(identity: bytes, cache_salt: str, adapter: bytes = b"") -> bytes:
    """Parent of the first block of every sequence that may share.

    Args:
        identity: `IdentityRecord.digest`, 32 bytes.
        cache_salt: the request's salt; requests with different ones never share.
        adapter: digest of the request's adapter; empty for none.

    Raises:
        ValueError: `identity` is not 32 bytes long.
    """
    _check_key("identity", identity)
    return _hash(b"kvbaton-root", (identity, cache_salt.encode(), adapter))


def block_keys(
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    *,
    parent_keys: Sequence[bytes] = (),
    extras: Sequence[Extra] = (),
) -> list[bytes]:
    """Keys of all full blocks of a sequence, in order; a partial last block has none.

    Args:
        root: `root_key`.
        token_ids: the sequence from its first token on, ids in [0, 2**32).
        block_size: tokens per block.
        parent_keys: keys of the first blocks, if known already; they are not computed again.
        extras: multimodal items; each changes the keys of the blocks that it overlaps, and of all
            later ones.

    Returns:
        ``len(token_ids) // block_size`` keys of 32 bytes, `parent_keys` included.

    Raises:
        ValueError: a root, a block size or a token is not of the kind described.
    """
    _check_block_size(block_size)
    keys = list(parent_keys[: len(token_ids) // block_size])
    root, rest = (keys[-1] if keys else root), token_ids[len(keys) * block_size :]
    if extras and keys:
        moved = len(keys) * block_size
        extras = [extra._replace(start=extra.start - moved) for extra in extras]
    keys.extend(iter_block_keys(root, rest, block_size, extras=extras))
    return keys


def iter_block_keys(
    root: bytes, token_ids: Sequence[int], block_size: int, *, extras: Sequence[Extra] = ()
) -> Iterator[bytes]:
    """`block_keys`, one after the other: who needs only some pays for those alone."""
    _check_key("root", root)
    _check_block_size(block_size)
    parent, whole = root, len(token_ids) // block_size * block_size
    at_once = max(RUN_TOKENS // block_size, 1) * block_size
    for begin in range(0, whole, at_once):
        end = min(begin + at_once, whole)
        data, width = _token_bytes(token_ids[begin:end]), 4 * block_size
        starts = range(begin, end, block_size) if extras else ()
        more = tuple(_extras_in(extras, start, start + block_size) for start in starts)
        keys = _run_keys(parent, data, width, more)
        yield from keys
        parent = keys[-1]


@lru_cache(KNOWN_RUNS)
def _run_keys(
    parent: bytes, data: bytes, width: int, extras: tuple[tuple[bytes, ...], ...]
) -> tuple[bytes, ...]:
    """Keys of consecutive blocks of so many bytes of tokens, and of what else is in each."""
    # As `_hash` of the parent and the tokens, but prepared: this is most of what a prompt costs.
    blank = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kvbaton-block")
    blank.update(KEY_BYTES.to_bytes(8, "little"))
    keys, length = [], width.to_bytes(8, "little")
    for number, place in enumerate(range(0, len(data), width)):
        state = blank.copy()
        state.update(parent + length + data[place : place + width])
        for item in extras[number] if extras else ():
            state.update(len(item).to_bytes(8, "little") + item)
        parent = state.digest()
        keys.append(parent)
    return tuple(keys)


def prompt_key(root: bytes, token_ids: Sequence[int], *, extras: Sequence[Extra] = ()) -> bytes:
    """Key of all tokens of a prompt, partial tail included; independent of any block size.

    Raises:
        ValueError: a root or a token is not of the kind described at `block_keys`.
    """
    _check_key("root", root)
    items = _extras_in(extras, 0, len(token_ids))
    return _hash(b"kvbaton-prompt", (root, _token_bytes(token_ids), *items))


def model_digest(folder: Path) -> str:
    """Digest of a Hugging Face folder: ``config.json`` and its safetensors shards, as hex.

    A GGUF file in place of shards is read as one whose header has no length in front.

    Of each shard it reads name, length, header, and 64 samples of 64 KiB spread evenly over the
    tensors (all of a smaller shard): cheap for any size, and other weights do not pass.

    Raises:
        ConfigError: a file is missing or no safetensors file.
    """
    shards = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    if not shards:
        raise ConfigError("--model", f"{folder} has no *.safetensors file")
    try:
        parts = [(folder / "config.json").read_bytes()]
        for shard in shards:
            parts += [shard.name.encode(), _shard_digest(shard)]
    except OSError as error:
        raise ConfigError("--model", f"can't read {error.filename}: {error.strerror}") from error
    return _hash(b"kvbaton-model", parts).hex()


def dummy_model_digest(config_bytes: bytes, seed: int) -> str:
    """Digest of random weights made from `seed` for the ``config.json`` given, as hex."""
    return _hash(b"kvbaton-dummy", (config_bytes, str(seed).encode())).hex()


def _shard_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        data_start = 8 + (0 if path.suffix == ".gguf" else int.from_bytes(prefix, "little"))
        if len(prefix) < 8 or data_start > size:
            why = stand_in(prefix) or ": its header is cut off"
            raise ConfigError("--model", f"{path} is no safetensors file{why}")
        parts = [struct.pack("<q", size), file.read(data_start - 8)]
        left = size - data_start
        if left <= SAMPLES * SAMPLE_BYTES:
            parts.append(file.read())
        else:  # samples, among them the first and the last bytes
            for number in range(SAMPLES):
                file.seek(data_start + (left - SAMPLE_BYTES) * number // (SAMPLES - 1))
                parts.append(file.read(SAMPLE_BYTES))
    return _hash(b"kvbaton-shard", parts)


def _hash(person: bytes, fields: Iterable[bytes]) -> bytes:
    state = hashlib.blake2b(digest_size=KEY_BYTES, person=person)
    for field in fields:
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return state.digest()


def _check_block_size(block_size: int) -> None:
    if block_size < 1:
        raise ValueError(f"block_size: {block_size} is not positive")


def _check_key(name: str, key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ValueError(f"{name}: {len(key)} bytes, must be {KEY_BYTES}")


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    try:
        words = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token_ids: ids must be whole numbers in [0, 2**32): {error}") from error
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _extras_in(extras: Sequence[Extra], start: int, end: int) -> tuple[bytes, ...]:
    """Encode the items that overlap tokens [start, end), with their place relative to `start`."""
    return tuple(
        struct.pack("<qq", extra.start - start, extra.length) + extra.digest
        for extra in sorted(extras)
        if extra.start < end and start < extra.start + extra.length
    )
