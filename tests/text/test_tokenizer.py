import json
import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from kvbaton.errors import ConfigError
from kvbaton.text.tokenizer import Tokenizer
from tests.support.scripted_source import SENTENCES, SPECIAL, train_backend, write_tokenizer
from tests.support.waiting import PATIENCE_S


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
        {"pad_token": "<pad>"},
    ],
)
def test_encodes_like_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    theirs = AutoTokenizer.from_pretrained(str(write_tokenizer(tmp_path, **config)))
    ours = Tokenizer.load(tmp_path)
    for text in [*SENTENCES, "", "<|user|>hi</s>", "<pad> x"]:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected
            for skip in (True, False):
                text_back = theirs.decode(expected, skip_special_tokens=skip)
                assert ours.decode(expected, skip_special_tokens=skip) == text_back
    assert ours.special_tokens == theirs.special_tokens_map


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = train_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode(SENTENCES[0])) == len(
        train_backend().encode(SENTENCES[0]).ids
    )


def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    for text in SENTENCES:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.token_text(SPECIAL.index("</s>")) == "</s>"
    assert tokenizer.token_text(10**6) == ""


def test_other_threads_go_on_while_a_long_text_is_decoded(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Größe", add_special_tokens=False) * 200_000
    begins, turns = threading.Event(), 0

    def decode() -> str:
        begins.set()
        return tokenizer.decode(ids)

    with ThreadPoolExecutor(1) as threads:
        decoded = threads.submit(decode)
        assert begins.wait(PATIENCE_S)
        while not decoded.done():
            turns += 1
            time.sleep(0.0001)
    assert decoded.result() == "Größe" * 200_000
    assert turns > 10


def test_bytes_of_byte_fallback_tokens() -> None:
    vocab = {"<unk>": 0, "▁a": 1, **{f"<0x{i:02X}>": 2 + i for i in range(256)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes(2 + 0xE2) == b"\xe2"
    assert tokenizer.token_text(1) == " a"


def test_a_missing_folder_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is missing"):
        Tokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "is no tokenizer: "),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ("tokenizer_config.json", "{", "can't be read as JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"a":' * 100_000, "can't be read as JSON"),
        ("tokenizer_config.json", '{"bos_token": 7}', "bos_token must be a string"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template must be a string"),
        ("chat_template.jinja", "{% if %}", "does not compile"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(tmp_path)


def test_where_the_chat_template_comes_from(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    write_tokenizer(tmp_path, chat_template=named)
    message = [{"role": "user", "content": "x"}]
    template = Tokenizer.load(tmp_path).chat_template
    assert template is not None
    assert template.render(message) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    template = Tokenizer.load(tmp_path).chat_template
    assert template is not None
    assert template.render(message) == "F"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    assert Tokenizer.load(tmp_path).chat_template is None


def test_another_chat_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    other = tmp_path / "other.jinja"
    other.write_text("{{ bos_token }}{{ messages[-1].content }}!")
    template = Tokenizer.load(tmp_path, other).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "Hey"}]) == "<s>Hey!"
    with pytest.raises(ConfigError, match=r"nowhere\.jinja"):
        Tokenizer.load(tmp_path, tmp_path / "nowhere.jinja")


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(kind: str) -> tokenizers.Tokenizer:
    """A small tokenizer of the shape that a family of models has."""
    alphabet: list[str] = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    if kind == "gpt2":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind in ("llama3", "qwen"):
        pattern = LLAMA3 if kind == "llama3" else LLAMA3.replace("{1,3}", "")
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, rest])
    else:
        alphabet = []
        if kind == "spm":
            backend.model = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
            special += [f"<0x{byte:02X}>" for byte in range(256)]
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    if kind == "qwen":
        backend.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([word for text in SENTENCES for word in text.split(" ")], trainer)
    backend.add_special_tokens([tokenizers.AddedToken("<|end|>", normalized=False)])
    backend.add_tokens([tokenizers.AddedToken("<extra>", lstrip=True, rstrip=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


@pytest.mark.parametrize(
    ("kind", "fast"),
    [("gpt2", True), ("llama3", True), ("qwen", True), ("spm", True), ("no_unk", False)],
)
def test_fastokens_is_taken_where_it_makes_the_same_tokens(
    kind: str, fast: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("fastokens")
    backend, chance = trained(kind), random.Random(3)
    with caplog.at_level(logging.INFO, "kvbaton.text.tokenizer"):
        tokenizer = Tokenizer(backend)
    assert ("other tokens of" in caplog.text) == (not fast)
    pieces = [
        *SENTENCES,
        "<|end|>",
        " <extra> ",
        "don't",
        "\n\n",
        " \t ",
        "1234567",
        "\u3000",
        "Ǆ",
        "ﬁ",
    ]
    for _ in range(200):
        text = "".join(chance.choices(pieces, k=chance.randint(0, 9)))
        text += "".join(chr(chance.randrange(1, 0x3000)) for _ in range(chance.randint(0, 20)))
        for special in (True, False):
            expected = backend.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, add_special_tokens=special) == expected


def test_tokens_that_the_model_lacks_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, not by each text that has one."""
    write_tokenizer(tmp_path)
    whole = Tokenizer.load(tmp_path).vocab_size
    config = tmp_path / "config.json"
    for said in (whole, whole + 64, None):
        config.write_text(json.dumps({"vocab_size": said}))
        Tokenizer.load(tmp_path)
    assert not caplog.messages
    config.write_text(json.dumps({"vocab_size": whole, "text_config": {"vocab_size": whole - 1}}))
    Tokenizer.load(tmp_path)
    (told,) = caplog.messages
    assert f"token ids go up to {whole - 1}, but the model has {whole - 1}" in told


def test_a_tokenizer_that_puts_what_the_model_lacks_into_every_text_is_refused(
    tmp_path: Path,
) -> None:
    backend = train_backend()
    last = backend.get_vocab_size() - 1
    token = backend.id_to_token(last)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, last)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": last}))
    with pytest.raises(ConfigError, match=rf"puts '.*' into every text, which no model of {last} "):
        Tokenizer.load(tmp_path)
