"""Sample one token per row of logits: greedily, or from the softmax after top-k, top-p and min-p.

A sample is ``argmax(logits / temperature + Gumbel noise)`` (Gumbel 1954; Maddison et al., arXiv
1411.0030). The noise is that of `gumbel_noise`, computed where it is added, so that neither noise
nor fp32 logits are ever stored in memory.

The tokens that top-k, top-p and min-p keep are found without sorting. The bits of a logit are
mapped to a code of the same order, and the lowest code that is kept is searched from the highest
bits down, two bits at a time (radix select: Alabi et al., "Fast k-selection algorithms for graphics
processing units", 2012). The search first looks only at the best of every 8,192nd id, which fit in
registers: if no other token can be kept, one pass over the row confirms it.

Random numbers depend on a counter alone: for equal arguments they are equal on every rank, node and
device. Philox4x32-10 is from Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2,
3" (SC 2011), in 64-bit integer arithmetic of plain torch: words are int64 in [0, 2^32).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton, wait_for_inputs
from kvbaton.kernels.penalties import Penalties, count_tokens, penalize, penalized

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

PURPOSE_SAMPLE = 0
"""Purpose of the noise that chooses the next token."""


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply ten rounds of Philox4x32 to tensors of 32-bit words, which broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The product of two 32-bit words wraps in int64 but keeps its 64 bits.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & MASK) ^ c1 ^ k0,
            p1 & MASK,
            ((p0 >> 32) & MASK) ^ c3 ^ k1,
            p0 & MASK,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def gumbel_noise(
    seeds: Tensor, positions: Tensor, choices: Tensor, vocab_size: int, purpose: int
) -> Tensor:
    """Standard Gumbel noise for every vocabulary id of every row; always finite.

    The counter is (id // 4, position, purpose, choice), the key is the seed, and the id modulo 4
    selects the word of the output. A word w becomes u = (w + 1/2) / 2^32, which is never 0 or 1,
    and the noise is -log(-log(u)). It is computed in float64, so that last-bit differences between
    two devices' logarithms do not survive the rounding to float32.

    Args:
        seeds: [rows] int64, the bits of a 64-bit seed.
        positions: [rows] int64, absolute position of the token to choose.
        choices: [rows] int64, index of the choice.
        vocab_size: Number of ids.
        purpose: Purpose of the noise (`PURPOSE_SAMPLE`).

    Returns:
        [rows, vocab_size] float32.
    """
    quads = torch.arange((vocab_size + 3) // 4, device=seeds.device)
    words = philox4x32(
        (quads, (positions & MASK)[:, None], torch.full_like(quads, purpose), choices[:, None]),
        ((seeds & MASK)[:, None], ((seeds >> 32) & MASK)[:, None]),
    )
    uniform = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    uniform = uniform.double().add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().float()


BLOCK = 2048
"""Ids per program of the choice of the token."""
SEARCHED = 8192
"""Ids that a program of the search for kept tokens reads at a time."""
SEARCHING_WARPS = 16
"""Warps of a program of the search."""

UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 12, torch.float32: 2}
"""Lowest bits of a logit in fp32 that are always equal or may be ignored, by its dtype; even.

For a row with penalties, those of fp32 are used.
"""


class Sampling(NamedTuple):
    """How the token of each row is chosen; all tensors are [rows].

    Attributes:
        temperatures: float64; 0 for greedy sampling.
        seeds: int64, the bits of a 64-bit seed.
        positions: int64, absolute position of the token to choose.
        choices: int64, index of the choice.
        top_ks: int64: number of best tokens to keep, plus ties with the last; 0 for all.
        top_ps: float64: share of the probability mass left by top-k; the smallest set of best
            tokens with it is kept, among ties the highest ids (arXiv 1904.09751); 1 for all.
        min_ps: float64: least probability of a kept token, as a share of the best one's (arXiv
            2407.01082); 0 for all.
        penalties: Penalties, applied before all of these.
    """

    temperatures: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    choices: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    penalties: Penalties


def sample_tokens(logits: torch.Tensor, rows: Sampling) -> torch.Tensor:
    """Choose a token for each row; among ties, the lowest id.

    Args:
        logits: [rows, vocab], rows contiguous.
        rows: How tokens are chosen.

    Returns:
        [rows] int64; -1 where logits are NaN, or the best one is infinite.
    """
    if not use_triton(logits):
        return sample_tokens_reference(logits, rows)
    count, vocab = logits.shape
    parts = cdiv(vocab, BLOCK)
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    if not count:
        return out
    best = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(count, parts, dtype=torch.int32, device=logits.device)
    kept = torch.empty(count, 2, dtype=torch.int32, device=logits.device)
    least = torch.empty(count, dtype=torch.float32, device=logits.device)
    unused, penalties = UNUSED_BITS[logits.dtype], rows.penalties
    count_tokens(penalties)
    _kept_kernel[(count,)](
        logits,
        rows.temperatures,
        rows.top_ks,
        rows.top_ps,
        rows.min_ps,
        penalties.repetitions,
        penalties.presences,
        penalties.frequencies,
        penalties.counts,
        kept,
        least,
        vocab,
        logits.stride(0),
        UNUSED=unused,
        BLOCK=max(8, min(SEARCHED, next_power_of_2(vocab))),
        num_warps=SEARCHING_WARPS,
    )
    _kernel[(count, parts)](
        logits,
        rows.temperatures,
        rows.seeds,
        rows.positions,
        rows.choices,
        penalties.repetitions,
        penalties.presences,
        penalties.frequencies,
        penalties.counts,
        kept,
        least,
        best,
        ids,
        vocab,
        logits.stride(0),
        UNUSED=unused,
        BLOCK=BLOCK,
        PURPOSE=PURPOSE_SAMPLE,
        num_warps=4,
    )
    _merge_kernel[(count,)](best, ids, out, parts, BLOCK=next_power_of_2(parts), num_warps=1)
    return out


def sample_tokens_reference(logits: torch.Tensor, rows: Sampling) -> torch.Tensor:
    """Plain torch for `sample_tokens`."""
    temperatures, vocab = rows.temperatures, logits.shape[1]
    drawn, scaled = temperatures > 0, logits.to(torch.float32, copy=True)
    penalize(scaled, rows.penalties)
    scaled /= torch.where(drawn, temperatures, 1.0).float()[:, None]
    cut = drawn & (rows.top_ks > 0) & (rows.top_ks < vocab)
    if cut.any():
        scaled[cut] = keep_top_k(scaled[cut], rows.top_ks[cut], int(rows.top_ks[cut].max()))
    cut = drawn & (rows.top_ps < 1)
    if cut.any():
        scaled[cut] = keep_top_p(scaled[cut], rows.top_ps[cut].float()[:, None])
    cut = drawn & (rows.min_ps > 0)
    if cut.any():
        scaled[cut] = keep_min_p(scaled[cut], rows.min_ps[cut].float()[:, None])
    noise = gumbel_noise(rows.seeds, rows.positions, rows.choices, vocab, PURPOSE_SAMPLE)
    return best_tokens(scaled + torch.where(drawn[:, None], noise, 0.0))


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Id [rows] of the largest logit of each row; -1 where it is not finite."""
    best, ids = logits.max(dim=-1)
    return torch.where(best.isfinite(), ids, -1)


