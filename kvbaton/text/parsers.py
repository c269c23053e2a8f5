"""Which parser suits a model: by what its folder says, or by name."""

from __future__ import annotations

from kvbaton.errors import ConfigError
from kvbaton.text.call_syntax import CALL_SYNTAXES, REASONING_TAGS
from kvbaton.text.harmony import MARKERS, HarmonyFormat
from kvbaton.text.output_parser import OutputFormat, ReasoningParserName, ToolCallParserName
from kvbaton.text.tagged import TaggedFormat
from kvbaton.text.tokenizer import Tokenizer

IN_TEMPLATES: dict[ToolCallParserName, tuple[str, ...]] = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "```json"),  # noqa: RUF001
    "deepseek_v31": ("<｜tool▁calls▁begin｜>",),  # noqa: RUF001
    "mistral": ("[TOOL_CALLS]",),
    "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),
    "hermes": ("<tool_call>",),
    "llama3_json": ("<|start_header_id|>", '"parameters": '),
}
"""What the chat templates of each family contain; the first that fits is taken."""


def find_output_format(
    tokenizer: Tokenizer,
    tool_call_parser: ToolCallParserName = "auto",
    reasoning_parser: ReasoningParserName = "auto",
) -> OutputFormat | None:
    """How a model marks reasoning and calls; None if neither is to be told apart.

    Args:
        tokenizer: the model's, with its chat template.
        tool_call_parser: for how it writes calls.
        reasoning_parser: for how it writes reasoning.

    Raises:
        ConfigError: a parser of harmony for another model, or another parser for such a model.
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
        fits = (name for name, tags in IN_TEMPLATES.items() if all(t in source for t in tags))
        tool_call_parser = next(fits, "none")
    syntax = CALL_SYNTAXES.get(tool_call_parser)
    if reasoning_parser == "auto":
        written = (tags for tags in REASONING_TAGS.values() if tags[1] in source)
        reasoning = next(written, ())
    else:
        reasoning = REASONING_TAGS.get(reasoning_parser, ())
    return TaggedFormat(tokenizer, syntax, reasoning) if syntax or reasoning else None
