"""Predicted times of prefill, decode and whole routes, in seconds; `router.costs` computes them."""

from __future__ import annotations

from msgspec import Struct

from kvbaton.messages.nodes import NodeInfo


class Prefill(Struct, frozen=True):
    """Prediction for computing a prompt on one node.

    Attributes:
        ttft_s: Seconds until the first token, queueing included.
        model_s: Part of `ttft_s` that follows from the node's step costs.
        wait_s: Part of `model_s` for work that is queued there already.
        work_s: Seconds of prefill that the prompt takes.
        decoding: Sequences that decode there meanwhile, less those whose first token was late.
        new: Number of tokens that are computed.
        last: Number of these that the last step computes.
        fetch_s: Part of `model_s` for fetching a cached prefix.
        holder: Node that the prefix is fetched from; None if none is fetched.
        held: Number of tokens of the prefix that `holder` has.
        saved_s: Seconds that fetching would save over computing, if positive; None if no other node
            has a prefix.
        risk_s: `ttft_s` if no prompt were deferred. Beyond the TTFT objective, one prompt of the
            queue will be late: this one or a longer one.
        late: Whether it is this one.
        late_share: `work_s` as a share of the work of the one that would be late. The rest is time
            for further prompts.
    """

    ttft_s: float
    model_s: float
    wait_s: float
    work_s: float
    decoding: float
    new: int
    last: int
    fetch_s: float = 0.0
    holder: NodeInfo | None = None
    held: int = 0
    saved_s: float | None = None
    risk_s: float = 0.0
    late: bool = False
    late_share: float = 1.0


class Decode(Struct, frozen=True):
    """Prediction for decoding one more sequence on one node.

    Attributes:
        itl_s: Mean seconds between two of its tokens, stalls by prefill included.
        step_s: Seconds of a step without prefill.
        others_s: The same without the new sequence.
        queued_s: Seconds of prefill that is queued there now.
        slower_s: Seconds that one more sequence adds to each step.
        sequences: Sequences there that decode at a time, less those whose first token was late.
        room: Whether the node has KV blocks for the sequence.
    """

    itl_s: float
    step_s: float
    others_s: float
    queued_s: float
    slower_s: float
    sequences: float
    room: bool


class Prediction(Struct, frozen=True):
    """Prediction for a route.

    Attributes:
        ttft_s: Seconds until the first token.
        itl_s: Mean seconds between two tokens.
        step_s: Seconds of a step without prefill.
        delay_s: Seconds that other requests wait longer, summed over them.
        model_s: Part of `ttft_s` that follows from the nodes' step costs.
        wait_s: Part of `model_s` for work that is queued already.
        work_s: Seconds of prefill that the prompt takes.
        fetch_s: Part of `model_s` for fetching a cached prefix.
        wire_s: Seconds from the first token until the rest of a handed-over prompt has come.
        full: Whether some prompt of the queue will miss the TTFT objective.
        late: Whether it is this one.
    """

    ttft_s: float
    itl_s: float
    step_s: float
    delay_s: float
    model_s: float
    wait_s: float
    work_s: float
    fetch_s: float = 0.0
    wire_s: float = 0.0
    full: bool = False
    late: bool = False
