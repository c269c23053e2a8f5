"""The longest prompts that an engine computes, and takes from other nodes: what a router is told.

They follow from the scheduler's rules for an idle engine, so that no prompt is computed elsewhere
for an engine that never has the room to load it (`LoadingRequests._has_room_to_load`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from kvbaton.engine.scheduler import Scheduler
from kvbaton.types import PINNED_SHARE_PER_PEER, PromptLimits


def prompt_limits(scheduler: Scheduler, most_blocks: int | None = None) -> PromptLimits:
    """The limits of a target of hand-overs.

    Args:
        scheduler: of the engine.
        most_blocks: that may wait for one source; None for any number.
    """
    blocks, config = scheduler.blocks, scheduler.config
    lengths = range(1, config.max_model_len)
    computed = bisect_left(lengths, True, key=lambda n: blocks.too_large(n) is not None)
    received, lengths = computed, lengths[:computed]

    def within(most: int) -> int:
        return bisect_right(lengths, most, key=lambda n: blocks.need(blocks.empty(), n, start=n))

    lent = within(config.groups[0].num_blocks // PINNED_SHARE_PER_PEER)
    if most_blocks is not None:
        received = within(most_blocks)
    if not scheduler.both_sides:
        return PromptLimits(computed, received, config.max_num_seqs, lent=lent)

    def held(num_tokens: int) -> int:
        return blocks.need(blocks.empty(), num_tokens + 1)

    # Some blocks and half of the seats are left to prompts for others; each choice takes a block
    # of every group: of a prompt that is shorter by one, only groups that keep all give one back.
    most, groups = int(scheduler.load_share * blocks.pool.usable), len(blocks.groups)
    received = min(received, bisect_right(lengths, most, key=held))
    choices, keeping = config.max_num_seqs // 2, sum(group.keeps_all for group in blocks.groups)
    if keeping:
        each = -(-groups // keeping) * blocks.alignment
        return PromptLimits(computed, received, choices, each, lent)
    spare = most - held(received) if received else 0
    return PromptLimits(computed, received, min(choices, 1 + spare // groups), lent=lent)
