"""One client's request across nodes and attempts: a state machine without I/O.

An *attempt* is served by one node alone (its *target*), or by a target and a *source* that prefills
for it. Items of the prompt may have an *encoder* each. Laws:

1. The first token relayed for (choice, index) is committed. Every later token for the same place
   is compared: an equal one is dropped, a different one closes the attempt.
2. Outputs from the nodes of a closed attempt are dropped.
3. The target decides the end of a choice. The source decides it only if it reported that a token
   of its own ends every choice, and the target then sends nothing for `finish_grace_s`, or fails.
4. A failed source is the target's business: its node notices the failed hand-over and recomputes.
   A target that fails, falls silent or contradicts committed tokens ends the attempt; the next
   one, on other nodes, continues from the committed tokens.
5. A failed encoder ends no request, unless the item is to blame: until the prompt is computed, a
   new attempt starts without that node. After the last attempt it is left to the prefill node,
   which encodes the item itself when its timers tell it to.
6. The request ends exactly once: by `Finished` or a `RequestError`. After that there are no
   actions.
7. A request moves to another node (its *successor*) while its target goes on: the successor is
   asked to continue from the tokens known now, fetches their KV from the target and sends its first
   token. If that is the newest one, or beyond, the successor becomes the target. If the target has
   sent more meanwhile, it is stopped, and the successor is asked once more, to continue from all
   committed tokens, of which it has nearly all KV by then. A successor that fails, is late or
   contradicts committed tokens changes nothing while the target is there.
8. Tokens wait for log probabilities of the prompt, which come with the first one, from the source
   if there is one. The end of a timed request waits, `MARKS_S` at most, for the source whose KV
   the target got and for encoders of items that no cache had: their times may come later than the
   target's last token.

Each event returns a list of actions; the clock is an argument, in seconds. Every token passes here,
so the common case (the target's next token) is short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from kvbaton.errors import RequestError
from kvbaton.messages.engine import ERROR_STATUSES, AddRequest, Item, Output
from kvbaton.router.config import RelayTimers
from kvbaton.router.node_request import NodeError, NodeRequest, Side, node_requests
from kvbaton.router.route import Route, no_node_ready
from kvbaton.types import TokenLogprobs


class AskNode(Struct, frozen=True):
    """Send a request to a node, and report its outputs."""

    asked: NodeRequest


class CheckNode(Struct, frozen=True):
    """Report a failure if the node's engine hangs; nothing has come of a request for long."""

    asked: NodeRequest


class CancelNode(Struct, frozen=True):
    """End a request to a node at once: its outputs are of no use any more."""

    asked: NodeRequest


class Finished(Struct, frozen=True):
    """All choices are complete. Requests that are still open at nodes end by themselves."""


@dataclass(frozen=True)
class MoveEnded:
    """A move to another node has ended.

    Attributes:
        gap_s: Seconds between the last token of the old node and the first of the new one; None if
            the move failed.
    """

    gap_s: float | None


Action = AskNode | CheckNode | CancelNode | MoveEnded | Output | Finished | RequestError
"""An `Output` is for the client; a `RequestError` means that the request failed."""

FINISHED = Finished()
MARKS_S = 0.5
"""Seconds that the end of a timed request waits for marks of nodes besides the target."""

ChooseRoute = Callable[[int, Sequence[Item], frozenset[str]], Route | None]
"""(tokens to prefill, items, node ids to avoid) -> route of an attempt, or None."""


@dataclass(slots=True)
class _Choice:
    """The state of one choice.

    Attributes:
        tokens: Committed tokens.
        announced: (finish reason, stop reason) that the source gave with a token, if it did.
        held: The source's last token if it is a stop token. The detokenizer has to know that when
            it gets the token, so it is held back until the end is certain.
        finished: Whether the client has been told the end.
    """

    tokens: list[int] = field(default_factory=list)
    announced: tuple[str, int | str | None] | None = None
    held: Output | None = None
    finished: bool = False


