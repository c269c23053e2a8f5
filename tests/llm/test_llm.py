"""The Python API, over real engines in child processes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import kvbaton
from kvbaton import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.process import EngineProcess
from kvbaton.errors import ConfigError, EngineDeadError, RequestError
from kvbaton.llm.streaming import CompletionOutput
from kvbaton.text.chat import ChatTemplate
from tests.support.chats import picture
from tests.support.families import without_embedding
from tests.support.waiting import PATIENCE_S

TEXTS = ["Once upon a time", "The capital of France is", "One, two,"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SETTINGS: dict[str, Any] = {"num_blocks": 64, "num_threads": 1, "block_size": 16}


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, **SETTINGS) as llm:
        yield llm


def test_logits_that_are_nan_end_their_request_and_no_other(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Else its text would be token 0 for ever."""
    folder = without_embedding(checkpoint(tied=False), 7, tmp_path / "broken")
    with LLM(folder, **SETTINGS) as broken:
        for params in (SamplingParams(temperature=0.0), SamplingParams(logprobs=2, top_p=0.5)):
            with pytest.raises(RequestError, match=r"logits are NaN.*--dtype") as failed:
                broken.generate({"prompt_token_ids": [9, 7, 8]}, params, use_tqdm=False)
            assert (failed.value.status, failed.value.code) == (500, "no_token")
        (answer,) = broken.generate(
            {"prompt_token_ids": [9, 8]}, SamplingParams(max_tokens=1), use_tqdm=False
        )
        assert answer.outputs[0].finish_reason == "length"


def test_default_parameters_ask_for_no_more_than_fits(llm: LLM) -> None:
    """Neither 16 tokens nor what ``generation_config.json`` recommends were asked for by anyone."""
    (answer,) = llm.generate({"prompt_token_ids": [9] * 508}, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) <= 4
    with pytest.raises(RequestError, match=r"508 \+ 16 > 512"):
        llm.generate({"prompt_token_ids": [9] * 508}, SamplingParams(), use_tqdm=False)


@torch.inference_mode()
def continued(reference: Any, ids: list[int], count: int) -> list[int]:
    known = torch.tensor([ids])
    for _ in range(count):
        known = torch.cat([known, reference(known).logits[:, -1].argmax(-1, keepdim=True)], 1)
    tokens: list[int] = known[0, len(ids) :].tolist()
    return tokens


def test_generate_equals_transformers(
    llm: LLM, model: Path, reference: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answers = llm.generate(TEXTS, SamplingParams(**GREEDY, max_tokens=8))
    assert [answer.prompt for answer in answers] == TEXTS
    for answer in answers:
        (choice,) = answer.outputs
        expected = continued(reference(model), answer.prompt_token_ids, 8)
        assert (choice.token_ids, choice.finish_reason) == (expected, "length")
        assert choice.text
        assert answer.finished
    assert "3/3" in capsys.readouterr().err, "no progress bar"
    again = llm.generate(answers[0].prompt_token_ids, SamplingParams(**GREEDY, max_tokens=8))
    assert again[0].outputs == answers[0].outputs, "tokens are as good as their text"
    by_text: dict[str, Any] = {"prompt": TEXTS[0]}
    by_ids: dict[str, Any] = {"prompt_token_ids": answers[0].prompt_token_ids}
    named = llm.generate([by_text, by_ids], SamplingParams(**GREEDY, max_tokens=8))
    named += llm.generate(by_ids, SamplingParams(**GREEDY, max_tokens=8))
    assert [answer.outputs for answer in named] == 3 * [answers[0].outputs]


def test_logprobs_choices_and_own_parameters(llm: LLM) -> None:
    params = [
        SamplingParams(n=2, seed=3, max_tokens=4, logprobs=2, prompt_logprobs=1),
        SamplingParams(**GREEDY, max_tokens=2),
    ]
    first, second = llm.generate(TEXTS[:2], params, use_tqdm=False)
    assert [choice.index for choice in first.outputs] == [0, 1]
    for choice in first.outputs:
        assert choice.logprobs is not None
        for token, named in zip(choice.token_ids, choice.logprobs, strict=True):
            assert named is not None
            assert token in named
            assert 2 <= len(named) <= 3
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids)
    assert len(second.outputs[0].token_ids) == 2


