"""Reads and checks streams of OpenAI's Responses API."""

from __future__ import annotations

import json
from typing import Any

KINDS = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
}


def events_of(stream: bytes) -> list[Any]:
    """The events of a stream, without comments; checks their names and numbers."""
    found = []
    for frame in stream.decode().removesuffix("\n\n").split("\n\n"):
        if frame == ":":
            continue
        head, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        found.append(event)
    assert [event.pop("sequence_number") for event in found] == list(range(len(found)))
    return found


def assembled(events: list[Any]) -> Any:
    """The response that a stream gives; checks each event."""
    created, in_progress, *middle, last = events
    assert created["type"] == "response.created"
    assert {**in_progress, "type": created["type"]} == created
    begun = created["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    done: list[Any] = []
    waiting = iter(middle)
    for added in waiting:
        assert added["type"] == "response.output_item.added"
        item, place = added["item"], {"output_index": len(done)}
        assert added["output_index"] == len(done)
        assert item["status"] == "in_progress"
        kind, field = KINDS[item["type"]]
        about = {**place, "item_id": item["id"]}
        part: Any = None
        if item["type"] != "function_call":
            about["content_index"] = 0
            assert item["content"] == []
            opened = next(waiting)
            part = opened["part"]
            assert opened == {**about, "type": "response.content_part.added", "part": part}
            assert (part["type"], part["text"]) == (kind, "")
        scored: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        text = ""
        for event in waiting:
            if event["type"] != f"response.{kind}.delta":
                break
            assert event == {**about, **scored, "type": event["type"], "delta": event["delta"]}
            assert event["delta"]
            text += event["delta"]
        assert event == {**about, **scored, "type": f"response.{kind}.done", field: text}
        if part is None:
            item["arguments"] = text
        else:
            part["text"] = text
            ended = {**about, "type": "response.content_part.done", "part": part}
            assert next(waiting) == ended
            item["content"] = [part]
        closed = next(waiting)
        item["status"] = closed["item"]["status"]
        assert closed == {**place, "type": "response.output_item.done", "item": item}
        done.append(item)
    response = last["response"]
    assert last["type"] == f"response.{response['status']}"
    changed = {"status", "output", "usage", "completed_at", "incomplete_details", "error"}
    changed |= {"kv_transfer_params"}
    same = {key: value for key, value in response.items() if key not in changed}
    assert same == {key: value for key, value in begun.items() if key not in changed}
    if response["status"] != "failed":
        assert response["output"] == done
    return response
