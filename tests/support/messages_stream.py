"""Reads and checks streams of Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Any


def data_of(stream: bytes) -> list[Any]:
    """The events of a stream, without pings; checks that each is named by its type."""
    found = []
    for frame in stream.decode().removesuffix("\n\n").split("\n\n"):
        head, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        found.append(event)
    return [event for event in found if event["type"] != "ping"]


def assembled(events: list[Any]) -> Any:
    """The message that a stream gives; checks each event."""
    first, *middle, delta, last = events
    assert (first["type"], last) == ("message_start", {"type": "message_stop"})
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    texts: list[str] = []
    is_open = False
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open
            is_open = True
            message["content"].append(event["content_block"])
            texts.append("")
        assert event["index"] == len(message["content"]) - 1
        assert is_open
        block = message["content"][-1]
        if event["type"] == "content_block_delta":
            kind, field = {
                "text": ("text_delta", "text"),
                "thinking": ("thinking_delta", "thinking"),
                "tool_use": ("input_json_delta", "partial_json"),
            }[block["type"]]
            assert event["delta"].pop("type") == kind
            assert list(event["delta"]) == [field]
            texts[-1] += event["delta"][field]
        elif event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads(texts[-1] or "{}")
            else:
                block[block["type"]] = texts[-1]
    assert not is_open
    assert delta["type"] == "message_delta"
    return {**message, **delta["delta"], "usage": delta["usage"]}
