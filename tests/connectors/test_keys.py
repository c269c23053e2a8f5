"""Keys: golden values, what must differ differs, what must be equal is equal."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.connectors.keys import (
    Extra,
    IdentityRecord,
    block_keys,
    dummy_model_digest,
    model_digest,
    prompt_key,
    root_key,
)
from kvbaton.errors import ConfigError
from kvbaton.testing.store_objects import make_owner

RECORD = make_owner("ab" * 32).record
ROOT = root_key(RECORD.digest(), "salt")

ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)
sizes = st.integers(1, 9)


def test_golden_values() -> None:
    """These never change without `KEY_SCHEMA`: stores and other releases hold them."""
    assert (
        RECORD.digest().hex() == "5e0fca989887217fcdb66bf1f88e3394eaad0e1cb31e39f7dbfdecfa2e14fc83"
    )
    assert ROOT.hex() == "04f9dfb8e1d81349a5be21bf568b1c1a132c57f371a33cd763cd2b13a8e557d8"
    keys = block_keys(ROOT, [1, 2, 3, 4, 5], 2, extras=[Extra(1, 2, b"image")])
    assert [key.hex() for key in keys] == [
        "a5773e4f2cd73d9b3bb681d9dc1a7308ce4152754985b28091b411961918973d",
        "30cc9b09d250e7dc9a93d46600381737bc88e68a627006b281ba0a2d0a9ed31e",
    ]
    assert prompt_key(ROOT, [1, 2, 3, 4, 5]).hex() == (
        "9048df47f7253ba7fffe934cad830cf71f6e80b544b138a6a2fe123e920e235d"
    )
    assert dummy_model_digest(b"{}", 7) == (
        "3a4ff326613498540e45b9f7f54ec6be6ceb93ab3bde0d576437a7e78dc61a25"
    )


def test_keys_do_not_depend_on_the_process() -> None:
    code = (
        "from kvbaton.connectors.keys import *; import sys;"
        "print(prompt_key(root_key(bytes(32), 's'), range(9)).hex(), 'numpy' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == [prompt_key(root_key(bytes(32), "s"), range(9)).hex(), "False"]


@pytest.mark.parametrize("field", IdentityRecord.__struct_fields__)
def test_every_field_of_the_record_counts(field: str) -> None:
    other = msgspec.structs.replace(RECORD, **{field: 2 if field == "key_schema" else "other"})
    assert other.digest() != RECORD.digest()
    assert other.record()[field] != RECORD.record()[field]


def test_fields_of_the_record_are_mandatory() -> None:
    for field in IdentityRecord.__struct_fields__[:-1]:
        values = msgspec.structs.asdict(RECORD)
        del values[field]
        with pytest.raises(TypeError, match=field):
            IdentityRecord(**values)


def test_fields_do_not_run_into_each_other() -> None:
    first = msgspec.structs.replace(RECORD, adapter="ab", encoder="c")
    second = msgspec.structs.replace(RECORD, adapter="a", encoder="bc")
    assert first.digest() != second.digest()


def test_purposes_are_separate() -> None:
    """A root, a block and a prompt never meet, even over the same bytes."""
    assert len({ROOT, prompt_key(ROOT, [1, 2]), *block_keys(ROOT, [1, 2], 2)}) == 3


@given(a=st.tuples(st.binary(max_size=4), st.text(max_size=4)), b=st.data())
@settings(max_examples=60, deadline=None)
def test_roots_are_equal_only_for_equal_inputs(a: tuple[bytes, str], b: st.DataObject) -> None:
    adapter, salt = a
    other = b.draw(st.tuples(st.binary(max_size=4), st.text(max_size=4)))
    same = (adapter, salt) == other
    digest = RECORD.digest()
    assert (root_key(digest, salt, adapter) == root_key(digest, other[1], other[0])) == same


@given(tokens=ids, other=ids, size=sizes)
@settings(max_examples=100, deadline=None)
def test_keys_are_equal_exactly_as_long_as_prefixes_are(
    tokens: list[int], other: list[int], size: int
) -> None:
    shared = next(
        (i for i, (x, y) in enumerate(zip(tokens, other, strict=False)) if x != y),
        min(len(tokens), len(other)),
    )
    mine, theirs = block_keys(ROOT, tokens, size), block_keys(ROOT, other, size)
    assert len(mine) == len(tokens) // size
    for i, (x, y) in enumerate(zip(mine, theirs, strict=False)):
        assert (x == y) == ((i + 1) * size <= shared)
    assert len(set(mine)) == len(mine)
    assert (prompt_key(ROOT, tokens) == prompt_key(ROOT, other)) == (tokens == other)


@given(tokens=ids, size=sizes, known=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_incremental_equals_one_shot(tokens: list[int], size: int, known: int) -> None:
    extras = [Extra(2, 5, b"x")]
    whole = block_keys(ROOT, tokens, size, extras=extras)
    first = block_keys(ROOT, tokens[:known], size, extras=extras)
    assert block_keys(ROOT, tokens, size, parent_keys=first, extras=extras) == whole


@given(tokens=ids, size=sizes, start=st.integers(0, 30), length=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_an_item_changes_the_blocks_from_its_first_on(
    tokens: list[int], size: int, start: int, length: int
) -> None:
    plain = block_keys(ROOT, tokens, size)
    with_item = block_keys(ROOT, tokens, size, extras=[Extra(start, length, b"image")])
    for i, (x, y) in enumerate(zip(plain, with_item, strict=True)):
        assert (x == y) == ((i + 1) * size <= start)
    moved = block_keys(ROOT, tokens, size, extras=[Extra(start + 1, length, b"image")])
    touched = [i for i in range(len(plain)) if (i + 1) * size > start]
    assert all(with_item[i] != moved[i] for i in touched)


def test_items_in_another_order_are_the_same_items() -> None:
    items = [Extra(0, 2, b"a"), Extra(2, 2, b"b")]
    assert block_keys(ROOT, range(8), 4, extras=items) == block_keys(
        ROOT, range(8), 4, extras=items[::-1]
    )
    assert prompt_key(ROOT, range(8), extras=items) != prompt_key(ROOT, range(8))


@pytest.mark.parametrize("bad", [[-1], [2**32], [0.5]])
def test_bad_tokens_are_refused_by_name(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        prompt_key(ROOT, bad)


def test_bad_sizes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="identity"):
        root_key(b"short", "")
    with pytest.raises(ValueError, match="root"):
        block_keys(b"short", [1], 1)
    with pytest.raises(ValueError, match="block_size"):
        block_keys(ROOT, [1], 0)


# --- model digest ---


def write_model(folder: Path, *, data: bytes, header: bytes = b"{}", config: object = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"value": config}))
    shard = struct.pack("<Q", len(header)) + header + data
    (folder / "model-1.safetensors").write_bytes(shard)
    return folder


def test_model_digest_depends_on_config_header_name_and_data(tmp_path: Path) -> None:
    base = model_digest(write_model(tmp_path / "a", data=bytes(100)))
    assert len(base) == 64
    assert base == model_digest(write_model(tmp_path / "b", data=bytes(100)))
    assert base != model_digest(write_model(tmp_path / "c", data=bytes(99) + b"x"))
    assert base != model_digest(write_model(tmp_path / "d", data=bytes(100), header=b"{ }"))
    assert base != model_digest(write_model(tmp_path / "e", data=bytes(100), config=2))
    (tmp_path / "b" / "model-1.safetensors").rename(tmp_path / "b" / "model-2.safetensors")
    assert base != model_digest(tmp_path / "b")


def test_model_digest_samples_all_of_a_big_shard(tmp_path: Path) -> None:
    """A change of 1 % of the bytes anywhere in a shard of 8 MiB is seen."""
    size = 8 << 20
    base = model_digest(write_model(tmp_path / "a", data=bytes(size)))
    for part in range(0, 100, 11):
        data = bytearray(size)
        begin = part * (size // 100)
        data[begin : begin + 2 * size // 100] = b"\1" * (2 * size // 100)
        assert model_digest(write_model(tmp_path / "b", data=bytes(data))) != base
    for place in (0, size - 1):
        data = bytearray(size)
        data[place] = 1
        assert model_digest(write_model(tmp_path / "b", data=bytes(data))) != base


def test_model_digest_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        model_digest(tmp_path)
    folder = write_model(tmp_path / "a", data=b"")
    (folder / "model-1.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(ConfigError, match="cut off"):
        model_digest(folder)
    for content, told in (
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "git lfs pull"),
        (b"\n<!DOCTYPE html>\n<title>Log in</title>", "a web page"),
    ):
        (folder / "model-1.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"model-1\.safetensors is no .+: it is .*{told}"):
            model_digest(folder)
    write_model(folder, data=b"")
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_digest(folder)


def test_dummy_digest_depends_on_both() -> None:
    digests = {dummy_model_digest(c, s) for c in (b"{}", b"{ }") for s in (0, 1)}
    assert len(digests) == 4
