from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvbaton.errors import ConfigError, RequestError
from kvbaton.text.chat import ChatTemplate, normalize_messages
from kvbaton.text.tokenizer import Tokenizer
from tests.support.scripted_source import TEMPLATE, write_tokenizer

FULL = """
{%- if tools %}
    <tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
{% endif %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {{ bos_token + message['role'] }}: {{ message.content | trim }}
    {% if message.tool_calls %}{{ message.tool_calls | tojson(indent=2) }}{% endif %}
    {% generation %}{{ loop.index0 }}{% endgeneration %}
    {% if loop.index0 == 4 %}{% break %}{% endif %}
{% endfor %}
{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}
{{ ns.n }} {{ dict(a=1) }} {{ mode | default('none') }} {{ strftime_now('%') | length }}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "skip", "content": "never seen"},
    {"role": "user", "content": " Größe? 東京 "},
    {
        "role": "assistant",
        "content": "yes",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": "<é>"}}}],
    },
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": "<b>"}}}]


@pytest.mark.parametrize("template", [TEMPLATE, FULL])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renders_like_transformers(tmp_path: Path, template: str, prompt: bool, tools: Any) -> None:
    write_tokenizer(tmp_path, chat_template=template)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(
        TALK, tools=tools, add_generation_prompt=prompt, tokenize=False, mode="fast"
    )
    ours = Tokenizer.load(tmp_path).chat_template
    assert ours is not None
    assert (
        ours.render(TALK, tools=tools, add_generation_prompt=prompt, variables={"mode": "fast"})
        == theirs
    )


def render(source: str, **kwargs: Any) -> str:
    return ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], **kwargs)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ missing.field }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_a_template_that_fails_is_the_requests_fault(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert (caught.value.param, caught.value.status) == ("messages", 400)


def test_reserved_variables_are_refused() -> None:
    with pytest.raises(RequestError, match="messages") as caught:
        render("x", variables={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_that_does_not_compile_is_a_setting() -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        ChatTemplate("{% for %}", {})


def test_messages_are_brought_to_one_form() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call: dict[str, Any] = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }
    done = normalize_messages(
        [
            {"role": "user", "content": parts, "name": "me"},
            {"role": "assistant", "tool_calls": [call]},
        ]
    )
    assert done[0] == {"role": "user", "content": "a\nb", "name": "me"}
    assert done[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert call["function"]["arguments"] == '{"a": 1}', "the request itself is left alone"


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        ("{{ messages[0].content }}", ""),
        ("{{ '<' + messages[0]['content'] + '>' }}", "<>"),
        ("{{ '<' ~ messages[0].content ~ '>' }}", "<>"),
        ("{{ messages[0].content | trim | length }}", "0"),
        ("{% if messages[0].content %}text{% else %}calls{% endif %}", "calls"),
        ("{% if messages[0].content is none %}calls{% endif %}", "calls"),  # as DeepSeek-V3's does
        ("{% if messages[0]['content'] is not none %}text{% endif %}", ""),
    ],
)
def test_a_message_of_calls_only_has_no_content(source: str, prompt: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    for content in ({}, {"content": None}):
        messages = normalize_messages([{"role": "assistant", "tool_calls": [call], **content}])
        assert ChatTemplate(source, {}).render(messages) == prompt
        with pytest.raises(RequestError, match="text to continue"):
            ChatTemplate(source, {}).render(
                messages, add_generation_prompt=False, continue_final_message=True
            )


def test_an_empty_list_of_calls_is_none() -> None:
    source = "{% if 'tool_calls' in messages[0] %}{{ raise_exception('one call') }}{% endif %}"
    for content in ("", None):
        message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": []}
        assert ChatTemplate(source, {}).render(normalize_messages([message])) == ""


def test_an_answer_that_was_cut_within_its_reasoning_may_be_sent_back_without_it() -> None:
    """Clients that know no reasoning keep what the answer's message has beside it: null."""
    (message,) = normalize_messages([{"role": "assistant", "content": None}])
    assert message == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": 1, "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [7]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": 1}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        *[
            (
                {"role": "assistant", "tool_calls": [{"function": function}]},
                f"messages[0].tool_calls[0].function.{field}",
            )
            for function, field in (
                ({"arguments": "{}"}, "name"),
                ({"name": 5, "arguments": "{}"}, "name"),
                ({"name": "f", "arguments": 5}, "arguments"),
                ({"name": "f", "arguments": ["a"]}, "arguments"),
            )
        ],
    ],
)
def test_wrong_messages_are_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalize_messages([message])
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, "{}"),
        ({"arguments": None}, "{}"),
        ({"arguments": ""}, "{}"),
        ({"arguments": {"a": 1}}, '{"a": 1}'),
        ({"arguments": '{"a": "so'}, '{"INVALID_JSON": "{\\"a\\": \\"so"}'),
        ({"arguments": "[1]"}, '{"INVALID_JSON": "[1]"}'),
        ({"arguments": "null"}, '{"INVALID_JSON": "null"}'),
    ],
)
@pytest.mark.parametrize("source", ["{{ a | tojson }}", "{{ '' + a }}", "{{ dict(a) | tojson }}"])
def test_arguments_of_any_call_go_back(source: str, given: dict[str, Any], shown: str) -> None:
    """Also those that a model got wrong, or that were cut off: they were our answer."""
    call = {"type": "function", "function": {"name": "f", **given}}
    messages = normalize_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    a = "{% set a = messages[0].tool_calls[0].function.arguments %}"
    assert ChatTemplate(a + source, {}).render(messages) == shown


@pytest.mark.parametrize(
    ("test", "prompt"),
    [
        ("m.role == 'system'", "Be brief."),
        ("m.role in ('system', 'developer')", "Be brief."),
        ("m.role == 'developer'", "Be brief."),
    ],
)
def test_developers_are_heard(test: str, prompt: str) -> None:
    """Most templates drop or refuse a role that they do not know."""
    source = f"{{% for m in messages if {test} %}}{{{{ m.content }}}}{{% endfor %}}"
    said = {"role": "developer", "content": "Be brief."}
    assert ChatTemplate(source, {}).render([said]) == prompt
    assert said["role"] == "developer", "the request itself is left alone"


def test_reasoning_has_two_names() -> None:
    for names in ({"reasoning": "Hm."}, {"reasoning_content": None, "reasoning": "Hm."}):
        (message,) = normalize_messages([{"role": "assistant", "content": "Yes.", **names}])
        assert message["reasoning_content"] == "Hm."
