"""What is made of `structured_outputs` and checked before a node gets it."""

from __future__ import annotations

import llguidance
import pytest

from kvbaton.errors import RequestError
from kvbaton.text.structured import StructuredOutputs, checked_grammar, joined

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


@pytest.mark.parametrize("regex", ["\\", "a\\", "a\\\\\\"])
async def test_a_lone_backslash_is_refused(regex: str) -> None:
    with pytest.raises(RequestError, match="ends with a lone backslash") as refused:
        StructuredOutputs(regex=regex).piece()
    assert refused.value.param == f"{FIELD}.regex"


async def test_slashes_and_backslashes_of_a_regex() -> None:
    assert ends(await grammar_of(StructuredOutputs(regex="a/\\\\")), "a/\\")
