"""What a user decides of who serves a request; light, since commands read it, too."""

from __future__ import annotations

from dataclasses import dataclass

from kvbaton.config import flag


@dataclass(frozen=True, kw_only=True)
class RoutingPolicy:
    """Which work is given to other nodes.

    Attributes:
        min_handover_tokens: shorter prompts are served on one node.
        min_encode_rows: of items that encoder nodes get; None lets the router estimate (see
            `encoders.with_encoders`).
    """

    min_handover_tokens: int = flag(
        0, "serve shorter prompts on one node (0: hand over always)", metavar="N"
    )
    min_encode_rows: int | None = flag(
        None,
        "let encoder nodes encode images of at least so many tokens, and no others "
        "(0: all; not given: each image where that is estimated to be faster)",
        metavar="N",
    )
