"""What is made of `structured_outputs` and checked before a node gets it."""

from __future__ import annotations

import asyncio

import llguidance
import pytest

from kvbaton.errors import RequestError
from kvbaton.text import grammar_check
from kvbaton.text.grammar_check import checked_grammar
from kvbaton.text.structured import StructuredOutputs, joined
from tests.support.waiting import PATIENCE_S

FIELD = "structured_outputs"


async def grammar_of(wanted: StructuredOutputs) -> str:
    return await checked_grammar(joined("start: @body\n", {"body": wanted.piece()}), FIELD)


def ends(grammar: str, text: str) -> bool:
    """Whether a text is all that a grammar wants."""
    state = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    ids = list(text.encode())
    return bool(state.try_consume_tokens(ids) == len(ids) and state.is_accepting())


async def test_many_choices() -> None:
    """Of more than 2,000 alternatives the library's parser makes an error of the first token."""
    grammar = await grammar_of(StructuredOutputs(choice=[f"w{i}" for i in range(5000)]))
    assert ends(grammar, "w7")
    assert ends(grammar, "w4999")
    assert not ends(grammar, "w5000")


async def test_choices_that_begin_alike() -> None:
    grammar = await grammar_of(StructuredOutputs(choice=["ab", "a", 'a"\n\\', "東"]))
    assert [ends(grammar, text) for text in ("a", "ab", 'a"\n\\', "東")] == [True] * 4
    assert not ends(grammar, "b")


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutputs(json={"$ref": "#"}),
        StructuredOutputs(json={"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        StructuredOutputs(grammar="start: start"),
        StructuredOutputs(grammar="root ::= root"),
        StructuredOutputs(regex="[^\\x00-\\U0010FFFF]"),
    ],
)
async def test_what_no_text_fits_is_refused(wanted: StructuredOutputs) -> None:
    with pytest.raises(RequestError, match="can't be followed: no text fits it"):
        await grammar_of(wanted)


async def test_what_takes_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask for it, others are served: no thread and no process is lost to it."""
    monkeypatch.setattr(grammar_check, "CHECK_S", 0.5)
    primes = [99_999_989 + 2 * i for i in range(0, 4 * grammar_check.PROCESSES)]

    async def refusal(prime: int) -> str:
        both = [{"type": "integer", "multipleOf": 99_991}, {"multipleOf": prime}]
        with pytest.raises(RequestError) as refused:
            await grammar_of(StructuredOutputs(json={"allOf": both}))
        assert refused.value.param == FIELD
        return refused.value.message

    async with asyncio.timeout(PATIENCE_S):
        messages = await asyncio.gather(*map(refusal, primes))
        assert set(messages) == {"can't be followed: took more than 0.5 s to compile"}
        assert await asyncio.to_thread(lambda: 1) == 1
        monkeypatch.undo()
        assert ends(await grammar_of(StructuredOutputs(regex="[ab]c")), "bc")


async def test_a_check_that_others_hold_up_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    known = StructuredOutputs(regex="a{8}b")
    await grammar_of(known)
    monkeypatch.setattr(grammar_check, "PATIENCE_S", 0.0)
    with pytest.raises(RequestError) as refused:
        await grammar_of(StructuredOutputs(regex="a{7}b"))
    assert (refused.value.status, refused.value.code) == (429, "overloaded")
    await grammar_of(known)


async def test_a_checker_that_was_ended_is_replaced() -> None:
    for letter in "ab":
        assert ends(await grammar_of(StructuredOutputs(regex=letter)), letter)
        checker = grammar_check._idle.get_nowait()
        checker.kill()
        checker.wait()
        grammar_check._idle.put(checker)


async def test_a_huge_grammar_is_not_even_read() -> None:
    """Reading it takes a minute, and another language's grammar is read in Python."""
    text = "root ::= " + '"a" ' * 5_000_000
    with pytest.raises(RequestError, match="more than 262144 characters") as refused:
        StructuredOutputs(grammar=text).piece()
    assert refused.value.param == f"{FIELD}.grammar"


@pytest.mark.parametrize("regex", ["\\", "a\\", "a\\\\\\"])
async def test_a_lone_backslash_is_refused(regex: str) -> None:
    with pytest.raises(RequestError, match="ends with a lone backslash") as refused:
        StructuredOutputs(regex=regex).piece()
    assert refused.value.param == f"{FIELD}.regex"


async def test_slashes_and_backslashes_of_a_regex() -> None:
    assert ends(await grammar_of(StructuredOutputs(regex="a/\\\\")), "a/\\")
