import json
import random
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from kvbaton.text import words
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.text.words import WordCache
from tests.server_support import SENTENCES, train_backend

CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
EXPRESSIONS = {
    "llama3": rf"{CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}",
    "qwen2": rf"{CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{TAIL}",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{CONTRACTED}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{CONTRACTED}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def backend_of(expression: str | None) -> tokenizers.Tokenizer:
    backend = train_backend()
    if expression is not None:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    backend.add_special_tokens(["<|im_start|>", "<|im_start|>x"])
    return backend


def cache_of(backend: tokenizers.Tokenizer) -> WordCache | None:
    return WordCache.of(backend, json.loads(backend.to_str()))


@pytest.mark.parametrize("expression", [None, *EXPRESSIONS.values()], ids=["gpt2", *EXPRESSIONS])
def test_any_ascii_text_has_the_ids_that_tokenizers_gives(expression: str | None) -> None:
    backend, chance = backend_of(expression), random.Random(0)
    cache, pieces = cache_of(backend), ["  ", "\r\n", "\n", " 's", "I'LL", "<|im_start|>", "1234"]
    pieces += [*map(chr, range(128)), *" ".join(SENTENCES).split(), *("aZ' " * 9), "<|im_start|>x"]
    assert cache is not None
    answered = 0
    for _ in range(600):
        text = "".join(chance.choices(pieces, k=chance.randrange(60)))
        expected = backend.encode(text).ids
        answered += cache.encode(text) is not None
        if text.isascii():
            assert cache.encode(text) in (None, expected)
            assert cache.encode(text, add_special_tokens=False) in (
                None,
                backend.encode(text, add_special_tokens=False).ids,
            )
    assert answered > 200


def test_a_text_begins_and_ends_as_the_model_wants() -> None:
    backend = train_backend()
    ends = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ends
    )
    cache = cache_of(backend)
    assert cache is not None
    for special in (True, False):
        expected = backend.encode("hello there", add_special_tokens=special).ids
        assert cache.encode("hello there", add_special_tokens=special) == expected
    assert cache.encode("") == [number for _, number in ends]


@pytest.mark.parametrize(
    "text", ["naïve", "a<odd>b", "x" * (words.LONGEST_TEXT + 1)], ids=["unicode", "added", "long"]
)
def test_what_it_can_not_do_is_left_to_tokenizers(text: str) -> None:
    backend = train_backend()
    backend.add_tokens([AddedToken("<odd>", lstrip=True, rstrip=True)])
    cache = cache_of(backend)
    assert cache is not None
    assert cache.encode(text) is None
    assert Tokenizer(backend).encode(text) == backend.encode(text).ids


def test_a_text_of_many_new_words_is_left_to_tokenizers_until_they_are_known() -> None:
    backend = train_backend()
    cache, text = cache_of(backend), " ".join(f"q{'z' * n}" for n in range(words.MAX_LEARNED + 3))
    assert cache is not None
    tries = [cache.encode(text) for _ in range(5)]
    assert tries[0] is None
    assert tries[-1] == backend.encode(text).ids


def test_it_forgets_before_it_holds_too_many_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MAX_WORDS", 100)
    backend = backend_of(None)
    cache = cache_of(backend)
    assert cache is not None
    for number in range(500):
        text = f"w{chr(97 + number % 26)}{chr(97 + number // 26)} <|im_start|>"
        assert cache.encode(text) == backend.encode(text).ids
    assert len(cache) <= 100 + words.MAX_LEARNED


@pytest.mark.parametrize(
    "change",
    [
        {"model": models.WordLevel({}, unk_token="")},
        {"normalizer": normalizers.Lowercase()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": None},
        {"pre_tokenizer": ("merged_with_next", r"\p{L}+|\s+|[^\s\p{L}]+")},
        {"pre_tokenizer": ("isolated", r"[\p{L}&&[^a]]+|.")},
        {"pre_tokenizer": ("isolated", r"\p{L}+$|\P{L}+|.")},
        {"pre_tokenizer": ("isolated", r"\p{Greek}+|.")},
        {"pre_tokenizer": ("isolated", r"[a-z]+")},
    ],
    ids=str,
)
def test_tokenizers_of_other_kinds_are_left_alone(change: dict[str, Any]) -> None:
    backend = train_backend()
    for name, value in change.items():
        if isinstance(value, tuple):
            split = pre_tokenizers.Split(Regex(value[1]), value[0])
            value = pre_tokenizers.Sequence(
                [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
            )
        setattr(backend, name, value)
    assert cache_of(backend) is None