def test_what_is_none_has_its_default_as_in_vllm(llm: LLM) -> None:
    fields: dict[str, Any] = {**GREEDY, "max_tokens": 3}
    empty: dict[str, Any] = dict.fromkeys(("stop", "stop_token_ids", "bad_words", "logit_bias"))
    named = SamplingParams(**fields, **empty)
    answers = llm.generate([TEXTS[0]] * 2, [SamplingParams(**fields), named], use_tqdm=False)
    assert answers[0].outputs == answers[1].outputs


def test_the_sum_of_logprobs(llm: LLM) -> None:
    params = SamplingParams(**GREEDY, max_tokens=3, logprobs=0)
    choice = llm.generate(TEXTS[0], params, use_tqdm=False)[0].outputs[0]
    assert choice.logprobs is not None
    (one, two, three) = (next(iter(named.values())).logprob for named in choice.logprobs if named)
    assert choice.cumulative_logprob == pytest.approx(one + two + three)
    assert one + two + three < 0
    (bare,) = llm.generate(TEXTS[0], use_tqdm=False)
    assert bare.outputs[0].cumulative_logprob is None


def test_the_models_tokenizer_and_defaults(llm: LLM) -> None:
    (answer,) = llm.generate(TEXTS[0], use_tqdm=False)
    assert llm.get_tokenizer().encode(TEXTS[0]) == answer.prompt_token_ids
    params = llm.get_default_sampling_params()
    assert isinstance(params, SamplingParams)
    fewer = msgspec.structs.replace(params, max_tokens=2)
    assert len(llm.generate(TEXTS[0], fewer, use_tqdm=False)[0].outputs[0].token_ids) <= 2


def test_an_answer_has_the_id_of_its_request(llm: LLM) -> None:
    (answer,) = llm.generate(TEXTS[0], request_id="mine", use_tqdm=False)
    assert answer.request_id == "mine"
    unnamed = llm.generate(TEXTS, use_tqdm=False)
    assert len({answer.request_id for answer in unnamed}) == len(TEXTS)


def test_no_limit_is_the_length_of_the_model(llm: LLM) -> None:
    ids = list(range(20, 60))
    (answer,) = llm.generate(ids, SamplingParams(**GREEDY, max_tokens=None), use_tqdm=False)
    (choice,) = answer.outputs
    assert (len(ids) + len(choice.token_ids), choice.finish_reason) == (512, "length")


