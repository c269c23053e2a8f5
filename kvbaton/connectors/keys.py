"""Content keys: identity of the engine, chained keys of KV blocks, and digests of model weights.

A block's key is a chained hash over the identity record and the tokens (as in vLLM's prefix caching
and in Preble, arXiv 2407.00023), so equal keys mean equal KV. Requests that must not share KV can't
share it: everything that may change a KV value is a mandatory field of `IdentityRecord` or enters
the root key.

All hashes are BLAKE2b-256 (RFC 7693) over length-prefixed fields, with one `person` string per
purpose, so different inputs never have the same encoding. Nothing depends on the process, the
machine's byte order or the Python version. `KEY_SCHEMA` changes whenever the output of this file
does.
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
"""Tokens whose block keys `iter_block_keys` computes at once."""
KNOWN_RUNS = 8192
"""Maximum number of cached runs of `RUN_TOKENS`, since the turns of a chat share a prefix.

A run takes 5 kB with blocks of 16 tokens.
"""
SAMPLES = 64
"""Number of samples that `model_digest` reads of each shard."""
SAMPLE_BYTES = 64 << 10
"""Size of each of these samples in bytes."""


class IdentityRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything besides the tokens that determines a token's KV; every field is mandatory.

    Values are text; the empty string means "none". Nodes whose digests differ never exchange KV.

    Attributes:
        weights: `model_digest` of the model folder, or `dummy_model_digest`.
        revision: Revision of the checkpoint, as its publisher names it.
        rope: Overrides of the rotary embedding, as canonical JSON.
        dtype: Data type of weights and activations.
        kv_dtype: Data type of the KV cache.
        kv_scales: Digest of static KV scales.
        adapter: Digest of an adapter merged into the weights.
        encoder: Digest of the multimodal encoder and its processor.
        draft: Digest of the draft model whose KV is handed over as well.
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
        """The fields by name, as text; a refusal shows those of both sides."""
        return {name: str(getattr(self, name)) for name in self.__struct_fields__}

    def digest(self) -> bytes:
        """32 bytes that are equal only for equal records."""
        fields = (part.encode() for item in self.record().items() for part in item)
        return _hash(b"kvbaton-identity", fields)


class Extra(NamedTuple):
    """A multimodal item in a prompt: its placeholder is the tokens [start, start + length).

    `digest` covers the item's content and the settings of its processor.
    """

    start: int
    length: int
    digest: bytes


def root_key(identity: bytes, cache_salt: str, adapter: bytes = b"") -> bytes:
    """Parent key of the first block of every sequence that may share KV.

    Args:
        identity: `IdentityRecord.digest`, 32 bytes.
        cache_salt: Cache salt of the request; requests with different salts never share KV.
        adapter: Digest of the request's adapter; empty for none.

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
        root: Root key, from `root_key`.
        token_ids: Token ids of the sequence from its first token on, each in [0, 2**32).
        block_size: Tokens per block.
        parent_keys: Keys of the first blocks, if known; they are not computed again.
        extras: Multimodal items. Each changes the keys of the blocks that it overlaps and of all
            later blocks.

    Returns:
        ``len(token_ids) // block_size`` keys of 32 bytes, `parent_keys` included.

    Raises:
        ValueError: The root, the block size or a token is not as described.
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
    """Like `block_keys`, but lazy: keys that are not consumed are not computed."""
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
    """Keys of consecutive blocks.

    Args:
        parent: Key of the block before them.
        data: Their token ids, 4 bytes each.
        width: Bytes of the token ids of one block.
        extras: Per block, its encoded multimodal items; empty if no block has any.
    """
    # Equal to `_hash` of parent, tokens and items, with the constant part hashed only once: most of
    # a prompt's time on the CPU is spent here.
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
    """Key of all tokens of a prompt, partial last block included; independent of the block size.

    Raises:
        ValueError: The root or a token is not as described at `block_keys`.
    """
    _check_key("root", root)
    items = _extras_in(extras, 0, len(token_ids))
    return _hash(b"kvbaton-prompt", (root, _token_bytes(token_ids), *items))


def model_digest(folder: Path) -> str:
    """Digest of a Hugging Face folder: ``config.json`` and its safetensors shards, as hex.

    A GGUF file in place of shards is read like a shard without a header.

    The digest covers each shard's name, length and header, and 64 samples of 64 KiB spread evenly
    over its tensors (all of a smaller shard). It is cheap for any size and tells weights apart.

    Raises:
        ConfigError: A file is missing or is not a safetensors file.
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
        else:  # the samples include the first and the last bytes
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
