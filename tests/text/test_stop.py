from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.messages.engine import Output
from kvbaton.text.detokenize import ChoiceText, StopStrings, TextOptions
from kvbaton.text.tokenizer import Tokenizer

letters = st.text("ab", max_size=12)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first end of any stop string, found by trying every end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def feed(chunks: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    watcher, shown = StopStrings(stops, include=include), ""
    for chunk in chunks:
        text, stop = watcher.push(chunk)
        shown += text
        if stop is not None:
            return shown, stop
        assert not any(s in shown for s in stops)
    return shown + watcher.flush(), None


@settings(deadline=None, max_examples=400)
@given(chunks=st.lists(letters, max_size=6), stops=stop_lists, include=st.booleans())
def test_any_cut_gives_the_first_stop(chunks: list[str], stops: list[str], include: bool) -> None:
    assert feed(chunks, stops, include) == reference("".join(chunks), stops, include)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    watcher = StopStrings(["END"])
    assert watcher.push("abE") == ("ab", None)
    assert watcher.push("x") == ("Ex", None)
    assert watcher.push("EN") == ("", None)
    assert watcher.push("D tail") == ("", "END")


def outputs(tokenizer: Tokenizer, text: str) -> list[Output]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    last = Output(request_id="r", token_ids=(1,), finish_reason="stop")
    return [*(Output(request_id="r", token_ids=(i,)) for i in ids), last]


def test_a_choice_ends_at_a_stop_string_inside_a_batch_of_tokens(tokenizer: Tokenizer) -> None:
    ids = tuple(tokenizer.encode("one two three four", add_special_tokens=False))
    choice = ChoiceText(tokenizer, [], TextOptions(stop=("two",)))
    delta = choice.push(Output(request_id="r", token_ids=ids))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("one ", "stop", "two")
    assert tokenizer.decode(delta.token_ids).endswith("two")


def test_min_tokens_protects_what_came_before(tokenizer: Tokenizer) -> None:
    made = outputs(tokenizer, "stop and stop")
    options = TextOptions(stop=("stop",), min_tokens=len(made) // 2)
    choice = ChoiceText(tokenizer, [], options)
    deltas = []
    for output in made:
        deltas.append(choice.push(output))
        if deltas[-1].finish_reason:
            break
    assert "".join(delta.text for delta in deltas) == "stop and "
    assert deltas[-1].stop_reason == "stop"


def test_the_token_that_ended_the_text_is_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("go on", add_special_tokens=False)
    output = Output(request_id="r", token_ids=tuple(ids), finish_reason="stop", stop_reason=ids[-1])
    hidden = ChoiceText(tokenizer, [], TextOptions()).push(output)
    assert hidden.text == tokenizer.decode(ids[:-1])
    assert hidden.token_ids == ids
    shown = ChoiceText(tokenizer, [], TextOptions(include_stop=True)).push(output)
    assert shown.text == "go on"
    length = Output(request_id="r", token_ids=tuple(ids), finish_reason="length")
    assert ChoiceText(tokenizer, [], TextOptions()).push(length).text == "go on"


def test_held_text_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer, [], TextOptions(stop=("END",)))
    text = "".join(choice.push(output).text for output in outputs(tokenizer, "the EN"))
    assert text == "the EN"
