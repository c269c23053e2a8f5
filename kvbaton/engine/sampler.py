"""From logits to tokens: each choice is a function of logits, earlier tokens and the seed.

A sampled token is ``argmax(processed logits / temperature + Gumbel noise)``, a draw from the
softmax (Gumbel 1954; Maddison et al., arXiv 1411.0030). The noise comes from a counter (see
`sample_tokens`), so the same logits give the same token on any rank and node, after any retry.

Processing order: grammars and allowed tokens, bad words, `logit_bias`, `min_tokens`, repetition,
presence and frequency penalties, temperature, top-k, top-p, min-p. A feature costs nothing for rows
without it. Reported logprobs are those of the raw logits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.engine.grammars import mask_of
from kvbaton.engine.upload import upload, upload_ids
from kvbaton.kernels.jit import use_triton
from kvbaton.kernels.penalties import Penalties
from kvbaton.kernels.sample_tokens import Sampling, best_tokens, sample_tokens
from kvbaton.messages.engine import SamplingParams
from kvbaton.types import TokenLogprobs, TopLogprob

GREEDY_BELOW = 1e-5
"""Temperature below which sampling is greedy."""

FORBIDDEN = -1e25
"""Bias of a token that may be chosen only if all others are impossible."""

NOISE_ELEMENTS = 1 << 22
"""Number of noise elements made at a time, which bounds the 64-bit intermediates."""

SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SampleRows:
    """The sampler's inputs for each row of logits.

    Attributes:
        params: [rows], sampling parameters.
        num_prompt: [rows] int64, number of prompt tokens.
        lengths: [rows] int64, number of tokens so far, and position of the token to choose.
        choices: [rows] int64, index of the choice, for the noise.
        tokens: [rows, >= longest] integer tensor on the device, tokens so far; entries past a row's
            length are ignored. None if no row needs them.
        governed: [governed] int64, rows with a grammar.
        masks: [governed, bytes], their allowed tokens: bit i of byte b is for token 8 b + i.
    """

    params: Sequence[SamplingParams]
    num_prompt: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    choices: npt.NDArray[np.int64]
    tokens: Tensor | None
    governed: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    masks: npt.NDArray[np.uint8] | None = None


def has_penalties(params: SamplingParams) -> bool:
    """Whether earlier tokens change the logits by penalties."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def needs_tokens(params: SamplingParams) -> bool:
    """Whether sampling depends on earlier tokens, so that a row needs `SampleRows.tokens`."""
    return has_penalties(params) or params.bad_words_token_ids != ()


