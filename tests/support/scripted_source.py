"""Shared by tests of text and serving: a small tokenizer and scripted token sources."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from kvbaton.engine.client import EngineClient
from kvbaton.engine.outputs import OutputReceiver, TokenSource
from kvbaton.messages.engine import NO_METRICS, AddRequest, Output, Ready
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.types import NodeId, TokenLogprobs, TopLogprob

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A baton is handed over, and the runner goes on; nobody waits for the other.",
    "Größe, naïve café, 東京へ行きます。 Привет, мир! 👩‍🚀🎉",
    'def f(x): return {"a": 1, "b": [2, 3]}',
]
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EOS = 1
VOCAB = 400
TURNS = 5
"""Turns of the event loop after which a reader that keeps up has read an output."""
MAX_MODEL_LEN = 256


def train_backend(special: Sequence[str] = SPECIAL) -> tokenizers.Tokenizer:
    """Byte-level BPE with a few hundred tokens, including bytes; texts start with ``<s>``."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return backend


def write_tokenizer(folder: Path, special: Sequence[str] = SPECIAL, **config: Any) -> Path:
    """Write a tokenizer folder as Hugging Face does."""
    train_backend(special).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "chat_template": TEMPLATE,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of what `write_tokenizer` writes."""
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class ScriptedSource(TokenSource):
    """A token source that answers every request with the tokens of one text, one at a time.

    Each choice gets the text, then the end token, within `max_tokens`; log probabilities are made
    up from the token ids. Requests and cancellations are kept for the test.

    Args:
        tokenizer: Tokenizer of the text.
        text: Text of every choice; None repeats the prompt.
        gate: Awaited before each output, so that a test can hold a stream.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        text: str | None = None,
        gate: Callable[[int], Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.text = text
        self.gate = gate
        self.script: list[int] | None = None
        self.requests: list[AddRequest] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.running = 0
        self.cancelled: list[str] = []
        self.cancellation = asyncio.Event()
        self.failure: Exception | None = None
        self.fail_at = 0
        self.final: dict[str, Any] = {}
        self.end = "stop"

    def submit(self, request: AddRequest, receiver: OutputReceiver) -> None:
        """See `TokenSource`."""
        task = asyncio.create_task(self._run(request, receiver))
        self.tasks[request.request_id] = task

    def cancel(self, request_id: str) -> None:
        """See `TokenSource`."""
        task = self.tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def _run(self, request: AddRequest, receiver: OutputReceiver) -> None:
        self.requests.append(request)
        self.running += 1
        finished, error = False, None
        try:
            tokens = self._tokens(request)
            for index in range(len(tokens)):
                if self.gate is not None:
                    await self.gate(index)
                if self.failure is not None and index == self.fail_at:
                    raise self.failure
                for choice in range(request.params.n):
                    last = index == len(tokens) - 1
                    finished = last and choice == request.params.n - 1
                    receiver.put(self._output(request, choice, index, tokens, last))
                receiver.flush()
                for _ in range(TURNS):
                    await asyncio.sleep(0)
        except Exception as failure:
            error = failure
        finally:
            self.running -= 1
            if not finished:
                self.cancelled.append(request.request_id)
                self.cancellation.set()
        receiver.end(error)
        receiver.flush()

    def _tokens(self, request: AddRequest) -> list[int]:
        if self.script is not None:
            tokens = self.script
        elif self.text is None:
            tokens = list(request.token_ids)
        else:
            tokens = self.tokenizer.encode(self.text, add_special_tokens=False)
        return [*tokens, EOS][: request.params.max_tokens]

    def _output(
        self, request: AddRequest, choice: int, index: int, tokens: Sequence[int], last: bool
    ) -> Output:
        params = request.params
        finish = None
        if last:
            finish = self.end if tokens[-1] == EOS else "length"
        scores = [None, *(fake_logprobs(t, params.prompt_logprobs) for t in request.token_ids[1:])]
        return Output(
            request_id=request.request_id,
            choice=choice,
            index=index,
            token_ids=(tokens[index],),
            logprobs=None
            if params.logprobs is None
            else (fake_logprobs(tokens[index], params.logprobs),),
            prompt_logprobs=tuple(scores)
            if params.prompt_logprobs is not None and index == choice == 0
            else None,
            finish_reason=finish,
            cached_tokens=min(4, len(request.token_ids)),
            **(self.final if last else {}),
        )


def fake_logprobs(token: int, top: int | None) -> TokenLogprobs:
    """A made-up entry, whose last candidate has probability 0."""
    rivals = [TopLogprob((token + i) % VOCAB, -float(i), i + 1) for i in range(top or 0)]
    if rivals:
        rivals[-1] = TopLogprob(rivals[-1].token, float("-inf"), len(rivals))
    return TokenLogprobs(-0.5, 1, tuple(rivals))


class ScriptedClient(ScriptedSource, EngineClient):
    """An `EngineClient` without an engine."""

    def __init__(self, tokenizer: Tokenizer, text: str | None = None) -> None:
        super().__init__(tokenizer, text)
        self.ready = Ready(
            node=NodeId("p1", bytes(16)),
            control_address="tcp://127.0.0.1:9",
            num_blocks=8,
            block_size=16,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
            vocab_size=VOCAB,
        )
        self.metrics, self.heard_at = NO_METRICS, time.monotonic()
        self.dead: str | None = None
        self.draining = False
        self.commands: list[str] = []

    async def command(self, name: str, argument: Any = None) -> Any:
        """Answer with the command's name."""
        self.commands.append(name)
        return {"asked": name}
