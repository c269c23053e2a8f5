"""The encoder side of a simulated prefill node: it receives outputs of items, or encodes them.

It is a target of its own beside the source that hands the prompt over, in the same process: they
stop, continue and die together. An output is a prompt to the protocol; so encoder nodes are
`Prefill` nodes, and nothing here decides anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbaton.testing.simulated_decode import Decode

if TYPE_CHECKING:
    from kvbaton.testing.simulated_node import Job
    from kvbaton.testing.simulated_world import World
    from kvbaton.types import Attempt


class EncoderCacheManager(Decode):
    """Outputs of items on a prefill node.

    Attributes:
        settled: items that were received, cached or encoded here.
    """

    def __init__(self, world: World, name: str, generation: int, **sizes: int) -> None:
        super().__init__(world, name, generation, **sizes)
        self.settled: set[Attempt] = set()

    def request(self, job: Job, address: str, tries: int = 10) -> None:
        """A prompt wants an item that an encoder node shall send."""
        if self.stopped:
            self.backlog.append(lambda: self.request(job, address, tries))
        elif not tries:
            self.over(job)  # encoded into memory of its own: there is no room for a hand-over
        else:
            super().request(job, address, tries)

    def over(self, job: Job) -> None:
        """The item is here, or nobody wants it any more."""
        self.settled.add(job.attempt)
