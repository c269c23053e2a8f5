"""One step of the engine as data: the scheduler's plan for the ranks, and their result.

A *sequence* is one choice of one request. The scheduler names it by a small integer handle that it
never reuses. The runner of every rank keeps each sequence's tokens and block tables from step to
step, so that a plan carries only what changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, msgpack
from msgspec.structs import replace

from kvbaton.messages.engine import Item, SamplingParams
from kvbaton.types import TokenIds, TokenLogprobs

WHOLE_TOKENS = 1024
"""Maximum number of tokens of a step with prompts that runs as one CUDA graph. Longer prompts have
a faster attention kernel, but enqueueing their layers one by one takes the thread of a single rank
about 11 ms."""


MOST_KNOWN = 2
"""Maximum number of known tokens of a sequence that are computed like those of decoding ones: as
many as a source samples before its target goes on."""


class NewSequence(Struct, frozen=True, array_like=True):
    """A sequence that the runner does not know yet, or not any more after preemption.

    Attributes:
        handle: Handle of the sequence.
        token_ids: All known tokens: the prompt, and those generated so far.
        num_prompt: Number of prompt tokens.
        choice: Index of the choice, from which the sampling noise is derived.
        params: Sampling parameters.
        items: Multimodal items of the prompt.
    """

    handle: int
    token_ids: TokenIds
    num_prompt: int
    choice: int
    params: SamplingParams
    items: tuple[Item, ...] = ()


class Fork(Struct, frozen=True, array_like=True):
    """A new sequence that starts as a copy of another, with a choice index of its own.

    Its tokens are the parent's, except that the last is the one sampled for this choice. Its block
    tables come with its first `SequenceStep`, as for a new sequence.
    """

    parent: int
    child: int
    choice: int


class ItemRows(Struct, frozen=True, array_like=True):
    """Where an item's encoder output is: its rows are for tokens [start, start + length).

    Row r lies in ``blocks[r // block_size]`` of the encoder cache, at ``r % block_size``.
    """

    start: int
    length: int
    blocks: tuple[int, ...]


class SequenceStep(Struct, frozen=True, array_like=True):
    """What a step computes of one sequence.

    Attributes:
        handle: Handle of the sequence.
        start: Position of the first token to compute; the KV of all tokens before is cached.
        count: Number of tokens to compute. For a decoding sequence, 1 plus its draft tokens; the
            first is the token sampled last, which the runner may know before the scheduler.
        new_blocks: Per group, physical blocks to append to the block table.
        num_samples: 0 for a chunk that ends before the last known token; else 1, or n at the end of
            a prompt with n choices (with the noise of choices 0 .. n-1).
        items: Encoder outputs of all items that overlap the tokens to compute.
        draft: Tokens proposed after a decoding sequence's last token. One token is sampled after
            each, in addition to `num_samples`, which is 1.
    """

    handle: int
    start: int
    count: int
    new_blocks: tuple[tuple[int, ...], ...]
    num_samples: int
    items: tuple[ItemRows, ...] = ()
    draft: tuple[int, ...] = ()

    @property
    def decodes(self) -> bool:
        """Whether the step computes only the last known token, and perhaps a draft."""
        return self.count == 1 + len(self.draft)

    def apart(self) -> list[SequenceStep]:
        """One step per token, if there is a draft: each token attends to those before it."""
        if not self.draft:
            return [self]
        return [
            SequenceStep(self.handle, self.start + i, 1, self.new_blocks, 1)
            for i in range(self.count)
        ]


class BlockCopy(Struct, frozen=True, array_like=True):
    """A copy of one block made before the step computes: a private copy of a shared tail."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class StepColumns:
    """Fields of a plan's sequence steps as columns, each [steps] int64.

    Attributes:
        starts: `start` of each step.
        counts: `count` of each step.
        samples: `num_samples` of each step.
        known: Known tokens of each sequence after the step, without draft and sampled tokens.
        new_blocks: Index of a step, group, and new blocks; where there are any.
    """

    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    known: npt.NDArray[np.int64]
    new_blocks: list[tuple[int, int, tuple[int, ...]]]

    @staticmethod
    def of(steps: Sequence[SequenceStep]) -> StepColumns:
        """The columns of some steps."""
        numbers = [(s.start, s.count, s.num_samples, len(s.draft)) for s in steps]
        table = np.array(numbers, np.int64).reshape(-1, 4)
        table.flags.writeable = False  # shared by all ranks
        starts, counts, samples, drafts = table.T
        new_blocks = [
            (index, group, blocks)
            for index, step in enumerate(steps)
            for group, blocks in enumerate(step.new_blocks)
            if blocks
        ]
        return StepColumns(starts, counts, samples, starts + counts - drafts, new_blocks)


class StepPlan(Struct, frozen=True, dict=True):
    """What the ranks do next: end, copy, fork, add, then compute.

    Attributes:
        number: Number of the step.
        ended: Handles that the runner forgets first.
        copies: Block copies.
        forks: New sequences made from others.
        new: New sequences.
        steps: What to compute: decoding sequences first, with or without drafts, then prompts.
        masks: By handle, tokens that the grammar allows: [1 + draft, bytes] uint8, see `Grammars`.
    """

    number: int
    ended: tuple[int, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    forks: tuple[Fork, ...] = ()
    new: tuple[NewSequence, ...] = ()
    steps: tuple[SequenceStep, ...] = ()
    masks: dict[int, npt.NDArray[np.uint8]] = {}

    @property
    def num_tokens(self) -> int:
        """Total number of tokens to compute."""
        return sum(step.count for step in self.steps)

    @cached_property
    def columns(self) -> StepColumns:
        """`steps` as columns, made once for all ranks whose threads share an interpreter."""
        return StepColumns.of(self.steps)

    @cached_property
    def encoded(self) -> bytes:
        """The encoded plan, made once for all ranks in other processes; without image bytes."""
        new = [
            replace(each, items=tuple(replace(item, data=b"") for item in each.items))
            for each in self.new
        ]
        return _encoder.encode(replace(self, new=tuple(new)) if new else self)

    @staticmethod
    def decode(data: bytes) -> StepPlan:
        """The plan encoded in `data`."""
        return _decoder.decode(data)


def _parts(of: TokenIds | npt.NDArray[np.uint8]) -> tuple[tuple[int, ...], bytes]:
    return () if isinstance(of, array) else of.shape, of.tobytes()


def _of_parts(kind: type, parts: Any) -> TokenIds | npt.NDArray[np.uint8]:
    shape, data = parts
    return array("I", data) if kind is array else np.frombuffer(data, np.uint8).reshape(shape)


_encoder = msgpack.Encoder(enc_hook=_parts)
_decoder = msgpack.Decoder(StepPlan, dec_hook=_of_parts)


class Sampled(Struct, frozen=True, array_like=True):
    """The result of one sequence's step: sampled tokens, or an error.

    Attributes:
        handle: Handle of the sequence.
        token_ids: One per sample; with a draft, its accepted tokens and the one sampled after them.
        logprobs: Logprobs of those tokens.
        prompt_logprobs: Logprobs of the prompt tokens that follow the computed ones.
        error: Why the sequence could not be computed.
        error_code: See `messages.engine.Output`.
    """

    handle: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    error_code: str | None = None


class StepResult(Struct, frozen=True):
    """The result of a step.

    Attributes:
        number: Number of the step.
        sampled: Results in the order of the plan's steps, of those that sample or have prompt
            logprobs to report.
        device_s: Seconds that the first rank's device took; 0 if not measured.
    """

    number: int
    sampled: tuple[Sampled, ...]
    device_s: float = 0.0