def test_stop_string_and_prefix_cache(llm: LLM) -> None:
    ids = list(range(20, 60))
    (whole,) = llm.generate(ids, SamplingParams(**GREEDY, max_tokens=12), use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:2]
    params = SamplingParams(**GREEDY, max_tokens=12, stop=[stop])
    (cut,) = llm.generate(ids, params, use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert cut.num_cached_tokens == 32
    assert llm.reset_prefix_cache()
    assert llm.reset_prefix_cache(), "an empty cache can be cleared, too"
    (cold,) = llm.generate(ids, params, use_tqdm=False, cache_salt=None)
    assert cold.num_cached_tokens == 0


def test_chat(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Who?"}]
    params = SamplingParams(**GREEDY, max_tokens=3)
    (one,) = llm.chat(talk, params, use_tqdm=False)
    two = llm.chat([talk, talk], params, use_tqdm=False)
    assert [answer.outputs for answer in two] == [one.outputs, one.outputs]


WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_chat_shows_the_template_what_vllms_takes(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = llm._own.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", ChatTemplate(WITH_TOOLS, {}))
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    talk = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It is"}]

    def prompt(**options: Any) -> str:
        params = SamplingParams(**GREEDY, max_tokens=1)
        (answer,) = llm.chat(talk, params, use_tqdm=False, **options)
        return tokenizer.decode(answer.prompt_token_ids)

    whole = "user: Who?\nassistant: It is\n"
    assert prompt() == whole + "assistant: "
    assert prompt(tools=tools) == "look_up;" + whole + "assistant: "
    assert prompt(tools=tools, add_generation_prompt=False) == "look_up;" + whole
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt(**goes_on) == whole.removesuffix("\n")
    for tool in ("look_up", ["look_up"]):
        with pytest.raises(RequestError) as raised:
            prompt(tools=tool)
        assert (raised.value.param or "").startswith("tools")


def test_an_option_that_there_is_none_of_is_named(llm: LLM) -> None:
    for ask in (llm.generate, llm.chat):
        with pytest.raises(TypeError, match=r"no option 'lora_request'.*: .*cache_salt.*tools"):
            ask([{"role": "user", "content": "x"}], use_tqdm=False, lora_request=None)


def _shaped(**fields: Any) -> SamplingParams:
    structured = StructuredOutputs(**fields)
    return SamplingParams(structured_outputs=structured, temperature=1.0, max_tokens=64, seed=2)


def test_structured_outputs(llm: LLM) -> None:
    flags = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
    params = [
        _shaped(choice=["red", "blue"]),
        _shaped(regex="[0-9]{3}-[a-f]"),
        _shaped(json=flags, disable_any_whitespace=True),
    ]
    (one,), (two,), (three,) = (
        answer.outputs for answer in llm.generate(TEXTS, params, use_tqdm=False)
    )
    assert one.text in ("red", "blue")
    assert re.fullmatch("[0-9]{3}-[a-f]", two.text)
    assert all(item in (True, False) for item in json.loads(three.text))
    assert {one.finish_reason, two.finish_reason, three.finish_reason} == {"stop"}


def test_what_is_wrong_is_named(llm: LLM, model: Path) -> None:
    for prompts, params, named in [
        ([""], SamplingParams(temperature=3.0), "temperature"),
        ([[]], None, "prompt"),
        ([[10**6]], None, "prompt"),
        (["x"], SamplingParams(stop=""), "stop"),
        (["x"], SamplingParams(stop=5), "stop"),  # type: ignore[arg-type]
        (["x"], SamplingParams(stop=[5]), "stop"),  # type: ignore[list-item]
        (["x"], _shaped(regex=5), "structured_outputs"),
        (["x"], SamplingParams(structured_outputs=5), "structured_outputs"),  # type: ignore[arg-type]
        ([[1] * 600], SamplingParams(max_tokens=None), "prompt"),
        (["x"], SamplingParams(grammar="start: nothing"), "grammar"),
        (["x"], _shaped(regex="a(b"), "structured_outputs"),
        (["x"], _shaped(json={"type": "strin"}), "structured_outputs"),
        (["x"], _shaped(json="{"), "structured_outputs.json"),
        (["x"], _shaped(choice=[]), "structured_outputs.choice"),
        (["x"], _shaped(choice=["a"], regex="a"), "structured_outputs"),
        ([{"prompt": "x", "multi_modal_data": {}}], None, "multi_modal_data"),
        ({}, None, "prompt"),
        ([["x", "y"]], None, "prompt"),
        ([None], None, "prompt"),
        ([[1.5]], None, "prompt"),
        ([[3, True]], None, "prompt"),
        ([b"x"], None, "prompt"),
        (["a\ud800b"], None, "prompt"),
    ]:
        with pytest.raises(RequestError) as raised:
            llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        assert raised.value.param == named
    for odd in (None, 5):
        with pytest.raises(RequestError) as raised:
            llm.generate(odd, use_tqdm=False)  # type: ignore[arg-type]
        assert raised.value.param == "prompts"
    half = [{"role": "user", "content": "\ud800"}]
    for talk in ("hi", [["hi"]], {"role": "user", "content": "hi"}, None, half):
        with pytest.raises(RequestError) as raised:
            llm.chat(talk, use_tqdm=False)  # type: ignore[arg-type]
        assert raised.value.param == "messages"
    for timeout in (0, -1.0, math.nan, 1e12):
        with pytest.raises(RequestError, match="timeout must be in") as raised:
            llm.generate(["x"], timeout=timeout, use_tqdm=False)
        assert raised.value.param == "timeout"
    with pytest.raises(ConfigError, match="block_sise"):
        LLM(model, block_sise=16)
    for unknown, meant in (
        ({"trust_remote_code": True}, "trust_remote_code: .*; code of checkpoints is never run"),
        ({"block_sise": 16}, "block_sise: .*; did you mean --block-size"),
        ({"max_num_seq": 2}, "max_num_seq: .*; did you mean --max-num-seqs"),
    ):
        with pytest.raises(ConfigError, match=meant):
            LLM(model, **unknown)
    with pytest.raises(ConfigError, match=r"'https://a\.b' is no host"):
        LLM(model, allowed_media_domains=["https://a.b"])
    with pytest.raises(ConfigError, match=r"allowed_media_domains: Expected .*array.*got .*str"):
        LLM(model, allowed_media_domains="a.b")
    for wrong in ({"max_model_len": "long"}, {"max_num_seqs": 1.5}, {"enforce_eager": "no"}):
        ((name, value),) = wrong.items()
        with pytest.raises(ConfigError, match=f"{name}: Expected .* got .*: {value!r}"):
            LLM(model, **wrong)
    for told in ({"log_level": "loud"}, {"generation_config": "vllm"}):
        with pytest.raises(ConfigError, match=next(iter(told))):
            LLM(model, **told)
    with pytest.raises(ConfigError, match=r"'org/nowhere' is no model folder.*hf download"):
        LLM("org/nowhere")
    with pytest.raises(TypeError, match="SamplingParams, not dict"):
        llm.generate(["x"], {"max_tokens": 2})  # type: ignore[arg-type]


def test_offline_nobody_is_spared_long_steps(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    async def start(config: EngineConfig, *_: Any, **__: Any) -> EngineProcess:
        seen.append(config.max_num_mixed_tokens)
        raise EngineDeadError("not today")

    monkeypatch.setattr(EngineProcess, "start", start)
    for settings in ({}, {"max_num_mixed_tokens": 100}):
        with pytest.raises(EngineDeadError):
            LLM(model, **settings)
    assert seen == [sys.maxsize, 100]


async def test_deltas_and_cancelling(model: Path) -> None:
    params = SamplingParams(**GREEDY, max_tokens=64)
    async with await AsyncLLM.start(model, **SETTINGS) as engine:
        whole = CompletionOutput(0)
        pieces = 0
        async for delta in engine.generate(TEXTS[0], params):
            whole.append(delta.outputs[0])
            pieces += 1
        assert (len(whole.token_ids), whole.finish_reason) == (64, "length")
        assert pieces > 8
        stream = engine.generate(TEXTS[0], params)
        await anext(stream)
        await stream.aclose()
        short = SamplingParams(**GREEDY, max_tokens=1)
        answers = [delta async for delta in engine.chat([{"role": "user", "content": "x"}], short)]
        assert answers[-1].finished


def test_the_example(model: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "offline.py"
    done = subprocess.run(
        [sys.executable, script, model], capture_output=True, text=True, timeout=120, check=True
    )
    assert "'Once upon a time' -> '" in done.stdout


def test_a_script_from_standard_input_is_not_run_again(model: Path) -> None:
    """As little as one from a file, like the README's: neither asks whether it is the main one."""
    script = (
        f"import kvbaton\nllm = kvbaton.LLM({str(model)!r}, num_blocks=64, num_threads=1)\n"
        "params = kvbaton.SamplingParams(max_tokens=2, ignore_eos=True)\n"
        "print(len(llm.generate('x', params, use_tqdm=False)[0].outputs[0].token_ids))\n"
    )
    done = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr


def test_a_start_that_is_interrupted_leaves_no_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook, whose interpreter goes on; the engine went on to load the model."""
    started, start = list[BaseProcess](), BaseProcess.start

    def interrupted(process: BaseProcess) -> None:
        start(process)
        started.append(process)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(BaseProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM(model, **SETTINGS)
    (engine,) = started
    assert engine.exitcode is not None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_told_that_it_has_no_engine(llm: LLM) -> None:
    """As a data loader's worker; it waited for a thread that a fork does not have."""
    child = os.fork()
    if child == 0:
        signal.alarm(round(PATIENCE_S))
        try:
            with llm:
                llm.generate("x", use_tqdm=False)
        except EngineDeadError as error:
            os._exit(0 if "forked" in str(error) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_an_engine_that_another_loop_shuts_down_keeps_no_interpreter(model: Path) -> None:
    """That fails, and the interpreter waited for the engine without end."""
    script = (
        "import asyncio, kvbaton\n"
        f"start = kvbaton.AsyncLLM.start({str(model)!r}, num_blocks=64, num_threads=1)\n"
        "asyncio.run(asyncio.run(start).shutdown())\n"
    )
    done = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "RuntimeError: Event loop is closed" in done.stderr


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="LMM"):
        kvbaton.LMM  # noqa: B018


def test_a_store_outlives_the_engine(model: Path, tmp_path: Path) -> None:
    store = f'filesystem:{{"path": "{tmp_path}"}}'
    ids, params = list(range(10, 80)), SamplingParams(**GREEDY, max_tokens=4)
    answers = []
    for _ in range(2):
        with LLM(model, **SETTINGS, store=store, store_lookup_timeout=20.0) as llm:
            answers += llm.generate(ids, params)
    assert answers[0].outputs == answers[1].outputs
    assert [answer.num_cached_tokens for answer in answers] == [0, 64]
    with pytest.raises(EngineDeadError, match="this LLM was closed"):
        llm.generate(ids, params)


def test_a_store_that_is_none_is_refused_before_an_engine_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineProcess, "start", None)
    with pytest.raises(ConfigError, match="unknown store 'nowhere'"):
        LLM(model, **SETTINGS, store="nowhere")


def test_drafts_change_no_text(llm: LLM, model: Path) -> None:
    """Stop strings end in the middle of what a step has accepted."""
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    texts = [" ".join([text] * 4) for text in TEXTS]
    with LLM(model, **SETTINGS, speculative_config=drafts) as drafting:
        (whole, *_) = llm.generate(texts, SamplingParams(**GREEDY, max_tokens=40), use_tqdm=False)
        text = whole.outputs[0].text
        for stop in ([], [text[len(text) // 2 :][:3]], [text[len(text) // 3 :][:1]]):
            params = SamplingParams(**GREEDY, max_tokens=40, stop=stop)
            plain, found = (
                each.generate(texts, params, use_tqdm=False) for each in (llm, drafting)
            )
            assert [answer.outputs for answer in found] == [answer.outputs for answer in plain]


def test_allowed_tokens_bad_words_and_truncation(llm: LLM) -> None:
    ids = list(range(5, 45))
    (plain,) = llm.generate(ids[-6:], SamplingParams(**GREEDY, max_tokens=4))
    kept = SamplingParams(**GREEDY, max_tokens=4, truncate_prompt_tokens=6)
    (answer,) = llm.generate(ids, kept)
    assert answer.prompt_token_ids == ids[-6:]
    assert answer.outputs == plain.outputs
    long = SamplingParams(**GREEDY, max_tokens=3, truncate_prompt_tokens=-1)
    (answer,) = llm.generate([7] * 5000, long)
    assert len(answer.outputs[0].token_ids) == 3
    word = llm._own.tokenizer.token_text(plain.outputs[0].token_ids[0])
    (answer,) = llm.generate(ids[-6:], SamplingParams(**GREEDY, bad_words=[word]))
    assert plain.outputs[0].token_ids[0] not in answer.outputs[0].token_ids
    (answer,) = llm.generate(ids, SamplingParams(allowed_token_ids=(7, 8), ignore_eos=True))
    assert set(answer.outputs[0].token_ids) <= {7, 8}
    for fields in (
        {"bad_words": "x"}, {"bad_words": [3]}, {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": "x"}, {"allowed_token_ids": ()},
    ):  # fmt: skip
        with pytest.raises(RequestError) as refused:
            llm.generate(ids, SamplingParams(**fields))
        assert refused.value.param == next(iter(fields))


def test_images_are_fetched_from_the_hosts_that_are_named(checkpoint: Callable[..., Path]) -> None:
    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.end_headers()
            self.wfile.write(picture(40, 30))

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{site.server_port}/a.png"
        part = {"url": url}
        content = [{"type": "image_url", "image_url": part}]
        talk, params = [{"role": "user", "content": content}], SamplingParams(max_tokens=2)
        media: dict[str, Any] = {
            "allowed_media_domains": ["127.0.0.1"], "allow_private_media": True, "max_images": 1
        }  # fmt: skip
        try:
            with LLM(checkpoint(family="qwen2_5_vl"), **SETTINGS, **media) as seeing:
                (answer,) = seeing.chat(talk, params, use_tqdm=False)
                assert answer.outputs[0].finish_reason is not None
                with pytest.raises(RequestError, match="image"):
                    seeing.chat(talk + talk, params, use_tqdm=False)
                part["url"] = url.replace("127.0.0.1", "localhost")
                with pytest.raises(RequestError, match="may not be fetched from localhost"):
                    seeing.chat(talk, params, use_tqdm=False)
        finally:
            site.shutdown()
            thread.join()
