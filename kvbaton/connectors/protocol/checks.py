"""Checks of a peer's messages about an attempt. Each returns what is wrong, or None."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbaton.connectors.layout import GroupKind, KVLayout
from kvbaton.connectors.protocol.events import Landed
from kvbaton.messages.control import Ack, Complete, Reserve
from kvbaton.types import KEY_BYTES, BlockSpan, Spans

MAX_CHOICES = 1024
"""Maximum number of choices of a `Complete`."""
MAX_BAD_RANGES = 4096
"""Maximum number of mismatching token ranges of an `Ack`."""


def first_token(spans: Spans, groups: Sequence[KVLayout]) -> int:
    """First token of a reservation."""
    firsts = [
        group_spans[0].first * group.block_size
        for group_spans, group in zip(spans, groups, strict=True)
        if group_spans and group.kind is not GroupKind.STATE
    ]
    return min(firsts, default=0)


def counted_from(
    ours: Sequence[KVLayout], theirs: Sequence[KVLayout], start: int, num_tokens: int
) -> tuple[int, ...]:
    """Per group, the first token of a hand-over that digests cover.

    Of a window or chunk only the last tokens are needed. Both sides hold them, but with different
    block sizes the first block of one side may begin before that of the other: digests cover the
    tokens from the later of the two on. Of a state only the last token is covered.

    Args:
        ours: Layouts of the groups on one side.
        theirs: Layouts of the groups on the other side.
        start: First token of the reservation.
        num_tokens: Prompt length.
    """
    firsts = []
    for mine, other in zip(ours, theirs, strict=True):
        needed = mine.kind.first_attended(num_tokens, mine.window)
        sizes = mine.block_size, other.block_size
        firsts.append(max(start, *(needed - needed % size for size in sizes)))
    return tuple(firsts)


def check_reserve(reserve: Reserve, groups: Sequence[KVLayout]) -> str | None:
    """Check D's reservation against D's own layouts."""
    if len(reserve.spans) != len(groups):
        return f"spans of {len(reserve.spans)} groups, expected {len(groups)}"
    if reserve.num_tokens < 1 or reserve.remaining_ms < 1:
        return "num_tokens and remaining_ms must be positive"
    if not any(span.blocks for spans in reserve.spans for span in spans):
        return "no block is named"
    for number, (spans, group) in enumerate(zip(reserve.spans, groups, strict=True)):
        problem = _check_spans(spans, group, reserve)
        if problem is not None:
            return f"group {number}: {problem}"
    return _check_keys(reserve, groups) if reserve.keys else None


def _check_keys(reserve: Reserve, groups: Sequence[KVLayout]) -> str | None:
    sizes = {group.block_size for group in groups if group.kind is not GroupKind.STATE}
    if len(sizes) != 1:
        return f"keys name blocks of one size; sizes are {sorted(sizes)}"
    (size,) = sizes
    start = first_token(reserve.spans, groups)
    wanted, rest = divmod(reserve.num_tokens - start, size)
    if rest or len(reserve.keys) != KEY_BYTES * wanted:
        return f"{len(reserve.keys)} bytes of keys for {wanted} blocks and {rest} tokens"
    if reserve.keys[-KEY_BYTES:] != reserve.prompt_key:
        return "the last key is not that of all tokens"
    return None


def _check_spans(spans: Sequence[BlockSpan], group: KVLayout, reserve: Reserve) -> str | None:
    blocks = [block for span in spans for block in span.blocks]
    if any(not 0 < block < group.num_blocks for block in blocks):
        return f"block ids must lie in [1, {group.num_blocks})"
    if len(set(blocks)) != len(blocks):
        return "a block is named twice"
    full, end = group.kind is GroupKind.FULL, spans[0].first if spans else 0
    for span in spans:
        if not span.blocks or span.first < end:
            return "spans must be in order, without overlap, and not empty"
        if full and span.first > end:
            return "blocks are missing between two spans"
        end = span.first + len(span.blocks)
    needed = -(-reserve.num_tokens // group.block_size)
    if group.kind is not GroupKind.STATE and end > needed:
        return f"blocks up to {end} are named, {needed} hold the prompt"
    if full and end < needed:
        return "the prompt's last blocks are missing"
    return None


def is_repetition(old: Reserve, new: Reserve) -> bool:
    """Whether a later `Reserve` equals an earlier one, as it must: it is frozen once sent."""
    return new == msgspec.structs.replace(old, seq=new.seq, remaining_ms=new.remaining_ms)


def check_ack(ack: Ack, num_tokens: int) -> str | None:
    """Check D's verdict on a transfer."""
    if ack.verdict not in ("ok", "mismatch"):
        return f"verdict {ack.verdict!r} is neither 'ok' nor 'mismatch'"
    if len(ack.bad) > MAX_BAD_RANGES:
        return f"more than {MAX_BAD_RANGES} bad ranges"
    if any(not start < end <= num_tokens for start, end in ack.bad):
        return f"bad ranges must lie in [0, {num_tokens})"
    return None


def check_landed(landed: Landed, start: int, num_tokens: int, num_groups: int) -> str | None:
    """Check a notice against the reservation [start, num_tokens)."""
    if landed.write >= num_tokens - start:
        return f"write {landed.write} of a prompt with {num_tokens - start} tokens to push"
    if not start <= landed.start < landed.end <= num_tokens:
        return f"range [{landed.start}, {landed.end}) is not in [{start}, {num_tokens})"
    if (landed.write == 0) != (landed.start == start):
        return f"write {landed.write} begins at {landed.start}"
    if any(run.group >= num_groups or run.first_unit > num_tokens for run in landed.digests):
        return "a digest of a group or unit that does not exist"
    return None


def check_complete(
    complete: Complete, start: int, num_tokens: int, held_unit: int = 0
) -> str | None:
    """Check a `Complete` against the reservation [start, num_tokens).

    Args:
        complete: The message.
        start: First reserved token.
        num_tokens: One past the last reserved token.
        held_unit: For a transfer by block keys, P may hold fewer tokens than reserved, by a
            multiple of `held_unit`; 0 for the hand-over of a prompt.
    """
    told = complete.num_tokens
    if told != num_tokens and not (
        held_unit and start < told < num_tokens and not (num_tokens - told) % held_unit
    ):
        return f"num_tokens is {told}, {num_tokens} were reserved from {start} on"
    if not 1 <= complete.num_writes <= told - start:
        return f"{complete.num_writes} writes for {told - start} tokens"
    least, most = (0, 0) if held_unit else (1, MAX_CHOICES)
    if not least <= len(complete.choices) <= most:
        return f"{len(complete.choices)} choices"
    return None
