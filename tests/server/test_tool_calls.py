# ruff: noqa: RUF001 -- DeepSeek's tags have such bars
"""Chats with models of each family: reasoning, calls and content are apart for clients.

The templates have the shape of those that are published, and their tags.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import llguidance
import openai
import pytest

from kvbaton.text.tokenizer import Tokenizer
from tests.support.scripted_source import SPECIAL, write_tokenizer

CHAT = "/v1/chat/completions"
ASK: list[Any] = [{"role": "user", "content": "How large?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {
        "name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}},
]  # fmt: skip
LOOP = "{% for m in messages %}"
SAY = "{{ '<|' + m.role + '|>' + (m.content or '') }}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
QWEN3 = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + LOOP + SAY +
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": '
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}" + PROMPT +
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)  # fmt: skip
QWEN3_CODER = (
    LOOP + SAY + "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}" + PROMPT + "{% endif %}"
)  # fmt: skip
LLAMA3 = (
    "{# <|start_header_id|> #}" + LOOP + "{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", \' }}{{ \'"parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}" + SAY + "{% endif %}" + PROMPT +
    "{% endif %}"
)  # fmt: skip
MISTRAL = (
    LOOP + "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    "{% set out = c.function | tojson %}{{ out[:-1] }}, \"id\": \"{{ c.id }}\"}{% endfor %}]"
    "{% else %}" + SAY + "{% endif %}" + PROMPT + "{% endif %}"
)  # fmt: skip
DEEPSEEK = (
    LOOP + SAY + "{% if m.tool_calls is defined %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\n```json\n' +"
    " c.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>"
    "{% endif %}" + PROMPT + "<think>\n{% endif %}{# </think> #}"
)  # fmt: skip
FAMILIES = {
    "hermes": (QWEN3, ["<think>", "</think>", "<tool_call>", "</tool_call>"]),
    "qwen3_coder": (QWEN3_CODER, ["<tool_call>", "</tool_call>"]),
    "llama3_json": (LLAMA3, ["<|python_tag|>"]),
    "mistral": (MISTRAL, ["[TOOL_CALLS]", "[ARGS]"]),
    "deepseek_v3": (
        DEEPSEEK,
        ["<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
         "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
    ),
}  # fmt: skip
ARGUMENTS = {"a": "東京 {🎉}"}
THINKING = "Größe of 東京?"
ANSWER = "<think>\nNo.\n</think>\n\nIt is 3."
PARAMETERS = "tools[0].function.parameters"
ALLOWED = "tool_choice.allowed_tools"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        name: Tokenizer.load(
            write_tokenizer(
                tmp_path_factory.mktemp(name), special=[*SPECIAL, *tags], chat_template=template
            )
        )
        for name, (template, tags) in FAMILIES.items()
    }


@pytest.fixture
def start(serve: Any, models: dict[str, Tokenizer]) -> Callable[..., Any]:
    return lambda family, text, **config: serve(text, tokenizer=models[family], **config)


def written(family: str, tokenizer: Tokenizer) -> str:
    """What the model writes for a call, as its template shows it; reasoning where it has some."""
    call = {"id": "123456789", "function": {"name": "f", "arguments": ARGUMENTS}}
    if family == "deepseek_v3":
        call["function"] = {"name": "f", "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)}
    assert tokenizer.chat_template is not None
    shown = tokenizer.chat_template.render(
        [{"role": "assistant", "content": "", "tool_calls": [call]}], add_generation_prompt=False
    )
    thought = {
        "hermes": f"<think>\n{THINKING}\n</think>\n\n",
        "deepseek_v3": f"{THINKING}\n</think>",
    }
    return thought.get(family, "") + shown.removeprefix("<|assistant|>")


def constrained(family: str, tokenizer: Tokenizer) -> str:
    """What the model writes for a call under a grammar."""
    if family == "mistral":  # of later tokenizers, which this one is
        return f"[TOOL_CALLS]f[ARGS]{json.dumps(ARGUMENTS, ensure_ascii=False)}"
    return written(family, tokenizer)


def fits(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether a text is all that a grammar wants."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(tokenizer._backend.to_str()), grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_call_is_forced(
    start: Any, models: dict[str, Tokenizer], family: str, choice: Any
) -> None:
    """What the model writes for a call fits the grammar that the engine gets, and nothing else."""
    text = constrained(family, models[family])
    endpoint = await start(family, text)
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": choice}
    status, whole = await endpoint.post(CHAT, body)
    assert status == 200, whole
    (told,) = whole["choices"]
    assert [call["function"]["name"] for call in told["message"]["tool_calls"]] == ["f"]
    assert told["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    grammar = endpoint.source.requests[0].params.grammar
    assert fits(models[family], grammar, text)
    for other in ("It is large.", text.replace('f"', 'g"').replace("=f", "=g"), ANSWER):
        assert other == text or not fits(models[family], grammar, other)


@pytest.mark.parametrize("family", FAMILIES)
async def test_an_answer_in_a_format_or_a_call(
    start: Any, models: dict[str, Tokenizer], family: str
) -> None:
    """A format of the answer leaves the model to call first; what forces a call has no answer."""
    text = constrained(family, models[family])
    endpoint = await start(family, text)
    members = {"name": {"type": "string"}, "n": {"type": "integer"}}
    schema = {"type": "object", "properties": members, "required": ["name", "n"]}
    named = {"name": "answer", "schema": schema}
    asked = {"response_format": {"type": "json_schema", "json_schema": named}, "tools": TOOLS}
    answers = ['{"name": "fa", "n": 1}', '{"name":"f","n":1}', '{ "name": "", "n": 1}']
    if family == "deepseek_v3":  # its template begins with reasoning
        answers = [f"Hm.</think>{answer}" for answer in answers]
    modes: list[tuple[Any, bool, bool]] = [
        ("auto", True, True), ("none", False, True), ("required", True, False), (NAMED, True, False)
    ]  # fmt: skip
    for choice, calls, says in modes:
        status, whole = await endpoint.post(CHAT, {"messages": ASK, **asked, "tool_choice": choice})
        assert status == 200, whole
        grammar = endpoint.source.requests[-1].params.grammar
        assert fits(models[family], grammar, text) == calls, choice
        assert [fits(models[family], grammar, a) for a in answers] == [says] * 3, choice
        assert not fits(models[family], grammar, "It is large.")
    begun = {"add_generation_prompt": False, "continue_final_message": True}
    goes_on = {**asked, **begun, "messages": [*ASK, {"role": "assistant", "content": "{"}]}
    assert (await endpoint.post(CHAT, goes_on))[0] == 200
    assert not fits(models[family], endpoint.source.requests[-1].params.grammar, text)


@pytest.mark.parametrize("family", FAMILIES)
async def test_beside_a_format_tools_are_as_they_come(
    start: Any, models: dict[str, Tokenizer], family: str
) -> None:
    """What no grammar can follow of their schemas is for the model to read, as without a format."""
    text = written(family, models[family])
    if family == "mistral":
        text = f"[TOOL_CALLS]f[ARGS]{json.dumps(ARGUMENTS, ensure_ascii=False)}"
    endpoint = await start(family, text)
    odd = {"type": "array", "uniqueItems": True}
    schema = {"properties": {"a": {"type": "string", "maxLength": 99}, "b": odd, "c": True}}
    asked = {"messages": ASK, "response_format": {"type": "json_object"}}
    answer = ("Hm.</think>" if family == "deepseek_v3" else "") + '{"n": 1}'
    for name, calls in (("f", True), ("f g", False)):
        tools = [{"type": "function", "function": {"name": name, "parameters": schema}}]
        status, whole = await endpoint.post(CHAT, {**asked, "tools": tools})
        assert status == 200, whole
        grammar = endpoint.source.requests[-1].params.grammar
        assert fits(models[family], grammar, answer)
        # A call of Llama 3 is such an object, too.
        assert fits(models[family], grammar, text) == (calls or family == "llama3_json")
    status, whole = await endpoint.post(CHAT, {**asked, "tools": tools, "tool_choice": "required"})
    assert (status, whole["error"]["param"]) == (400, "tools")
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": odd}}
    status, whole = await endpoint.post(CHAT, {**asked, "tools": TOOLS, "response_format": wrong})
    assert (status, whole["error"]["param"]) == (400, "response_format.json_schema.schema")


@pytest.mark.parametrize("parallel", [True, False])
async def test_calls_are_one_if_they_are_to_be(
    start: Any, models: dict[str, Tokenizer], parallel: bool
) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    endpoint = await start("hermes", f"{text}\n{text}")
    body = {"messages": ASK, "tools": TOOLS, "parallel_tool_calls": parallel}
    _, whole = await endpoint.post(CHAT, body)
    assert len(whole["choices"][0]["message"]["tool_calls"]) == 1 + parallel
    await endpoint.post(CHAT, {**body, "tool_choice": "required"})
    grammar = endpoint.source.requests[1].params.grammar
    assert fits(models["hermes"], grammar, text)
    assert fits(models["hermes"], grammar, f"{text}\n{text}") == parallel


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


MORE_TOOLS = [*TOOLS, {"type": "function", "function": {"name": "g"}}]


@pytest.mark.parametrize("name", ["f", "g"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_only_allowed_tools_are_called(
    start: Any, models: dict[str, Tokenizer], family: str, name: str
) -> None:
    """The model sees all tools; what it writes for a call of another one is content."""
    text = constrained(family, models[family])
    endpoint = await start(family, text)
    body = {"messages": ASK, "tools": MORE_TOOLS}
    await endpoint.post(CHAT, body)
    for mode in ("auto", "required"):
        status, whole = await endpoint.post(CHAT, {**body, "tool_choice": allowed(mode, name)})
        assert status == 200, whole
        (told,) = whole["choices"]
        message, called = told["message"], name == "f"
        assert told["finish_reason"] == ("tool_calls" if called else "stop")
        names = [call["function"]["name"] for call in message.get("tool_calls", [])]
        assert names == ["f"] * called
        assert (message["content"] is None) == called
        assert called or "東京" in message["content"], "nothing is lost"
        asked = endpoint.source.requests[-1]
        assert asked.token_ids == endpoint.source.requests[0].token_ids, "all tools are shown"
        if mode == "required":
            assert fits(models[family], asked.params.grammar, text) == called
        else:
            assert asked.params.grammar == ""


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_several_allowed_tools_beside_a_format(
    start: Any, models: dict[str, Tokenizer], mode: str
) -> None:
    endpoint = await start("hermes", "{}")
    tools = [*MORE_TOOLS, {"type": "function", "function": {"name": "h"}}]
    body = {
        "messages": ASK, "tools": tools, "tool_choice": allowed(mode, "f", "h"),
        "response_format": {"type": "json_object"},
    }  # fmt: skip
    status, whole = await endpoint.post(CHAT, body)
    assert status == 200, whole
    grammar = endpoint.source.requests[0].params.grammar
    for name in "fgh":
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        assert fits(models["hermes"], grammar, call) == (name != "g")
    assert fits(models["hermes"], grammar, '{"a": 1}') == (mode == "auto")


async def test_an_answer_of_a_model_that_reasons(start: Any, models: dict[str, Tokenizer]) -> None:
    endpoint = await start("hermes", 'Hm.</think>{"a": 1}')
    for off in (False, True):
        body = {
            "messages": ASK, "response_format": {"type": "json_object"},
            "chat_template_kwargs": {"enable_thinking": not off},
        }  # fmt: skip
        status, whole = await endpoint.post(CHAT, body)
        assert status == 200, whole
        grammar = endpoint.source.requests[-1].params.grammar
        assert fits(models["hermes"], grammar, '{"a": 1}')
        assert fits(models["hermes"], grammar, '<think>Hm.</think>\n\n{"a": 1}') != off
        assert not fits(models["hermes"], grammar, "<think>Hm.</think>It is 1.")
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    begun = {"messages": [*ASK, {"role": "assistant", "content": "It is"}], **goes_on}
    await endpoint.post(CHAT, {**body, **begun})
    grammar = endpoint.source.requests[-1].params.grammar
    assert fits(models["hermes"], grammar, '{"a": 1}')
    assert not fits(models["hermes"], grammar, '<think>Hm.</think>{"a": 1}')


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_call_and_its_result(start: Any, models: dict[str, Tokenizer], family: str) -> None:
    text = written(family, models[family])
    endpoint = await start(family, text)
    body = {"messages": ASK, "tools": TOOLS, "n": 2}
    status, whole = await endpoint.post(CHAT, body)
    assert status == 200, whole
    for choice in whole["choices"]:
        message = choice["message"]
        reasoning = THINKING if family in ("hermes", "deepseek_v3") else None
        assert (message["content"], message.get("reasoning_content")) == (None, reasoning)
        assert message.get("reasoning") == reasoning, "as vLLM calls it by now"
        assert choice["finish_reason"] == "tool_calls"
        (call,) = message["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "f")
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    tokens = len(endpoint.source._tokens(endpoint.source.requests[0]))
    assert whole["usage"]["completion_tokens"] == 2 * tokens
    # What was told goes back, and stands in the prompt as the model wrote it.
    message["tool_calls"].append({**call, "id": call["id"][:-1] + "_"})
    if family != "llama3_json":  # whose template takes one, which is why they are split
        message["tool_calls"].pop()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        for call in message["tool_calls"]
    ]
    status, answer = await endpoint.post(CHAT, {**body, "messages": [*ASK, message, *results]})
    assert status == 200, answer
    ids = list(endpoint.source.requests[1].token_ids)
    shown = endpoint.frontend.tokenizer.decode(ids, skip_special_tokens=False)
    again = shown.replace(call["id"], "123456789")
    assert text.rpartition("</think>")[2].strip() in again


@pytest.mark.parametrize("family", FAMILIES)
async def test_streams_say_the_same(start: Any, models: dict[str, Tokenizer], family: str) -> None:
    endpoint = await start(family, written(family, models[family]))
    async with openai.AsyncOpenAI(
        base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0
    ) as client:
        chunks = await client.chat.completions.create(
            model="tiny", messages=ASK, tools=TOOLS, stream=True, logprobs=True, n=2,
            stream_options={"include_usage": True},
        )  # fmt: skip
        told: dict[int, Any] = {i: ["", "", "", [], [], 0] for i in range(2)}
        usage = None
        async for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                mine, new = told[choice.index], choice.delta
                mine[0] += getattr(new, "reasoning_content", None) or ""
                assert getattr(new, "reasoning", "") == getattr(new, "reasoning_content", "")
                mine[1] += new.content or ""
                mine[4] += [choice.finish_reason] * (choice.finish_reason is not None)
                mine[5] += len((choice.logprobs and choice.logprobs.content) or [])
                for call in new.tool_calls or []:
                    assert call.index == 0
                    assert call.function is not None
                    assert (call.id is None) == (call.function.name is None)
                    mine[3] += [(call.type, call.function.name)] * (call.id is not None)
                    mine[2] += call.function.arguments or ""
    assert usage is not None
    for reasoning, content, arguments, calls, finishes, scored in told.values():
        assert reasoning == (THINKING if family in ("hermes", "deepseek_v3") else "")
        assert (content, calls, finishes) == ("", [("function", "f")], ["tool_calls"])
        assert json.loads(arguments) == ARGUMENTS
        assert scored == usage.completion_tokens / 2


async def test_thinking_can_be_left_out(start: Any) -> None:
    endpoint = await start("hermes", "It is <think>.")
    asked = {"messages": ASK, "chat_template_kwargs": {"enable_thinking": False}}
    _, whole = await endpoint.post(CHAT, asked)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "It is <think>."}
    ids = list(endpoint.source.requests[0].token_ids)
    shown = endpoint.frontend.tokenizer.decode(ids, skip_special_tokens=False)
    assert shown.endswith("<|assistant|><think>\n\n</think>\n\n")


async def test_what_looks_like_a_tag_is_text(start: Any, models: dict[str, Tokenizer]) -> None:
    endpoint = await start("hermes", "")
    encode = models["hermes"].encode
    pieces = [encode(word, add_special_tokens=False) for word in ("<", "tool_call", ">")]
    endpoint.source.script = [token for piece in pieces for token in piece]
    _, whole = await endpoint.post(CHAT, {"messages": ASK, "tools": TOOLS})
    assert whole["choices"][0]["message"]["content"] == "<tool_call>"


async def test_a_stop_string_ends_the_answer(start: Any) -> None:
    endpoint = await start("hermes", "<think>A.</think>It is large.")
    _, whole = await endpoint.post(CHAT, {"messages": ASK, "stop": " large"})
    (choice,) = whole["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("It is", " large")
    assert choice["message"]["reasoning_content"] == "A."


async def test_a_call_that_is_cut_off(start: Any, models: dict[str, Tokenizer]) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "some'
    endpoint = await start("hermes", text + ' text"}}</tool_call>')
    few = len(models["hermes"].encode(text, add_special_tokens=False))
    _, whole = await endpoint.post(CHAT, {"messages": ASK, "tools": TOOLS, "max_tokens": few})
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"].startswith('{"a": "so')


@pytest.mark.parametrize(
    ("config", "body"),
    [
        ({"tool_call_parser": "none", "reasoning_parser": "none"}, {}),
        ({}, {"skip_special_tokens": False}),
    ],
)
async def test_as_it_is_written(start: Any, config: Any, body: Any) -> None:
    endpoint = await start("hermes", "<think>A.</think>B.", **config)
    _, whole = await endpoint.post(CHAT, {"messages": ASK, **body})
    shown = "A.B." if config else "<think>A.</think>B."  # the tags are special tokens here
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": shown}


async def test_a_parser_by_its_name(serve: Any) -> None:
    text = '<think>A.</think>B. <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    endpoint = await serve(text, tool_call_parser="hermes", reasoning_parser="qwen3")
    _, whole = await endpoint.post(CHAT, {"messages": ASK, "tools": TOOLS})
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("B.", "A.")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": allowed("auto")}, f"{ALLOWED}.tools"),
        ({"tool_choice": allowed("none", "f")}, f"{ALLOWED}.mode"),
        ({"tool_choice": allowed("auto", "f", "g")}, f"{ALLOWED}.tools[1]"),
        ({"tool_choice": allowed("required", "g")}, f"{ALLOWED}.tools[0]"),
        ({"tool_choice": allowed("auto", "f"), "tools": []}, "tool_choice"),
        ({"tool_choice": allowed("auto", "f"), "skip_special_tokens": False}, "tool_choice"),
        (
            {"tool_choice": "required", "structured_outputs": {"json_object": True}},
            "structured_outputs",
        ),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, PARAMETERS),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"type": "strin"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"skip_special_tokens": False}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ],
)
async def test_what_is_refused_is_named(start: Any, extra: Any, param: str) -> None:
    endpoint = await start("hermes", "x")
    status, answer = await endpoint.post(CHAT, {"messages": ASK, "tools": TOOLS, **extra})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert endpoint.source.requests == []


async def test_a_schema_that_can_just_be_read(start: Any) -> None:
    """What is nested deeper than it can be written again is no failure of ours."""
    endpoint = await start("mistral", "x")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": 0}}}]
    asked = {"model": "tiny", "messages": ASK, "tools": tools, "tool_choice": "required"}
    body = json.dumps({**asked, "max_tokens": 1})
    for depth in range(850, sys.getrecursionlimit()):
        data = body.replace('"a": 0', f'"a": {"[" * depth}{"]" * depth}')
        async with endpoint.session.post(CHAT, data=data) as response:
            assert response.status in (200, 400), depth


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrong", [{"properties": None}, {"required": 5}, {"properties": [1]}])
async def test_a_wrong_schema_is_refused(start: Any, family: str, wrong: Any) -> None:
    endpoint = await start(family, "x")
    tools = [{"type": "function", "function": {"name": "f", "parameters": wrong}}]
    body = {"messages": ASK, "tools": tools, "tool_choice": "required"}
    status, answer = await endpoint.post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "tools"), answer
    assert endpoint.source.requests == []