def keep_top_k(logits: torch.Tensor, top_ks: torch.Tensor, most: int) -> torch.Tensor:
    """Mask, in place, all but the `top_ks` best tokens of each row; `most` is the largest k."""
    best = logits.topk(most).values
    return logits.masked_fill_(logits < best.gather(1, top_ks[:, None] - 1), -math.inf)


def keep_top_p(logits: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Mask, in place, all but the smallest set of best tokens of mass `top_ps` [rows, 1]."""
    ordered, order = logits.sort(dim=-1, stable=True)
    dropped = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_ps
    dropped[:, -1] = False
    return logits.masked_fill_(torch.empty_like(dropped).scatter_(1, order, dropped), -math.inf)


def keep_min_p(logits: torch.Tensor, min_ps: torch.Tensor) -> torch.Tensor:
    """Mask, in place, tokens less likely than `min_ps` [rows, 1] times the most likely one."""
    return logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + min_ps.log(), -math.inf)


@jit()
def _code(value: tl.tensor, unused: tl.tensor) -> tl.tensor:
    """The bits of float32 values that matter, as int32 of their order."""
    bits = value.to(tl.int32, bitcast=True)
    turned = tl.where(bits < 0, ~bits, bits | -2147483648)
    return (turned.to(tl.uint32, bitcast=True) >> unused).to(tl.int32)


@jit()
def _row(
    logits: tl.tensor,
    counts: tl.tensor,
    repetitions: tl.tensor,
    presences: tl.tensor,
    frequencies: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    UNUSED: tl.constexpr,
) -> tl.tuple:
    """This program's row, as those below take it: at 2 its ids, at 4 the unused bits of a code."""
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetitions + row).to(tl.float32)
    presence = tl.load(presences + row).to(tl.float32)
    frequency = tl.load(frequencies + row).to(tl.float32)
    unused = tl.where(repetition > 0.0, 2, UNUSED)
    penalties = repetition, presence, frequency
    return logits + row * stride, counts + row * vocab, vocab, penalties, unused