def sample(logits: Tensor, rows: SampleRows, eos_token_ids: tuple[int, ...]) -> Tensor:
    """Choose a token for each row.

    Args:
        logits: [rows, vocab] float32; overwritten.
        rows: The rows' other inputs.
        eos_token_ids: End tokens of the model.

    Returns:
        [rows] int64, on the device of `logits`; -1 as in `sample_tokens`.
    """
    process_logits(logits, rows, eos_token_ids)
    if use_triton(logits):
        return sample_tokens(logits, sampling_of(rows, logits, np.arange(len(logits))))
    tokens = best_tokens(logits)
    # Plain torch would make noise for all rows, so only rows that need it are passed on.
    params = enumerate(rows.params)
    chosen = [row for row, p in params if p.temperature >= GREEDY_BELOW or has_penalties(p)]
    at_once = max(1, NOISE_ELEMENTS // logits.shape[1])
    for start in range(0, len(chosen), at_once):
        part = np.array(chosen[start : start + at_once])
        index = torch.from_numpy(part)
        tokens[index] = sample_tokens(logits[index], sampling_of(rows, logits, part))
    return tokens


def sampling_of(rows: SampleRows, logits: Tensor, chosen: npt.NDArray[np.int64]) -> Sampling:
    """Inputs of the sampling kernels for some rows."""
    params = [rows.params[row] for row in chosen]
    words = np.frombuffer(b"".join(map(sampling_words, params)), np.int64).reshape(-1, WORDS).T
    columns = np.vstack((rows.choices[chosen], rows.num_prompt[chosen], words))
    sent, lengths, of = upload([columns, rows.lengths[chosen], chosen], logits.device)
    shape = len(params) if any(map(has_penalties, params)) else 0, logits.shape[1]
    counts = logits.new_zeros(shape, dtype=torch.int32)
    tokens = counts if rows.tokens is None else rows.tokens
    return sampling_from(sent.view(columns.shape), lengths, of, tokens, counts)


WORDS = 8
"""Number of words that `sampling_words` makes."""


def sampling_words(params: SamplingParams) -> bytes:
    """A request's 64-bit words for `sampling_from`; in them, a row without penalties has none."""
    return struct.pack(
        "=Qq6d",
        (params.seed or 0) & SEED_MASK,
        max(params.top_k, 0),
        0.0 if params.temperature < GREEDY_BELOW else params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty if has_penalties(params) else 0.0,
        params.presence_penalty,
        params.frequency_penalty,
    )


def sampling_from(
    columns: Tensor, positions: Tensor, of: Tensor, tokens: Tensor, counts: Tensor
) -> Sampling:
    """Inputs of the sampling kernels.

    Args:
        columns: [2 + WORDS, rows] int64: index of the choice, number of prompt tokens, and the
            words of `sampling_words`.
        positions: See `Sampling`.
        of: See `Penalties`, as for the others.
        tokens: Tokens so far.
        counts: Scratch.
    """
    choices, num_prompt, seeds, top_ks, *floats = columns.unbind()
    temperatures, top_ps, min_ps, repetitions, presences, frequencies = (
        x.view(torch.float64) for x in floats
    )
    penalties = Penalties(
        repetitions, presences, frequencies, num_prompt, positions, of, tokens, counts
    )
    return Sampling(temperatures, seeds, positions, choices, top_ks, top_ps, min_ps, penalties)


def process_logits(logits: Tensor, rows: SampleRows, eos_token_ids: tuple[int, ...]) -> None:
    """Apply, in place, everything before the penalties; `sample_tokens` does the rest."""
    if rows.masks is not None:
        _keep_allowed(logits, rows.governed, rows.masks)
    biases: list[tuple[int, int, float]] = []
    allowed: dict[int, npt.NDArray[np.uint8]] = {}
    has_bad_words = False
    for row, p in enumerate(rows.params):  # in one loop, since most rows use none of these
        if p.allowed_token_ids is not None:
            allowed[row] = mask_of(p, logits.shape[1])
        has_bad_words |= p.bad_words_token_ids != ()
        if p.logit_bias:
            biases += [(row, token, bias) for token, bias in p.logit_bias.items()]
        if p.min_tokens and rows.lengths[row] - rows.num_prompt[row] < p.min_tokens:
            # Tokens that would end the text are forbidden until then.
            stops = {*p.stop_token_ids, *(() if p.ignore_eos else eos_token_ids)}
            biases += [(row, token, FORBIDDEN) for token in stops]
    if allowed:
        _keep_allowed(logits, np.array(list(allowed)), np.stack(list(allowed.values())))
    if has_bad_words:
        _forbid_bad_words(logits, rows)
    if biases:
        # A token outside of the vocabulary can't be chosen anyway.
        known = [bias for bias in biases if bias[1] < logits.shape[1]]
        of, tokens, values = zip(*known, strict=True) if known else ((), (), ())
        bits = np.array(values, np.float64).view(np.int64)
        rows_of, ids, added = (upload_ids(x, logits.device) for x in (of, tokens, bits))
        logits.index_put_((rows_of, ids), added.view(torch.float64).float(), accumulate=True)


def _keep_allowed(
    logits: Tensor, rows: npt.NDArray[np.int64], masks: npt.NDArray[np.uint8]
) -> None:
    """Make tokens impossible that masks do not allow; see `SampleRows`."""
    index, packed = upload_ids(rows, logits.device), torch.from_numpy(masks)
    if logits.is_cuda:
        packed = packed.pin_memory().to(logits.device, non_blocking=True)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (packed[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[index] = logits[index].masked_fill_(~allowed, -math.inf)


def _forbid_bad_words(logits: Tensor, rows: SampleRows) -> None:
    """Forbid the last token of each bad word whose other tokens were just generated."""
    assert rows.tokens is not None, "bad words need the tokens so far"
    generated = (rows.lengths - rows.num_prompt).tolist()
    words = [
        (row, word)
        for row, p in enumerate(rows.params)
        for word in p.bad_words_token_ids
        if len(word) <= generated[row] + 1
    ]
    if not words:
        return
    most = max(len(word) for _, word in words)
    padded = [(-1,) * (most - len(word)) + word for _, word in words]
    index = upload_ids([row for row, _ in words], logits.device)
    table = upload_ids(np.array(padded, np.int64).ravel(), logits.device).view(len(padded), most)
    ends = upload_ids(rows.lengths, logits.device)[index]
    at = ends[:, None] + torch.arange(1 - most, 0, device=logits.device)
    before, last = table[:, :-1], table[:, -1]
    same = (rows.tokens[index[:, None], at.clamp(min=0)] == before) | (before < 0)
    bias = torch.where(same.all(1), FORBIDDEN, 0.0).to(logits.dtype)
    logits.index_put_((index, last), bias, accumulate=True)


# --- log probabilities ---


@dataclass(frozen=True)
class Logprobs:
    """Logprobs of chosen tokens and of the best candidates, still on the device.

    Attributes:
        chosen: [rows] float32.
        rank: [rows] int64, 1 for the most probable token.
        top: [rows, n] float32, descending.
        top_ids: [rows, n] int64.
    """

    chosen: Tensor
    rank: Tensor
    top: Tensor
    top_ids: Tensor

    def messages(self, counts: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """One message per row, with the requested number of candidates."""
        columns = (self.chosen, self.rank, self.top, self.top_ids)
        return tuple(
            TokenLogprobs(
                logprob,
                rank,
                tuple(
                    TopLogprob(token, value, place)
                    for place, (token, value) in enumerate(
                        zip(ids[:count], top[:count], strict=True), 1
                    )
                ),
            )
            for count, logprob, rank, top, ids in zip(
                counts, *(column.tolist() for column in columns), strict=True
            )
        )


def logprobs_of(logprobs: Tensor, tokens: Tensor, count: int) -> Logprobs:
    """Pick the logprobs of chosen tokens and of the best candidates.

    Args:
        logprobs: [rows, vocab], ``log_softmax`` of raw logits.
        tokens: [rows] int64.
        count: Number of candidates.
    """
    chosen = logprobs.gather(1, tokens[:, None])
    rank = (logprobs > chosen).sum(-1) + 1
    top, ids = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
    return Logprobs(chosen[:, 0], rank, top, ids)
