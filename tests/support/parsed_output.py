"""Reassembles a parser's output for a model's text."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.text.output_parser import OutputParser

Read = tuple[str, str, list[tuple[str, str]]]
"""Reasoning; content; function name and arguments of each call."""


def read_pieces(parser: OutputParser, pieces: Sequence[str]) -> Read:
    """Push a text in pieces; checks that calls come in order, and no part is empty."""
    texts, names, arguments = {"reasoning": "", "content": ""}, list[str](), list[str]()
    for number, piece in enumerate(pieces):
        for part in parser.push(piece, last=number == len(pieces) - 1):
            if part.kind != "call":
                assert part.text
                texts[part.kind] += part.text
                continue
            if part.function is not None:
                assert part.number == len(names)
                names.append(part.function)
                arguments.append("")
            assert part.number == len(names) - 1
            arguments[part.number] += part.text
    assert parser.num_calls == len(names)
    return texts["reasoning"], texts["content"], list(zip(names, arguments, strict=True))
