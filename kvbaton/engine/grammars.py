"""Structured output: which tokens a request's grammar allows next.

A grammar is in a form that `llguidance` takes: Lark, or its JSON. It is compiled in a thread of its
own while the prompt is parked or its KV is handed over; compiled grammars are cached. Each sequence
has a copy, a matcher, which reads the sequence's tokens whenever a mask is due. So it does not
matter whether the tokens were sampled here, by the node that prefilled, or before a migration. A
mask is a row of bits, one per token of the vocabulary; it allows end tokens exactly where the text
may end.

The library is imported with the first grammar.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvbaton.engine import request as requests
from kvbaton.engine.kv_connector import KVConnector
from kvbaton.errors import RequestError
from kvbaton.messages.engine import Output, SamplingParams
from kvbaton.types import clip_text

logger = logging.getLogger(__name__)

Bits = npt.NDArray[np.uint8]

COMPILE_S = 20.0
"""Seconds for compiling a grammar, after which its request ends with an error."""
KEPT = 64
"""Maximum number of compiled grammars in the cache."""
MASK_THREADS = 8
FAILED = "grammar_failed"
"""Error code of requests whose grammar can't be followed on any node."""


def mask_of(params: SamplingParams, vocab: int) -> Bits:
    """A mask that allows the request's `allowed_token_ids`.

    It is stored in `params`: a cache by the ids would hash them at each step, which takes 0.6 ms
    for a whole vocabulary.
    """
    kept: dict[str, Bits] = params.__dict__
    name = f"mask of {vocab}"
    if name not in kept:
        allowed = np.zeros(vocab, np.bool_)
        allowed[list(params.allowed_token_ids or ())] = True
        kept[name] = np.packbits(allowed, bitorder="little")
    return kept[name]