def _uncommitted(choice: _Choice, output: Output) -> tuple[int, ...] | None:
    """Tokens of an output beyond the committed ones; None if it contradicts these."""
    known = choice.tokens[output.index :]
    if any(a != b for a, b in zip(known, output.token_ids, strict=False)):
        return None
    return output.token_ids[len(known) :]


class RequestRelay:
    """Relays one request. Feed it events, and carry out its actions in order.

    Args:
        request: The client's request; its seed is set.
        route: Chooses nodes.
        transfer_id: 16 random bytes, the same for all attempts.
        item_ids: The same for each item of the prompt.
        timers: Limits.
        now: Seconds on a monotonic clock.
        may_retry: Asked before an attempt after a failed one, unless a node was lost.

    Attributes:
        attempt: Number of the current attempt.
        done: Whether the request has ended.
        from_source: Number of a choice's first tokens that came from the source.
        story: What happened, one line per notable event.
    """

    __slots__ = (
        "_avoid", "_base", "_cached", "_choices", "_confirm_by", "_excused", "_expires_at",
        "_first_index", "_heard_at", "_item_ids", "_marks_by", "_may_retry", "_move_by",
        "_moving_to", "_open", "_owes_prompt_logprobs", "_prefilled", "_prompt_logprobs", "_route",
        "_target_spoke", "_timers", "_transfer_id", "_transferred", "_waiting", "attempt", "done",
        "from_source", "request", "story",
    )  # fmt: skip

    def __init__(
        self,
        request: AddRequest,
        route: ChooseRoute,
        *,
        transfer_id: bytes,
        item_ids: Sequence[bytes] = (),
        timers: RelayTimers,
        now: float,
        may_retry: Callable[[], bool] = lambda: True,
    ) -> None:
        assert request.params.seed is not None, "two nodes without a seed sample different tokens"
        self.request = request
        self.attempt = -1
        self.done = False
        self.from_source = 0
        self.story: list[str] = []
        self._route = route
        self._transfer_id = transfer_id
        self._item_ids = item_ids
        self._timers = timers
        self._may_retry = may_retry
        self._expires_at = now + request.deadline_s
        self._heard_at = now
        self._confirm_by: float | None = None
        self._excused = 0  # attempts begun by moves, or after nodes that were told to stop
        self._move_by = self._marks_by = math.inf
        self._moving_to: Route | None = None
        self._first_index = len(request.resume_ids)
        self._choices = [_Choice(list(request.resume_ids)) for _ in range(request.params.n)]
        self._base = self._first_index
        self._open: list[NodeRequest] = []
        self._avoid: frozenset[str] = frozenset()
        self._owes_prompt_logprobs = request.params.prompt_logprobs is not None
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._waiting: list[tuple[NodeRequest, Output]] = []
        self._target_spoke = self._prefilled = False
        self._cached = self._transferred = 0

    @property
    def num_generated(self) -> int:
        """Number of tokens of the longest choice."""
        return max(len(choice.tokens) for choice in self._choices) - self._first_index

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all choices."""
        return sum(len(choice.tokens) - self._first_index for choice in self._choices)

    @property
    def target(self) -> NodeRequest | None:
        """Request to the node that decodes now; None between two targets and at the end."""
        return self._asked("target")

    @property
    def is_moving(self) -> bool:
        """Whether a successor of the target has yet to take over."""
        return self._asked("successor") is not None

    def _asked(self, side: Side) -> NodeRequest | None:
        return next((asked for asked in self._open if asked.side == side), None)

    @property
    def known_tokens(self) -> int:
        """Number of tokens of the prompt and of the first choice."""
        return len(self.request.token_ids) + len(self._choices[0].tokens)

    def can_move(self) -> bool:
        """Whether only the target works, and decodes; several choices can't be resumed."""
        if len(self._choices) != 1 or len(self._open) != 1 or not self._target_spoke:
            return False
        left = self.request.params.max_tokens - len(self._choices[0].tokens)
        return not (self._waiting or self._owes_prompt_logprobs) and left > 1

    # --- events ---

    def move(self, route: Route, now: float) -> list[Action]:
        """Start a move to another node, which is to replace the target. Ask `can_move` first.

        Args:
            route: The successor, with the target's node as holder of the KV to fetch.
            now: Seconds on the clock.
        """
        self._moving_to, self._move_by = route, now + self._timers.move_s
        return [self._ask_successor(route, now)]

    def start(self, now: float) -> list[Action]:
        """Begin the first attempt."""
        return self._begin(now) or self.fail(no_node_ready())

    def output(self, asked: NodeRequest, output: Output, now: float) -> list[Action]:
        """Handle an output of a node."""
        if not asked.open:
            return []
        if output.choice >= len(self._choices):
            return self.failed(asked, NodeError(f"it sent choice {output.choice}"), now)
        reason = output.finish_reason
        if reason == "abort" and asked.side != "target":
            return self.ended(asked, now)  # the receiver has all it needs and cancelled it
        if reason in ("error", "abort"):
            why = output.error or f"the node ended the request ({reason})"
            status = ERROR_STATUSES.get(output.error_code or "")
            told = NodeError(why, status, code=output.error_code, final=status == 400)
            return self.failed(asked, told, now)
        if asked.side == "successor":
            return self._from_successor(asked, output, now)
        self._heard_at = now
        if asked.side == "encoder":
            return self.ended(asked, now) if reason is not None else []
        # Later attempts do not count: they find in caches what the first one left there.
        if output.cached_tokens > self._cached and self._base == self._first_index:
            self._cached = output.cached_tokens
        if output.transferred_tokens > self._transferred:
            self._transferred = output.transferred_tokens
        if output.token_ids:
            self._prefilled = True
        if asked.side == "source":
            return self._from_source(output, now) + self._release(now)
        self._target_spoke = True
        if (reason is not None or self._owes_prompt_logprobs) and self._waits(output, now):
            self._waiting.append((asked, output))
            return []
        return self._from_target(asked, output, now)

    def failed(self, asked: NodeRequest, error: NodeError, now: float) -> list[Action]:
        """Handle a failed request to a node: broken off, refused, or the node is lost."""
        if not asked.open:
            return []
        self._close(asked)
        node_id = asked.node.node_id
        self.story.append(f"attempt {asked.attempt}: {asked.name} {node_id}: {error.message}")
        if asked.side == "encoder" and not error.final:
            return [CancelNode(asked), *self._without_encoder(asked, now)]
        if asked.side == "successor" and self.target is not None:
            self._move_by = math.inf
            return [CancelNode(asked), MoveEnded(None)]
        moved = [MoveEnded(None)] if asked.side == "successor" or self.is_moving else []
        relayed = any(len(c.tokens) > self._first_index or c.finished for c in self._choices)
        if error.final or (error.blames_client and not relayed):
            refusal = RequestError(
                error.message, param=error.param, status=error.status or 400, code=error.code
            )
            return [CancelNode(asked), *self.fail(refusal)]  # other choices may go on there
        owes_scores = self._waiting and self._owes_prompt_logprobs
        if asked.side == "source" and self._target_spoke and not owes_scores:
            return [CancelNode(asked), *self._release(now)]
        # A target notices only after seconds, by a timer, that its source is gone. A new attempt is
        # faster; without another prefill node it is served by the target alone.
        if error.leaving:
            self._excused += 1
        else:
            self._avoid |= {node_id}
        told = error.status in (429, 503) or error.code in ERROR_STATUSES
        failure = RequestError(
            f"node {node_id} failed: {error.summary}",
            status=error.status if told and error.status else 502,
            code=error.code if told else "node_failed",
        )
        return [CancelNode(asked), *moved, *self._retry(failure, now, lost=error.lost)]

    def ended(self, asked: NodeRequest, now: float) -> list[Action]:
        """Handle the regular end of a node's outputs."""
        if not asked.open:
            return []
        if asked.side in ("source", "encoder"):
            self._close(asked)
            return self._release(now)
        if any(output.finish_reason is not None for _, output in self._waiting):
            return []
        return self.failed(asked, NodeError("its stream ended before the request did"), now)

    def client_gone(self) -> list[Action]:
        """Handle the client's disconnect."""
        return [] if self.done else self._end()

    def tick(self, now: float) -> list[Action]:
        """Handle the passing of time."""
        if self.done:
            return []
        if now >= self._expires_at:
            return self.fail(self._expired())
        if now >= self._marks_by:
            silent = [other for other in self._open if other.side != "target"]
            for other in silent:
                self._close(other)
            return [*map(CancelNode, silent), *self._release(now)]
        if self._confirm_by is not None and now >= self._confirm_by:
            return self._finish_as_announced()
        if now >= self._heard_at + self._timers.idle_s:
            if not self._target_spoke:
                self._heard_at = now
                return list(map(CheckNode, self._open))
            served = self.target or self._asked("successor")
            assert served is not None, "a node decodes until the end"
            return self.failed(served, NodeError("it has been silent too long"), now)
        if now >= self._move_by:
            late = self._asked("successor")
            assert late is not None, "the limit is that of a successor"
            return self.failed(late, NodeError("it was not ready to take over in time"), now)
        return []

    def next_deadline(self) -> float:
        """Latest time to call `tick`; each output of a node moves it on."""
        limits = self._expires_at, self._heard_at + self._timers.idle_s
        when = min(*limits, self._move_by, self._marks_by)
        return when if self._confirm_by is None else min(when, self._confirm_by)

    # --- tokens ---

    def _from_source(self, output: Output, now: float) -> list[Action]:
        choice = self._choices[output.choice]
        actions: list[Action] = []
        if output.prompt_logprobs is not None:  # kept, since this output may be held back
            self._prompt_logprobs = output.prompt_logprobs
        count, end = len(choice.tokens), output.index + len(output.token_ids)
        if not output.token_ids or output.index > count:
            return actions
        new, reason = _uncommitted(choice, output), output.finish_reason
        if new is None:
            return actions  # the target's tokens were first, and its next ones follow from them
        if new and reason == "stop":
            choice.held, new = output, new[:-1]
        if new:
            actions = [self._commit(output, new, None, None)]
            self.from_source = count + len(new) - self._base
        # A source stops after a token or two anyway: "length" means nothing if more are wanted.
        last = end >= self.request.params.max_tokens
        if reason is not None and (reason != "length" or last):
            choice.announced = (reason, output.stop_reason)
        if self._confirm_by is None and all(c.finished or c.announced for c in self._choices):
            self._confirm_by = now + self._timers.finish_grace_s
        return actions

    def _from_target(self, asked: NodeRequest, output: Output, now: float) -> list[Action]:
        choice = self._choices[output.choice]
        if choice.finished:
            return []
        reason, count = output.finish_reason, len(choice.tokens)
        if output.index > count:
            missing = f"it skipped tokens {count} to {output.index - 1}"
            return self.failed(asked, NodeError(missing), now)
        new = output.token_ids if output.index == count else _uncommitted(choice, output)
        if new is None:
            return self._contradicted(asked, output, now)
        if not new and reason is None:
            return []
        relayed = self._commit(output, new, reason, output.stop_reason)
        if reason is not None and all(choice.finished for choice in self._choices):
            self.done = True
            others = [other for other in self._open if other.side != "target"]
            self._cancel_open()
            return [relayed, *map(CancelNode, others), FINISHED]
        return [relayed]

    def _from_successor(self, asked: NodeRequest, output: Output, now: float) -> list[Action]:
        if not output.token_ids:
            return []
        committed = self._choices[0].tokens
        end = output.index + len(output.token_ids)
        known = committed[output.index : end]
        if output.index > len(committed) or tuple(known) != output.token_ids[: len(known)]:
            differs = NodeError(f"it goes on otherwise than is committed from {output.index} on")
            return self.failed(asked, differs, now)
        if end < len(committed):  # the target was faster: stop it, and continue from all its tokens
            before, self._open = self._open, []
            self._move_by = now + self._timers.move_s
            assert self._moving_to is not None, "a successor was chosen by `move`"
            again = self._ask_successor(self._moving_to, now, fetched=end)
            return [again, *self._cancel(before)]
        others = [other for other in self._open if other is not asked]
        for other in others:
            self._close(other)
        gap_s, self._heard_at, self._move_by = now - self._heard_at, now, math.inf
        asked.side, self._base = "target", len(asked.request.resume_ids)
        ended = MoveEnded(gap_s)
        return [*map(CancelNode, others), ended, *self._from_target(asked, output, now)]

    def _contradicted(self, asked: NodeRequest, output: Output, now: float) -> list[Action]:
        self.story.append(
            f"attempt {asked.attempt}: {asked.node.node_id} contradicts committed tokens of choice "
            f"{output.choice} from index {output.index}"
        )
        error = RequestError(
            "Two nodes generated different tokens for this request.",
            status=502,
            code="tokens_differ",
        )
        if len(self._choices) > 1:  # a forced prefix exists for a single choice only
            return self.fail(error)
        return self._retry(error, now)

    def _commit(
        self,
        output: Output,
        new: tuple[int, ...],
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> Output:
        choice = self._choices[output.choice]
        index = len(choice.tokens)
        choice.tokens.extend(new)
        if finish_reason is not None:
            choice.finished = True
        logprobs, told = output.logprobs, None
        if logprobs is not None:
            logprobs = logprobs[index - output.index :][: len(new)]
        scores = output.prompt_logprobs or self._prompt_logprobs
        if self._owes_prompt_logprobs and scores is not None:
            self._owes_prompt_logprobs, told = False, scores
        return Output(
            request_id=self.request.request_id,
            choice=output.choice,
            index=index,
            token_ids=new,
            logprobs=logprobs,
            prompt_logprobs=told,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            cached_tokens=self._cached,
            transferred_tokens=self._transferred,
        )

    def _waits(self, output: Output, now: float) -> bool:
        """Whether an output of the target has to wait for other nodes' outputs."""
        if self._owes_prompt_logprobs and not (output.prompt_logprobs or self._prompt_logprobs):
            if self._asked("source") is not None:  # only the source has them, and they come first
                return True
        if output.finish_reason is None or not self.request.timed:
            return False
        if any(self._owes_marks(other, output) for other in self._open):
            self._marks_by = now + MARKS_S
            return True
        return False

    def _owes_marks(self, asked: NodeRequest, output: Output) -> bool:
        """Whether a node has yet to report times of work that the target's output builds on."""
        if asked.side != "encoder":
            return asked.side == "source" and output.transferred_tokens > 0
        item = self.request.items[asked.item]
        return item.start + item.length > self._cached

    def _release(self, now: float) -> list[Action]:
        """Handle the target's outputs that waited for other nodes'."""
        waiting, self._waiting, self._marks_by = self._waiting, [], math.inf
        return [action for asked, output in waiting for action in self.output(asked, output, now)]

    # --- attempts ---

    def _retry(self, error: RequestError, now: float, *, lost: bool = False) -> list[Action]:
        closing = self._cancel_open()
        limit = self.request.params.max_tokens
        if all(c.finished or c.announced or len(c.tokens) >= limit for c in self._choices):
            return closing + self._finish_as_announced()
        if now >= self._expires_at:
            return closing + self.fail(self._expired())
        if self.attempt - self._excused >= self._timers.max_retries:
            return closing + self.fail(error)
        if not lost and not self._may_retry():
            self.story.append("no attempt more: too many requests are tried again (--retry-budget)")
            return closing + self.fail(error)
        return closing + (self._begin(now) or self.fail(error))

    def _without_encoder(self, asked: NodeRequest, now: float) -> list[Action]:
        """Handle a failed encoder, whose output the prefill node waits for."""
        self._avoid |= {asked.node.node_id}
        if self._prefilled or self.attempt - self._excused >= self._timers.max_retries:
            return self._release(now)
        # The prefill node notices only after seconds, by a timer. A new attempt is faster: it finds
        # in caches what the first one has computed, encoded and received.
        before = self._open
        begun = self._begin(now)
        return [*self._cancel(before), *begun] if begun else []

    def _begin(self, now: float) -> list[Action]:
        """Ask nodes for an attempt; no actions if there are none to ask."""
        # Several choices can't each resume from their tokens: they are generated again, compared
        # with committed tokens, and continue from there.
        single = len(self._choices) == 1
        resume_ids = tuple(self._choices[0].tokens) if single else self.request.resume_ids
        num_tokens = len(self.request.token_ids) + len(resume_ids)
        route = self._route(num_tokens, self.request.items, self._avoid)
        if route is None:
            return []
        self.attempt += 1
        self._base, self._heard_at, self._confirm_by = len(resume_ids), now, None
        self._move_by = self._marks_by = math.inf
        self._target_spoke = self._prefilled = False
        self._waiting.clear()
        self._open = self._node_requests(route, resume_ids, now)
        return list(map(AskNode, self._open))

    def _ask_successor(self, route: Route, now: float, fetched: int = 0) -> AskNode:
        """Ask for what follows all committed tokens; it has the KV of `fetched` of them."""
        self.attempt += 1
        self._excused += 1
        if fetched:
            cached = len(self.request.token_ids) + fetched
            route = replace(route, cached=cached, holder=None, held=0, predicted=None)
        (asked,) = self._node_requests(route, tuple(self._choices[0].tokens), now)
        asked.side = "successor"
        self._open.append(asked)
        return AskNode(asked)

    def _node_requests(
        self, route: Route, resume_ids: tuple[int, ...], now: float
    ) -> list[NodeRequest]:
        params = self.request.params
        if params.prompt_logprobs is not None and not self._owes_prompt_logprobs:
            params = replace(params, prompt_logprobs=None)
        left_s, objective_s = max(self._expires_at - now, 0.001), self.request.ttft_s
        if objective_s:  # less the time that has passed; none after the first token
            passed_s = self.request.deadline_s - left_s
            objective_s = 0.0 if resume_ids else max(objective_s - passed_s, 0.001)
        request = replace(
            self.request,
            # Each attempt has its own id: a node may not have cleaned up after the last one.
            request_id=f"{self.request.request_id[:200]}.{self.attempt}",
            params=params,
            resume_ids=resume_ids,
            deadline_s=left_s,
            ttft_s=objective_s,
        )
        return node_requests(
            request, route, self.attempt, transfer_id=self._transfer_id, item_ids=self._item_ids
        )

    # --- ends ---

    def _finish_as_announced(self) -> list[Action]:
        actions: list[Action] = []
        for index, choice in enumerate(self._choices):
            if not choice.finished:
                reason, stop = choice.announced or ("length", None)
                last = Output(request_id=self.request.request_id, choice=index)
                if choice.held is not None and len(choice.tokens) >= choice.held.index:
                    last = choice.held
                new = last.token_ids[len(choice.tokens) - last.index :]
                actions.append(self._commit(last, new, reason, stop))
        return [*self._end(), *actions, FINISHED]

    def fail(self, error: RequestError) -> list[Action]:
        """End the request with an error."""
        return [*self._end(), error]

    def _end(self) -> list[Action]:
        self.done = True
        return self._cancel_open()

    def _cancel_open(self) -> list[Action]:
        asked, self._open = self._open, []
        return self._cancel(asked)

    def _cancel(self, asked: list[NodeRequest]) -> list[Action]:
        for one in asked:
            one.open = False
        # Receivers first: else they hear from the sender that nothing will come, and continue
        # without it.
        return [CancelNode(one) for one in reversed(asked)]

    def _close(self, asked: NodeRequest) -> None:
        asked.open = False
        self._open.remove(asked)

    def _expired(self) -> RequestError:
        return RequestError(
            f"The request was not complete after {self.request.deadline_s:g} s.",
            status=504,
            code="timeout",
        )
