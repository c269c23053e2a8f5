"""One step of the engine as data: what the scheduler tells the ranks, and what they answer.

A *sequence* is one choice of one request, named by a small integer handle that the scheduler
assigns and never reuses. The runner of every rank keeps each sequence's tokens and block tables
from step to step; a plan carries only what changed.
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
"""Most tokens of a step with prompts in one graph; longer prompts' attention has a faster kernel,
and its layers, enqueued one by one, take the thread of a single rank about 11 ms."""


class NewSequence(Struct, frozen=True, array_like=True):
    """A sequence that the runner does not know yet (or again, after preemption).

    Attributes:
        handle: its name.
        token_ids: all tokens known: the prompt, and what was generated so far.
        num_prompt: how many of them are the prompt.
        choice: index of the choice, for the noise.
        params: sampling.
        items: multimodal items of the prompt.
    """

    handle: int
    token_ids: TokenIds
    num_prompt: int
    choice: int
    params: SamplingParams
    items: tuple[Item, ...] = ()


class Fork(Struct, frozen=True, array_like=True):
    """A new sequence that starts as a copy of another: same tokens, its own choice number.

    The token at the end is the one that the parent's sampling gave for this choice. The child's
    block tables come with its first `SequenceStep`, as for a new sequence.
    """

    parent: int
    child: int
    choice: int


class ItemRows(Struct, frozen=True, array_like=True):
    """Where the encoder output of an item is: tokens [start, start + length) are its rows.

    Row r lies in ``blocks[r // block_size]`` of the encoder cache, at ``r % block_size``.
    """

    start: int
    length: int
    blocks: tuple[int, ...]


class SequenceStep(Struct, frozen=True, array_like=True):
    """What to compute of one sequence.

    Attributes:
        handle: which.
        start: position of the first token to compute; all before it are in the cache.
        count: tokens to compute. For a decoding sequence 1 and those of its draft: the token
            sampled last, which the runner has even when the scheduler does not know it yet.
        new_blocks: per group, physical blocks to append to the block table.
        num_samples: 0 for a chunk that does not end the known tokens; 1; or n at the end of a
            prompt with n choices (noise of choices 0 .. n-1).
        items: encoder outputs of all items that overlap the tokens to compute.
        draft: what may come after a decoding sequence's last token. There is a sample after each
            of them too, beside `num_samples`, which is 1.
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
        """Whether all that it computes is its last known token, and a draft."""
        return self.count == 1 + len(self.draft)

    def apart(self) -> list[SequenceStep]:
        """With a draft, one step for each token: each attends to those before it, as ever."""
        if not self.draft:
            return [self]
        return [
            SequenceStep(self.handle, self.start + i, 1, self.new_blocks, 1)
            for i in range(self.count)
        ]


class BlockCopy(Struct, frozen=True, array_like=True):
    """Copy one block before anything else in the step (a private copy of a shared tail)."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class StepColumns:
    """Steps column by column, each [steps] int64.

    Attributes:
        starts: of each step.
        counts: likewise.
        samples: their `num_samples`.
        known: tokens of each sequence after it, but for a draft's and what it samples.
        new_blocks: index of a step, group, and its new blocks there, where there are some.
    """

    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    known: npt.NDArray[np.int64]
    new_blocks: list[tuple[int, int, tuple[int, ...]]]

    @staticmethod
    def of(steps: Sequence[SequenceStep]) -> StepColumns:
        """Those of some steps."""
        numbers = [(s.start, s.count, s.num_samples, len(s.draft)) for s in steps]
        table = np.array(numbers, np.int64).reshape(-1, 4)
        table.flags.writeable = False  # all ranks have the same
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
        number: of the step.
        ended: handles that the runner forgets first.
        copies: block copies.
        forks: new sequences made from others.
        new: new sequences.
        steps: what to compute; decoding sequences first, with drafts or without, then prompts.
        masks: by handle, which tokens a grammar allows: [1 + draft, bytes] uint8, see `Grammars`.
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
        """Tokens to compute in all."""
        return sum(step.count for step in self.steps)

    @cached_property
    def columns(self) -> StepColumns:
        """Of `steps`: made once for all ranks whose threads share an interpreter."""
        return StepColumns.of(self.steps)

    @cached_property
    def encoded(self) -> bytes:
        """For ranks in processes of their own, once for all; they need no bytes of images."""
        new = [
            replace(each, items=tuple(replace(item, data=b"") for item in each.items))
            for each in self.new
        ]
        return _encoder.encode(replace(self, new=tuple(new)) if new else self)

    @staticmethod
    def decode(data: bytes) -> StepPlan:
        """The plan of which `data` is the encoded form."""
        return _decoder.decode(data)


def _parts(of: TokenIds | npt.NDArray[np.uint8]) -> tuple[tuple[int, ...], bytes]:
    return () if isinstance(of, array) else of.shape, of.tobytes()


def _of_parts(kind: type, parts: Any) -> TokenIds | npt.NDArray[np.uint8]:
    shape, data = parts
    return array("I", data) if kind is array else np.frombuffer(data, np.uint8).reshape(shape)


_encoder = msgpack.Encoder(enc_hook=_parts)
_decoder = msgpack.Decoder(StepPlan, dec_hook=_of_parts)


class Sampled(Struct, frozen=True, array_like=True):
    """What one sequence's step sampled, or why it could not be computed.

    Attributes:
        handle: which.
        token_ids: one per sample; with a draft those of its tokens that were accepted, and one.
        logprobs: of those.
        prompt_logprobs: of the prompt's tokens that follow those computed.
        error: why it could not be computed.
        error_code: see `messages.engine.Output`.
    """

    handle: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    error_code: str | None = None


class StepResult(Struct, frozen=True):
    """What the ranks answer.

    Attributes:
        number: of the step.
        sampled: in the order of the plan's steps that sample, or have prompt logprobs to report.
        device_s: how long the first rank's device was at it; 0 if that was not measured.
    """

    number: int
    sampled: tuple[Sampled, ...]
    device_s: float = 0.0
