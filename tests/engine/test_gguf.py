"""GGUF files serve as the same weights in a Hugging Face folder would; broken ones are told."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import tokenizers
import torch
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from kvbaton.connectors.keys import model_digest
from kvbaton.engine.collectives import Shard
from kvbaton.engine.gguf import model_folder
from kvbaton.engine.loader import load_model
from kvbaton.engine.model_config import load_model_config
from kvbaton.errors import ConfigError
from kvbaton.text.tokenizer import Tokenizer
from tests.engine.test_loader import CPU, logits
from tests.support.gguf_files import write_gguf

Checkpoint = Callable[..., Path]
TEXTS = ("The capital of France is 1234, naïve 東京.", "  two\n\nlines\t", "<|turn|>user\nhi")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    write_gguf(checkpoint(), tmp_path / "tiny.gguf", Kind.Q8_0)
    return tmp_path / "tiny.gguf"


def dequantised(folder: Path, target: Path, weights: dict[str, object]) -> Path:
    """The folder with other weights."""
    shutil.copytree(folder, target)
    save_file(weights, target / "model.safetensors")  # type: ignore[arg-type]
    return target


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_the_dequantised_folder(
    checkpoint: Checkpoint, tmp_path: Path, family: str, kind: str
) -> None:
    folder = checkpoint(family=family)
    weights = write_gguf(folder, tmp_path / "tiny.gguf", Kind[kind])
    plain = dequantised(folder, tmp_path / "plain", dict(weights))
    found, wanted = (
        logits(load_model(load_model_config(x), device=CPU))
        for x in (model_folder(tmp_path / "tiny.gguf"), plain)
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("named", ["/proc/none", ""])
def test_where_nothing_can_be_kept_it_is_said_what_to_set(
    file: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    def nobodys() -> Path:
        raise RuntimeError("Could not determine home directory.")  # as in containers of any user

    monkeypatch.setattr(Path, "home", nobodys)
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        model_folder(file)


def test_tied_embeddings(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint(tied=True)
    write_gguf(folder, tmp_path / "tiny.gguf")
    served = model_folder(tmp_path / "tiny.gguf")
    found, wanted = (logits(load_model(load_model_config(x), device=CPU)) for x in (served, folder))
    assert torch.equal(found, wanted)


def test_as_many_kv_heads_as_heads_need_not_be_said(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Keys were left in llama.cpp's order then, and nothing was said."""
    folder = checkpoint(num_kv_heads=4)
    write_gguf(folder, tmp_path / "tiny.gguf")
    served = model_folder(tmp_path / "tiny.gguf")
    found, wanted = (logits(load_model(load_model_config(x), device=CPU)) for x in (served, folder))
    assert torch.equal(found, wanted)


def test_ranks_take_their_parts(checkpoint: Checkpoint, file: Path, tmp_path: Path) -> None:
    weights = write_gguf(checkpoint(), tmp_path / "again.gguf", Kind.Q8_0)
    plain = dequantised(checkpoint(), tmp_path / "plain", dict(weights))
    for rank in range(2):
        found, wanted = (
            load_model(load_model_config(x), device=CPU, shard=Shard(rank, 2)).state_dict()
            for x in (model_folder(file), plain)
        )
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_tokenizer_is_the_folders(checkpoint: Checkpoint, file: Path) -> None:
    ours, theirs = Tokenizer.load(model_folder(file)), Tokenizer.load(checkpoint())
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.special_tokens == theirs.special_tokens
    assert ours.chat_template is not None
    assert theirs.chat_template is not None
    talk = [{"role": "user", "content": "hi"}]
    assert ours.chat_template.render(talk) == theirs.chat_template.render(talk)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "Ġhave", "Ġ1234", "ĠDON", "'", "T", "!?", "Ċ"]),
        ("smollm", ["I", "Ġhave", "Ġ", "1", "2", "3", "4", "ĠDON", "'", "T", "!?", "Ċ"]),
        ("llama-bpe", ["I", "Ġhave", "Ġ", "123", "4", "ĠDON", "'T", "!?Ċ"]),
        ("qwen2", ["I", "Ġhave", "Ġ", "1", "2", "3", "4", "ĠDON", "'T", "!?Ċ"]),
    ],
)
def test_texts_are_split_as_the_file_says(
    checkpoint: Checkpoint, tmp_path: Path, pre: str, words: list[str]
) -> None:
    write_gguf(checkpoint(), tmp_path / "tiny.gguf", pre=pre)
    folder = model_folder(tmp_path / "tiny.gguf")
    splitter = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json").pre_tokenizer
    found = splitter.pre_tokenize_str("I have 1234 DON'T!?\n")
    assert [word for word, _ in found] == words


