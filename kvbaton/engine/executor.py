"""What the engine core asks of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvbaton.connectors.base import Memory
from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.objects import ObjectForm
from kvbaton.engine.staging import Staging
from kvbaton.engine.step import PendingStep, PendingSums, StepPlan
from kvbaton.messages.engine import AddRequest

if TYPE_CHECKING:
    from kvbaton.engine.encoder.pool import EncoderPool


class Executor(Protocol):
    """All ranks of one node, as one. Implementations differ in where the ranks live."""

    @property
    def layouts(self) -> Sequence[Sequence[KVLayout]]:
        """Per rank, one layout per group; `Plane.region` indexes the rank's `memories`."""
        ...

    @property
    def memories(self) -> Sequence[Sequence[Memory]]:
        """Per rank, the memory of its pools."""
        ...

    @property
    def wake_fd(self) -> int | None:
        """Readable while a step is over whose result was not taken; None if steps are waited for.

        With a descriptor, steps may be long: who launches them asks `ready`, and does not wait.
        """
        ...

    def attach_encoder(self, pool: EncoderPool) -> None:
        """Name the pool that `SequenceStep.items` are about; before any request.

        What a step reads of it must be there, on the device too, when the step is launched.
        """
        ...

    def expect(self, request: AddRequest) -> None:
        """A request with items has come that lacks some blocks: begin what needs no step."""
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step. At most two are in flight."""
        ...

    def sums(self, group: int, blocks: Sequence[int]) -> PendingSums:
        """Digest sums kept with these blocks since the steps that wrote them."""
        ...

    def digest(
        self, group: int, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> PendingSums:
        """Digest sums recomputed from the bytes in memory now.

        May be called from another thread than `launch`.

        Args:
            group: KV group.
            blocks: consecutive logical blocks of one sequence.
            first_position: absolute position of the first token of ``blocks[0]``.
            start: first absolute position to count.
            end: past the last absolute position to count.
        """
        ...

    def adopt(self, group: int, blocks: Sequence[int], sums: PendingSums) -> None:
        """Keep sums of blocks that arrived verified, as if a step had written them."""
        ...

    def staging(self, forms: Sequence[ObjectForm]) -> Staging:
        """Bytes of blocks in host memory, for a store; `forms` are one per group."""
        ...

    def poison(self, group: int, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN (debugging); done when it returns."""
        ...

    def counters(self) -> dict[str, float]:
        """Monotonic totals by Prometheus name."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