@jit()
def _tile(row: tl.tuple, start: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Logits of BLOCK ids from `start` on, less penalties; -inf where there is no id."""
    logits, counts, vocab, penalties, _ = row
    repetition, presence, frequency = penalties
    column = start + tl.arange(0, BLOCK)
    inside = column < vocab
    value = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    if repetition > 0.0:
        count = tl.load(counts + column, mask=inside, other=0)
        value = penalized(value, count, repetition, presence, frequency)
    return value


@jit()
def _folded(values: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Sums of eight neighbours each, which one thread has: that is fewer registers to hold."""
    return tl.sum(tl.reshape(values, [BLOCK // 8, 8]), 1)


@jit()
def _sums_from(
    row: tl.tuple,
    likely: tl.tuple,
    low: tl.tensor,
    middle: tl.tensor,
    high: tl.tensor,
    BLOCK: tl.constexpr,
    MASS: tl.constexpr,
    OF_BEST: tl.constexpr,
) -> tl.tensor:
    """Number, or mass relative to the best one's, of the tokens of each of three codes or more.

    Of all, or of some: `likely` has those, the best logit, and what makes powers of two of them.
    """
    best, top, scale = likely
    of_low = tl.zeros([BLOCK // 8], tl.float32)
    of_middle = tl.zeros([BLOCK // 8], tl.float32)
    of_high = tl.zeros([BLOCK // 8], tl.float32)
    end = row[2]
    if OF_BEST:
        end = BLOCK
    for start in tl.range(0, end, BLOCK):
        value = best
        if not OF_BEST:
            value = _tile(row, start, BLOCK)
        weight = (value > float("-inf")).to(tl.float32)
        if MASS:
            weight = tl.exp2((value - top) * scale)
        code = _code(value, row[4])
        of_low += _folded(tl.where(code >= low, weight, 0.0), BLOCK)
        of_middle += _folded(tl.where(code >= middle, weight, 0.0), BLOCK)
        of_high += _folded(tl.where(code >= high, weight, 0.0), BLOCK)
    return tl.sum(of_low, 0), tl.sum(of_middle, 0), tl.sum(of_high, 0)


@jit()
def _search(
    row: tl.tuple,
    likely: tl.tuple,
    target: tl.tensor,
    floor: tl.tensor,
    BLOCK: tl.constexpr,
    MASS: tl.constexpr,
    OF_BEST: tl.constexpr,
) -> tl.tensor:
    """The highest code of which, or more and of `floor`, there is as much as `target`."""
    found, unused = floor * 0, row[4]
    for turn in tl.range(0, 16 - unused // 2):
        unit = 1 << (30 - unused - 2 * turn)
        low, middle, high = _sums_from(
            row, likely, tl.maximum(found + unit, floor), tl.maximum(found + 2 * unit, floor),
            tl.maximum(found + 3 * unit, floor), BLOCK, MASS, OF_BEST,
        )  # fmt: skip
        enough = (low >= target).to(tl.int32) + (middle >= target).to(tl.int32)
        found += unit * (enough + (high >= target).to(tl.int32))
    return tl.maximum(found, floor)


@jit()
def _lowest_kept(
    row: tl.tuple,
    likely: tl.tuple,
    target: tl.tensor,
    floor: tl.tensor,
    BLOCK: tl.constexpr,
    MASS: tl.constexpr,
) -> tl.tensor:
    """As `_search`, which reads the row at each turn, but mostly from what a program holds.

    Where few tokens are kept, those have them all: so what is found there is checked first.
    """
    found = _search(row, likely, target, floor, BLOCK, MASS, True)
    wrong = found == 0
    if found > 0:
        enough, more, _ = _sums_from(row, likely, found, found + 1, found + 1, BLOCK, MASS, False)
        wrong = (enough < target) | (more >= target)
    if wrong:
        found = _search(row, likely, target, floor, BLOCK, MASS, False)
    return found


@jit(
    "temperatures", "top_ks", "top_ps", "min_ps", "repetitions", "presences", "frequencies",
    early=True,
)  # fmt: skip
def _kept_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    repetitions: tl.tensor,
    presences: tl.tensor,
    frequencies: tl.tensor,
    counts: tl.tensor,
    kept: tl.tensor,
    least: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    UNUSED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: what one row keeps.

    That is the codes above a lowest one, tokens with this one from some id on, and of all these
    the ones whose logit by temperature is no less than a bound.
    """
    wait_for_inputs()
    number = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + number).to(tl.float32)
    top_k = tl.load(top_ks + number)
    top_p = tl.load(top_ps + number).to(tl.float32)
    min_p = tl.load(min_ps + number).to(tl.float32)
    lowest, first, bound = (
        top_k.to(tl.int32) * 0,
        top_k.to(tl.int32) * 0,
        temperature * 0.0 - float("inf"),
    )
    cuts = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    if (temperature > 0.0) & cuts:
        row = _row(logits, counts, repetitions, presences, frequencies, vocab, stride, UNUSED)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in tl.range(0, vocab, BLOCK):
            best = tl.maximum(best, _tile(row, start, BLOCK))
        top = tl.max(best, 0)
        likely = best, top, 1.4426950408889634 / temperature
        if min_p > 0.0:
            bound = tl.div_rn(top, temperature) + tl.log(min_p)
        if (top_k > 0) & (top_k < vocab):
            lowest = _lowest_kept(row, likely, top_k.to(tl.float32), lowest, BLOCK, False)
        if top_p < 1.0:
            total, _, _ = _sums_from(row, likely, lowest, lowest, lowest, BLOCK, True, False)
            target = total * top_p
            lowest = _lowest_kept(row, likely, target, lowest, BLOCK, True)
            lowest = tl.minimum(lowest, _code(top, row[4]))
            first = _first_of_equals(row, likely, target, lowest, BLOCK)
    tl.store(kept + 2 * number, lowest)
    tl.store(kept + 2 * number + 1, first)
    tl.store(least + number, bound)


@jit()
def _first_of_equals(
    row: tl.tuple,
    likely: tl.tuple,
    target: tl.tensor,
    lowest: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The id from which tokens with the lowest code are kept: as few as reach the target."""
    _, top, scale = likely
    above = tl.zeros([BLOCK // 8], tl.float32)
    mass = tl.zeros([BLOCK // 8], tl.float32)
    number = tl.zeros([BLOCK // 8], tl.int32)
    for start in tl.range(0, row[2], BLOCK):
        value = _tile(row, start, BLOCK)
        code, weight = _code(value, row[4]), tl.exp2((value - top) * scale)
        above += _folded(tl.where(code > lowest, weight, 0.0), BLOCK)
        mass += _folded(tl.where(code == lowest, weight, 0.0), BLOCK)
        number += _folded(((code == lowest) & (value > float("-inf"))).to(tl.int32), BLOCK)
    equals = tl.sum(number, 0)
    wanted = tl.ceil((target - tl.sum(above, 0)) * equals / tl.sum(mass, 0)).to(tl.int32)
    dropped = equals - tl.minimum(tl.maximum(wanted, 1), equals)
    first, seen = dropped * 0, dropped * 0
    if dropped > 0:
        for start in tl.range(0, row[2], BLOCK):
            column, value = start + tl.arange(0, BLOCK), _tile(row, start, BLOCK)
            equal = ((_code(value, row[4]) == lowest) & (value > float("-inf"))).to(tl.int32)
            place = seen + tl.cumsum(equal, 0)
            here = (equal > 0) & (place == dropped + 1)
            first = tl.maximum(first, tl.max(tl.where(here, column, 0), 0))
            seen += tl.sum(equal, 0)
    return first


@jit(
    "temperatures", "seeds", "positions", "choices", "repetitions", "presences", "frequencies",
    early=True,
)  # fmt: skip
def _kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    choices: tl.tensor,
    repetitions: tl.tensor,
    presences: tl.tensor,
    frequencies: tl.tensor,
    counts: tl.tensor,
    kept: tl.tensor,
    least: tl.tensor,
    best: tl.tensor,
    ids: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    UNUSED: tl.constexpr,
    BLOCK: tl.constexpr,
    PURPOSE: tl.constexpr,
) -> None:
    """One program: BLOCK ids of one row, whose counts it resets."""
    wait_for_inputs()
    whole = _row(logits, counts, repetitions, presences, frequencies, vocab, stride, UNUSED)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row).to(tl.float32)
    column, value = part * BLOCK + tl.arange(0, BLOCK), _tile(whole, part * BLOCK, BLOCK)
    if temperature > 0.0:
        quad = part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        position = tl.load(positions + row).to(tl.int32)
        choice = tl.load(choices + row).to(tl.int32)
        w0, w1, w2, w3 = tl.philox(tl.load(seeds + row), quad, position, PURPOSE, choice)
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
        noise = -tl.log(-tl.log(uniform))
        code, lowest = _code(value, whole[4]), tl.load(kept + 2 * row)
        stays = (code > lowest) | ((code == lowest) & (column >= tl.load(kept + 2 * row + 1)))
        value = tl.div_rn(value, temperature)
        stays &= value >= tl.load(least + row)
        value = tl.where(stays, value + noise.to(tl.float32), float("-inf"))
    top, place = tl.max(value, 0, return_indices=True)
    tl.store(best + row * tl.num_programs(1) + part, top)
    tl.store(ids + row * tl.num_programs(1) + part, tl.minimum(part * BLOCK + place, vocab - 1))
    if whole[3][0] > 0.0:  # it has penalties
        tl.debug_barrier()  # all have read them
        counted = counts + row * vocab + column
        came = tl.load(counted, mask=column < vocab, other=0) > 0
        tl.store(counted, 0, mask=came)


@jit(early=True)
def _merge_kernel(
    best: tl.tensor, ids: tl.tensor, out: tl.tensor, parts: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program: the best of one row's parts; -1 if that is no finite number."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    value = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    top, place = tl.max(value, 0, return_indices=True)
    chosen = tl.load(ids + row * parts + place).to(tl.int64)
    tl.store(out + row, tl.where((top > float("-inf")) & (top < float("inf")), chosen, -1))
