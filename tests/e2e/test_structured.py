"""Structured output of a pair behind a router, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.cluster import Cluster
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


def test_forced_calls_cross(cluster: Cluster, main_nodes: tuple[Node, Node, Router]) -> None:
    p, d, _ = main_nodes
    flags = "--tool-call-parser=hermes", f"--prefill={p.url}", f"--decode={d.url}"
    router = cluster.start_router("calls-router", *flags)
    cluster.until_up(p, d, router=router, pairs=1)
    before = d.metrics()("kvbaton_prompt_tokens_total", source="transferred")
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    named: Any = {"type": "function", "function": {"name": "f"}}
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="any", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": "tiny", "messages": ASK, "temperature": 1.0, "seed": 5, "max_tokens": 300,
            "tools": [tool], "tool_choice": named,
        }  # fmt: skip
        (choice,) = client.chat.completions.create(**asked).choices
        assert (choice.finish_reason, choice.message.content) == ("stop", None)
        (call,) = choice.message.tool_calls or []
        assert call.function.name == "f"
        check(call.function.arguments)
        deltas = [
            delta
            for chunk in client.chat.completions.create(**asked, stream=True)
            for c in chunk.choices
            for delta in c.delta.tool_calls or []
        ]
        assert deltas[0].function.name == "f"
        assert "".join(d.function.arguments or "" for d in deltas) == call.function.arguments
    assert d.metrics()("kvbaton_prompt_tokens_total", source="transferred") > before
    cluster.stop([router])
