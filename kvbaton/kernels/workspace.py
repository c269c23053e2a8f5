"""Scratch memory for kernels whose programs meet: each leaves a part, the last to come adds up.

Deterministic: the last program adds all parts in their order, whoever it is. Source of the
pattern: Osama et al., "Stream-K", arXiv 2301.03598, section 4.
"""

from __future__ import annotations

import torch

from kvbaton.kernels.jit import jit, tl


class Workspace:
    """Counters, zero between launches, and fp32 scratch; for launches on one stream at a time.

    Attributes:
        counters: [n], int32.
        scratch: [m], fp32; its content is never needed by the next launch.
    """

    def __init__(
        self, device: torch.device, *, num_counters: int = 1 << 14, num_scratch: int = 1 << 22
    ) -> None:
        self.counters = torch.zeros(num_counters, dtype=torch.int32, device=device)
        self.scratch = torch.empty(num_scratch, dtype=torch.float32, device=device)


@jit()
def is_last(counter: tl.tensor, parties: tl.tensor) -> tl.tensor:
    """Count this program in, its stores before this call included; whether it is the last.

    The last one resets the counter and sees what the others stored. Read that with
    ``cache_modifier=".cg"``, past the multiprocessor's own cache.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == parties - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last