def test_another_tokenizer_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    write_gguf(checkpoint(), tmp_path / "tiny.gguf", pre="tekken")
    with pytest.raises(ConfigError, match=r"its tokenizer \(gpt2, tekken\) is not supported"):
        model_folder(tmp_path / "tiny.gguf")


def test_a_folder_is_written_once_per_file(file: Path, cache: Path) -> None:
    first = model_folder(file)
    stamp = Path(first, "config.json").stat().st_mtime_ns
    assert model_folder(file) == first
    assert Path(first, "config.json").stat().st_mtime_ns == stamp
    assert [path.name for path in (cache / "kvbaton" / "gguf").iterdir()] == [Path(first).name]
    assert model_folder("some/folder") == "some/folder"


def test_the_same_file_elsewhere_is_the_same_model(file: Path, tmp_path: Path) -> None:
    other = Path(shutil.copy(file, tmp_path / "copy.gguf"))
    digests = {model_digest(Path(model_folder(path))) for path in (file, other)}
    assert len(digests) == 1
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    assert model_digest(Path(model_folder(other))) not in digests


def test_files_that_are_cut_or_foreign(file: Path, tmp_path: Path) -> None:
    data, bad = file.read_bytes(), tmp_path / "bad.gguf"
    for content, message in (
        (b"", "can't read"),
        (b"not a model", "is no GGUF file$"),
        (b"version https://git-lfs.github.com/spec/v1", "is no GGUF file: .*git lfs pull"),
        (b"GGUF\x01\0\0\0" + data[8:], "has GGUF version 1"),
        (data[:100], "header is cut off"),
        (data[: len(data) // 2], r"is truncated: tensor '.+' ends at byte"),
    ):
        bad.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            model_folder(bad)
    with pytest.raises(ConfigError, match="can't read"):
        model_folder(tmp_path / "none.gguf")


def test_what_is_not_supported_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "windows.gguf"
    write_gguf(checkpoint(), path, llama__attention__sliding_window=8)
    with pytest.raises(ConfigError, match="sliding window 8"):
        model_folder(path)
    write_gguf(checkpoint(), tmp_path / "turned.gguf", llama__rope__dimension_count=8)
    with pytest.raises(ConfigError, match="8 features of a head of 16 are turned"):
        model_folder(tmp_path / "turned.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"gemma"))
    with pytest.raises(ConfigError, match="'gemma' is none of llama, qwen2, qwen3"):
        model_folder(path)


def test_a_file_that_is_gone_is_told(file: Path) -> None:
    folder = model_folder(file)
    file.unlink()
    with pytest.raises(ConfigError, match=r"has neither|can't read"):
        load_model(load_model_config(folder), device=CPU)


def test_any_damage_is_told_or_harmless(file: Path) -> None:
    whole = file.read_bytes()
    first = whole.find(b"tokenizer.ggml.tokens")
    told = 0
    for seed in range(200):
        chance, data = random.Random(seed), bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(first if seed % 2 else len(data) // 2)] = chance.randrange(256)
        file.write_bytes(data)
        with suppress(ConfigError):
            told += 1
            folder = model_folder(file)
            load_model(load_model_config(folder), device=CPU)
            Tokenizer.load(folder).encode(TEXTS[0])
            told -= 1
    assert told > 50
