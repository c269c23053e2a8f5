from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from kvbaton.text.detokenize import (
    MAX_WINDOW,
    REPLACEMENT,
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)
from kvbaton.text.tokenizer import Tokenizer
from tests.support.scripted_source import SENTENCES, SPECIAL, VOCAB, train_backend

KINDS = [ByteDetokenizer, WindowDetokenizer]


def byte_level_tokenizer() -> Tokenizer:
    """With added tokens that are no byte-level ones, or whose bytes are not their characters."""
    backend = train_backend()
    backend.add_tokens(["a b", "né", "Ġy"])
    backend.add_special_tokens(["<é>"])
    return Tokenizer(backend)


BYTE_LEVEL = byte_level_tokenizer()


def metaspace_tokenizer() -> Tokenizer:
    """As Llama 2's: words begin with U+2581, unknown characters are bytes."""
    words = ["▁", "▁the", "▁dog", "s", "a", "▁a"]
    vocab = {word: i for i, word in enumerate(["<unk>", *words])}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


METASPACE = metaspace_tokenizer()


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found: int | None = tokenizer._backend.token_to_id(token)
    assert found is not None
    return found


def deltas(
    tokenizer: Tokenizer,
    ids: list[int],
    prompt: list[int],
    skip: bool,
    kind: Callable[..., Detokenizer] = Detokenizer.of,
) -> list[str]:
    detokenizer = kind(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(text=st.text(max_size=60), skip=st.booleans())
def test_deltas_of_any_text_join_to_it_and_are_never_broken(
    kind: type[Detokenizer], text: str, skip: bool
) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    parts = deltas(BYTE_LEVEL, ids, [], skip, kind)
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(parts) == whole
    if REPLACEMENT not in whole:  # as in a text with "né", an added token of broken bytes
        assert not any(REPLACEMENT in part for part in parts)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(ids=st.lists(st.integers(0, VOCAB + 8), max_size=40), skip=st.booleans())
def test_deltas_of_any_tokens_join_to_the_full_decode(
    kind: type[Detokenizer], ids: list[int], skip: bool
) -> None:
    parts = deltas(BYTE_LEVEL, ids, [], skip, kind)
    assert "".join(parts) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


def kept(detokenizer: Detokenizer) -> int:
    """Tokens or bytes that it remembers."""
    if isinstance(detokenizer, WindowDetokenizer):
        return len(detokenizer._window)
    assert isinstance(detokenizer, ByteDetokenizer)
    return len(detokenizer._rest)


@settings(deadline=None, max_examples=100)
@given(
    text=st.lists(st.sampled_from(["the", "dog", "dogs", "a", "é", "東京", "👩‍🚀"])).map(" ".join)
)
def test_byte_fallback_and_leading_spaces(text: str) -> None:
    ids = [id_of(METASPACE, "▁the")]
    for word in text.split():
        ids += METASPACE.encode(" " + word, add_special_tokens=False)
    for cut in range(min(len(ids), 4)):
        parts = deltas(METASPACE, ids[cut:], ids[:cut], True)
        before = METASPACE.decode(ids[:cut]).rstrip(REPLACEMENT)
        assert before + "".join(parts) == METASPACE.decode(ids)
        assert not any(REPLACEMENT in part for part in parts)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    detokenizer = Detokenizer.of(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode("a dog", add_special_tokens=False)
    shown = ""
    for i, token in enumerate(ids):
        shown += detokenizer.push(token)
        assert shown == BYTE_LEVEL.decode(ids[: i + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_does_not_slow_down_or_lose_anything(
    kind: type[ByteDetokenizer] | type[WindowDetokenizer],
) -> None:
    ids = BYTE_LEVEL.encode(" ".join(SENTENCES * 40), add_special_tokens=False)
    detokenizer = kind(BYTE_LEVEL)
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    assert text == " ".join(SENTENCES * 40)
    assert kept(detokenizer) < MAX_WINDOW


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE])
def test_endless_broken_bytes_are_shown_in_the_end(tokenizer: Tokenizer) -> None:
    name = "ÿ" if tokenizer is BYTE_LEVEL else "<0xFF>"
    broken = id_of(tokenizer, name)
    detokenizer = Detokenizer.of(tokenizer)
    count = 3 * MAX_WINDOW
    text = "".join(detokenizer.push(broken) for _ in range(count)) + detokenizer.flush()
    assert text == REPLACEMENT * count
    assert kept(detokenizer) <= MAX_WINDOW


def test_special_tokens_are_kept_on_demand() -> None:
    ids = [*BYTE_LEVEL.encode("a", add_special_tokens=False), SPECIAL.index("</s>")]
    assert "".join(deltas(BYTE_LEVEL, ids, [], True)) == "a"
    assert "".join(deltas(BYTE_LEVEL, ids, [], False)) == "a</s>"
