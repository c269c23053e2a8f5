"""What a choice of nodes is expected to take, in seconds; `router.costs` says how it is found."""

from __future__ import annotations

from msgspec import Struct

from kvbaton.messages.nodes import NodeInfo


class Prefill(Struct, frozen=True):
    """What is expected of computing a prompt on one node.

    Attributes:
        ttft_s: until the first token, all that waits before it included.
        model_s: of that, what the node's own figures give.
        wait_s: of `model_s`, for what is there already.
        work_s: that the prompt itself takes.
        decoding: sequences that wait meanwhile, those left out whose first token was late.
        new: tokens that are computed.
        last: of those, what its last step computes.
        fetch_s: of `model_s`, for the tokens that are fetched.
        holder: who has those; None if there are none.
        held: tokens that it has.
        saved_s: what that saves against computing them, or would if they were fetched (then it is
            negative); None if nobody has them.
        risk_s: `ttft_s` if nobody stepped back for anybody: beyond the objective one of the queue
            is late, this one or a longer one.
        late: it is this one.
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


class Decode(Struct, frozen=True):
    """What is expected of generating on one node.

    Attributes:
        itl_s: between two tokens on average, prompts that are computed there meanwhile included.
        step_s: of a step that decodes only.
        others_s: between two tokens of the sequences that are there, without this one.
        queued_s: that prompts take which are there already.
        backlog_s: what is left of that when this one is generated.
        prefill_share: of the node's time that prompts take, of late.
        full_s: what a prompt adds to a step that is full of it.
        prompt_s: what prompts add to a step that has some, as those of late did.
        slower_s: what each step takes longer for one more sequence.
        sequences: that generate at a time, of those that are there already and not late.
        room: the node has blocks for it.
    """

    itl_s: float
    step_s: float
    others_s: float
    queued_s: float
    backlog_s: float
    prefill_share: float
    full_s: float
    prompt_s: float
    slower_s: float
    sequences: float
    room: bool


class Prediction(Struct, frozen=True):
    """What is expected of a route.

    Attributes:
        ttft_s: until the first token.
        itl_s: between tokens.
        step_s: of a step without prompts.
        delay_s: what others wait longer for it, all of them together.
        model_s: the part of `ttft_s` that the nodes' own figures give.
        wait_s: the part of `model_s` that is for what is there already.
        work_s: that computing the prompt takes.
        fetch_s: the part of `model_s` that is for a prefix on its way.
        wire_s: from the first token until the rest of a prompt that is handed over has come.
        full: of the queue with it one is late.
        late: it is this one.
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
