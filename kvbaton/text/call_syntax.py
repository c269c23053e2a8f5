"""How families of models write reasoning and calls: their tags, and what stands between them.

Formats: the chat templates published with Hermes 2 Pro and Qwen2.5, Qwen3-Coder, Llama 3.1,
Mistral (tokenizers v3 to v13), DeepSeek-V3, -R1 and -V3.1.
"""

# ruff: noqa: RUF001 -- DeepSeek's tags have such bars
from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

REASONING_TAGS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "deepseek_v3": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
"""What reasoning stands between, by the names that vLLM gives the parsers."""


class CallSyntax(Struct, frozen=True):
    """How a family writes calls, in regular expressions in which ``«tag»`` is a tag.

    Attributes:
        tags: all of them.
        begin: of a call, before its head.
        heads: of its styles: ``name`` is the function, and its arguments begin behind it. What
            follows the arguments of each: ``more`` if that is another head.
        call: as the template writes one, of ``$name`` and ``$arguments``.
        around: what it writes before all calls, between two and behind them.
        ignored: tags around several calls.
        json: where the head does not fit, a call may be JSON with the same members all the same.
        xml: each argument has tags of its own.
        bare: JSON at the start of the content is a call, if it names a function.
        one_each: the template takes one call in each message.
        short_ids: calls are named by nine letters and digits.
    """

    tags: tuple[str, ...]
    begin: str
    heads: tuple[tuple[str, str], ...]
    call: str
    around: tuple[str, str, str] = ("", "", "")
    ignored: str = ""
    json: bool = True
    xml: bool = False
    bare: bool = False
    one_each: bool = False
    short_ids: bool = False


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
    call=(
        "«<｜tool▁call▁begin｜>»function«<｜tool▁sep｜>»$name\n```json\n$arguments\n```"
        "«<｜tool▁call▁end｜>»"
    ),
    around=("«<｜tool▁calls▁begin｜>»", "\n", "«<｜tool▁calls▁end｜>»"),
    ignored="«<｜tool▁calls▁begin｜>»|«<｜tool▁calls▁end｜>»",
    json=False,
)
CALL_SYNTAXES = {
    "hermes": CallSyntax(
        tags=("<tool_call>", "</tool_call>"),
        begin="«<tool_call>»",
        heads=((rf"\s*+{_HEAD}", rf"{_END}«</tool_call>»"),),
        call='«<tool_call>»\n{"name": "$name", "arguments": $arguments}\n«</tool_call>»',
        around=("", "\n", ""),
    ),
    "qwen3_coder": CallSyntax(
        tags=("<tool_call>", "</tool_call>"),
        begin="«<tool_call>»",
        heads=((r"\s*+<function=(?P<name>[^>\s]{1,256}+)>", ""),),
        call="«<tool_call>»\n<function=$name>\n$arguments</function>\n«</tool_call>»",
        around=("", "\n", ""),
        json=False,
        xml=True,
    ),
    "llama3_json": CallSyntax(
        tags=("<|python_tag|>",),
        begin="«<|python_tag|>»",
        heads=(
            (
                rf"\s*+{_HEAD}",
                rf"{_END}(?:;\s*+(?=\{{)(?P<more>)|(?=[^\s;,])|(?=;\s*+[^\s{{]))",
            ),
        ),
        call='{"name": "$name", "parameters": $arguments}',
        bare=True,
        one_each=True,
    ),
    "mistral": CallSyntax(
        tags=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        begin="«[TOOL_CALLS]»",
        heads=(
            (rf"\s*+\[?+\s*+{_HEAD}", rf"{_END}(?:,(?P<more>)(?=\s*+\{{)|\]|(?=[^\s,\]]))"),
            (rf"\s*+{_NAME}\s*+(?:«[CALL_ID]»\s*+\w*+\s*+)?+(?:«[ARGS]»)?+\s*+(?=\{{)", ""),
        ),
        call='{"name": "$name", "arguments": $arguments}',
        around=("«[TOOL_CALLS]» [", ", ", "]"),
        short_ids=True,
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": replace(
        _DEEPSEEK,
        call="«<｜tool▁call▁begin｜>»$name«<｜tool▁sep｜>»$arguments«<｜tool▁call▁end｜>»",
        around=("«<｜tool▁calls▁begin｜>»", "", "«<｜tool▁calls▁end｜>»"),
    ),
}
"""By the names that vLLM gives their parsers."""