class Grammars(KVConnector):
    """The grammars of all live requests.

    Args:
        folder: Folder of the model, for ``tokenizer.json``.
        vocab_size: Vocabulary size of the model.
        eos_token_ids: End tokens of the model.
        unpark: Puts a sequence that waits for its grammar back into the queue.
    """

    name = "grammars"

    def __init__(
        self,
        folder: str | Path,
        vocab_size: int,
        eos_token_ids: Collection[int],
        unpark: Callable[[requests.Sequence], None],
    ) -> None:
        self._folder, self._unpark = Path(folder), unpark
        self._words = -(-vocab_size // 32)
        self._vocab_size, self._eos = vocab_size, np.array(sorted(eos_token_ids), np.int64)
        self._eos = self._eos[self._eos < vocab_size]
        self._tokenizer: Any = None  # made with the first compilation
        self._threads: ThreadPoolExecutor | None = None
        self._masks: Any = None
        self._compile = lru_cache(KEPT)(self._begin)  # waiting sequences keep theirs themselves
        self._waiting: dict[requests.Sequence, tuple[float, Future[Any]]] = {}
        self._matchers: dict[requests.Sequence, tuple[Any, int]] = {}
        self._errors: dict[requests.Sequence, RequestError] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.wake_fds = (self._wake_fd,)

    # --- as a connector ---

    @override
    def poll(self, now: float) -> list[Output]:
        if self._threads is not None:  # even if the sequences that wait for it are gone
            with suppress(BlockingIOError):  # nothing is compiled, but a sequence may be overdue
                os.eventfd_read(self._wake_fd)
        for sequence in tuple(self._waiting):
            if self._has_begun(sequence):
                self._unpark(sequence)
        return []

    @override
    def next_deadline(self) -> float | None:
        return min((since + COMPILE_S for since, _ in self._waiting.values()), default=None)

    @override
    def finished(self, request: requests.Request) -> None:
        for sequence in request.sequences:
            self._waiting.pop(sequence, None)
            self._matchers.pop(sequence, None)
            self._errors.pop(sequence, None)

    @override
    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        os.close(self._wake_fd)

    # --- as the scheduler calls it ---

    def check(self, grammar: str) -> None:
        """Check the grammar of a new request, and start to compile it.

        Raises:
            RequestError: It can't be followed here.
        """
        if not len(self._eos):
            raise RequestError("this model names no end token", param="grammar")
        self._compile(grammar)

    def ready(self, sequence: requests.Sequence) -> bool:
        """Whether masks are available; if not, the sequence is unparked once they are.

        Also True if the grammar or the tokens so far are wrong; then `error` says why.
        """
        if not self._has_begun(sequence):
            return False
        if sequence in self._errors:
            return True
        matcher, read = self._matchers[sequence]
        tokens = sequence.tokens[len(sequence.request.prompt) + read :].tolist()
        if tokens:
            taken = matcher.try_consume_tokens(tokens)
            self._matchers[sequence] = matcher, read + taken
            if taken < len(tokens):
                at = read + taken
                unfit = f"token {tokens[taken]} at {at} does not fit it"
                self._errors[sequence] = _failed(matcher.get_error() or unfit)
        return True

    def error(self, sequence: requests.Sequence) -> RequestError | None:
        """Why a sequence can't follow its grammar, or None.

        An error without a code is the fault of this node.
        """
        return self._errors.get(sequence)

    def fits(self, sequence: requests.Sequence, token: int) -> bool:
        """Whether a token sampled elsewhere may come next; False while that is unknown."""
        if not self.ready(sequence) or sequence in self._errors:
            return False
        (bits,) = self.masks([(sequence, ())])[sequence.handle]
        return bool(bits[token // 8] >> token % 8 & 1)

    def cut(self, sequence: requests.Sequence, draft: tuple[int, ...]) -> tuple[int, ...]:
        """The part of a draft that the grammar allows, up to the first end token."""
        ends = np.flatnonzero(np.isin(draft, self._eos))
        draft = draft[: int(ends[0])] if len(ends) else draft
        return draft[: self._matchers[sequence][0].validate_tokens(list(draft))] if draft else ()

    def masks(self, wanted: Sequence[tuple[requests.Sequence, tuple[int, ...]]]) -> dict[int, Bits]:
        """Masks for the tokens after sequences' known tokens, and after each of their draft tokens.

        Args:
            wanted: Sequences that are `ready`, with their drafts.

        Returns:
            By handle, [1 + draft, bytes] uint8: bit i of byte b is for token 8 b + i.
        """
        if self._masks is None:
            threads = min(MASK_THREADS, len(os.sched_getaffinity(0)))
            from llguidance import LLExecutor

            self._masks = LLExecutor(threads)
        firsts = np.cumsum([0, *(1 + len(draft) for _, draft in wanted)]).tolist()
        rows = np.zeros((firsts[-1], self._words), np.int32)
        plain, drafted = [], []
        for (sequence, draft), first in zip(wanted, firsts, strict=False):
            matcher = self._matchers[sequence][0]
            if draft:
                drafted.append((matcher, first, list(draft)))
            else:
                plain.append((matcher, first))
        where = rows.ctypes.data, self._words * 4, len(rows)
        if plain:
            self._masks.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._masks.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        bits = rows.view(np.uint8)
        # All end tokens are allowed or none, whatever text they stand for.
        bytes_of, bit_of = self._eos // 8, (1 << self._eos % 8).astype(np.uint8)
        accepts = (bits[:, bytes_of[:1]] & bit_of[:1]) != 0
        for byte, bit in zip(bytes_of, bit_of, strict=True):
            bits[:, byte] = np.where(accepts[:, 0], bits[:, byte] | bit, bits[:, byte] & ~bit)
        found = {}
        for (sequence, draft), first in zip(wanted, firsts, strict=False):
            matcher = self._matchers[sequence][0]
            own = found[sequence.handle] = bits[first : first + 1 + len(draft)]
            if (params := sequence.request.params).allowed_token_ids is not None:
                own &= mask_of(params, 8 * own.shape[1])
            if matcher.is_error() or not own.any(axis=1).all():
                self._errors[sequence] = _failed(matcher.get_error() or "no allowed token fits it")
                own[:, bytes_of[0]] |= bit_of[0]  # allow any one: the sample is not used
        return found

    # --- compilation ---

    def _has_begun(self, sequence: requests.Sequence) -> bool:
        """Whether a sequence has a matcher or an error; if not, it waits for one."""
        if sequence in self._matchers or sequence in self._errors:
            return True
        grammar = sequence.request.params.grammar
        since, future = self._waiting.get(sequence) or self._compile(grammar)
        if future.done():
            if (failure := future.exception()) is None:
                self._matchers[sequence] = future.result().deep_copy(), 0
            else:
                blamed = isinstance(failure, ValueError)  # else, for instance, the model's folder
                self._errors[sequence] = _failed(str(failure), FAILED if blamed else None)
        elif time.monotonic() >= since + COMPILE_S:
            self._errors[sequence] = _failed(f"it was not compiled within {COMPILE_S:g} s")
        else:
            self._waiting[sequence] = since, future
            return False
        self._waiting.pop(sequence, None)
        return True

    def _begin(self, grammar: str) -> tuple[float, Future[Any]]:
        """Start to compile a grammar: the time, and the future of a matcher to copy."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        future = self._threads.submit(self._matcher, grammar)
        future.add_done_callback(lambda _: os.eventfd_write(self._wake_fd, 1))
        return time.monotonic(), future

    def _matcher(self, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        if self._tokenizer is None:
            text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(
                text, n_vocab=self._vocab_size, eos_token=self._eos.tolist()
            )
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


def _failed(why: str, code: str | None = FAILED) -> RequestError:
    return RequestError(clip_text(f"the grammar can't be followed: {why}"), code=code)
