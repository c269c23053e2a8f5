"""Structured output of a pair behind a router, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.servers import Node, Router

openai = pytest.importorskip("openai", reason="GPU machines lack it, and no GPU test needs it")

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
ASK: list[Any] = [{"role": "user", "content": "Which is it? " * 12}]


def check(text: str) -> None:
    found = json.loads(text)
    assert found["a"] in ("x", "y")
    assert isinstance(found["b"], bool)
    assert found.keys() == {"a", "b"}


def test_json_and_choices_cross(main_nodes: tuple[Node, Node, Router]) -> None:
    *_, d, router = main_nodes
    before = d.metrics()("kvbaton_prompt_tokens_total", source="transferred")
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="any", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": "tiny", "messages": ASK, "temperature": 1.0, "seed": 3, "max_tokens": 200,
            "response_format": FORMAT,
        }  # fmt: skip
        (choice,) = client.chat.completions.create(**asked).choices
        assert choice.finish_reason == "stop"
        check(choice.message.content)
        chunks = client.chat.completions.create(**asked, stream=True)
        texts = [c.delta.content or "" for chunk in chunks for c in chunk.choices]
        assert "".join(texts) == choice.message.content
        wanted = {"structured_outputs": {"choice": ["red", "blue"]}}
        answer = client.completions.create(model="tiny", prompt="A colour: " * 9, extra_body=wanted)
        assert answer.choices[0].text in ("red", "blue")
        bad = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "strin"}}}
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**asked | {"response_format": bad})
        assert refused.value.body["param"] == "response_format.json_schema.schema"
    assert d.metrics()("kvbaton_prompt_tokens_total", source="transferred") > before
