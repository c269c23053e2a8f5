"""How families of models write reasoning and calls, and how a model's family is found.

Formats: the chat templates published with Hermes 2 Pro and Qwen2.5, Qwen3-Coder, Llama 3.1,
Mistral (tokenizers v3 to v13), DeepSeek-V3, -R1 and -V3.1.
"""

# ruff: noqa: RUF001 -- DeepSeek's tags have such bars
from __future__ import annotations

from msgspec.structs import replace

from kvbaton.errors import ConfigError
from kvbaton.text.harmony import MARKERS, HarmonyFormat
from kvbaton.text.output_parser import OutputFormat, ReasoningParserName, ToolCallParserName
from kvbaton.text.tagged import CallSyntax, TaggedFormat
from kvbaton.text.tokenizer import Tokenizer

REASONING_TAGS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "deepseek_v3": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
"""Tags around reasoning, by vLLM's names of the parsers."""

_NAME = r"(?P<name>[\w.\-]{1,256}+)"
_HEAD = (
    r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?+"name"\s*+:\s*+"' + _NAME + r'"\s*+,'
    r'\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
)
_END = r'\s*+(?:,\s*+"id"\s*+:\s*+"[^"]*+"\s*+)?+\}?+\s*+'
_DEEPSEEK = CallSyntax(
    tags=tuple(
        f"<｜tool▁{name}｜>"
        for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
    ),
    begin="«<｜tool▁call▁begin｜>»",
    heads=(
        (
            rf"\s*+function\s*+«<｜tool▁sep｜>»\s*+{_NAME}\s*+```(?:json)?+\s*+(?=\{{)",
            r"\s*+(?:```)?+\s*+«<｜tool▁call▁end｜>»",
        ),
        (rf"\s*+{_NAME}\s*+«<｜tool▁sep｜>»\s*+(?=\{{)", r"\s*+«<｜tool▁call▁end｜>»"),
    ),
    in_template=("<｜tool▁calls▁begin｜>", "```json"),
    call=(
        "«<｜tool▁call▁begin｜>»function«<｜tool▁sep｜>»$name\n```json\n$arguments\n```"
        "«<｜tool▁call▁end｜>»"
    ),
    around=("«<｜tool▁calls▁begin｜>»", "\n", "«<｜tool▁calls▁end｜>»"),
    ignored="«<｜tool▁calls▁begin｜>»|«<｜tool▁calls▁end｜>»",
    json=False,
)
CALL_SYNTAXES = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": replace(
        _DEEPSEEK,
        in_template=("<｜tool▁calls▁begin｜>",),
        call="«<｜tool▁call▁begin｜>»$name«<｜tool▁sep｜>»$arguments«<｜tool▁call▁end｜>»",
        around=("«<｜tool▁calls▁begin｜>»", "", "«<｜tool▁calls▁end｜>»"),
    ),
    "mistral": CallSyntax(
        tags=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        begin="«[TOOL_CALLS]»",
        heads=(
            (rf"\s*+\[?+\s*+{_HEAD}", rf"{_END}(?:,(?P<more>)(?=\s*+\{{)|\]|(?=[^\s,\]]))"),
            (rf"\s*+{_NAME}\s*+(?:«[CALL_ID]»\s*+\w*+\s*+)?+(?:«[ARGS]»)?+\s*+(?=\{{)", ""),
        ),
        in_template=("[TOOL_CALLS]",),
        call='{"name": "$name", "arguments": $arguments}',
        around=("«[TOOL_CALLS]» [", ", ", "]"),
        short_ids=True,
    ),
    "qwen3_coder": CallSyntax(
        tags=("<tool_call>", "</tool_call>"),
        begin="«<tool_call>»",
        heads=((r"\s*+<function=(?P<name>[^>\s]{1,256}+)>", ""),),
        in_template=("<tool_call>", "<function=", "<parameter="),
        call="«<tool_call>»\n<function=$name>\n$arguments</function>\n«</tool_call>»",
        around=("", "\n", ""),
        json=False,
        xml=True,
    ),
    "hermes": CallSyntax(
        tags=("<tool_call>", "</tool_call>"),
        begin="«<tool_call>»",
        heads=((rf"\s*+{_HEAD}", rf"{_END}«</tool_call>»"),),
        in_template=("<tool_call>",),
        call='«<tool_call>»\n{"name": "$name", "arguments": $arguments}\n«</tool_call>»',
        around=("", "\n", ""),
    ),
    "llama3_json": CallSyntax(
        tags=("<|python_tag|>",),
        begin="«<|python_tag|>»",
        heads=(
            (rf"\s*+{_HEAD}", rf"{_END}(?:;\s*+(?=\{{)(?P<more>)|(?=[^\s;,])|(?=;\s*+[^\s{{]))"),
        ),
        in_template=("<|start_header_id|>", '"parameters": '),
        call='{"name": "$name", "parameters": $arguments}',
        bare=True,
        one_each=True,
    ),
}
"""Syntaxes of calls, by vLLM's names of the parsers; ``auto`` takes the first that fits the model's
chat template."""


def find_output_format(
    tokenizer: Tokenizer,
    tool_call_parser: ToolCallParserName = "auto",
    reasoning_parser: ReasoningParserName = "auto",
) -> OutputFormat | None:
    """Find how a model marks reasoning and calls; None if neither is to be parsed.

    Args:
        tokenizer: Tokenizer of the model, with its chat template.
        tool_call_parser: Parser of calls.
        reasoning_parser: Parser of reasoning.

    Raises:
        ConfigError: A harmony parser for another model, or another parser for a harmony model.
    """
    harmony = tokenizer.added_tokens.keys() >= MARKERS.keys()
    for field, name, its in (
        ("--tool-call-parser", tool_call_parser, "openai"),
        ("--reasoning-parser", reasoning_parser, "openai_gptoss"),
    ):
        if name not in ("auto", "none") and (name == its) != harmony:
            wanted = f"must be {its}" if harmony else f"can't be {its}"
            problem = f"{wanted} for a tokenizer {'with' if harmony else 'without'} its tokens"
            raise ConfigError(field, f"{problem} ({', '.join(MARKERS)})")
    if harmony:
        calls, reasons = tool_call_parser != "none", reasoning_parser != "none"
        return HarmonyFormat(tokenizer, calls=calls, reasons=reasons)
    source = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
    if tool_call_parser == "auto":
        fits = (s for s in CALL_SYNTAXES.values() if all(tag in source for tag in s.in_template))
        syntax = next(fits, None)
    else:
        syntax = CALL_SYNTAXES.get(tool_call_parser)
    if reasoning_parser == "auto":
        written = (tags for tags in REASONING_TAGS.values() if tags[1] in source)
        reasoning = next(written, ())
    else:
        reasoning = REASONING_TAGS.get(reasoning_parser, ())
    return TaggedFormat(tokenizer, syntax, reasoning) if syntax or reasoning else None
