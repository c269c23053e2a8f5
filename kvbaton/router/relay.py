"""One request across its legs and attempts: a state machine without I/O.

An *attempt* is served by one node alone (its *target* leg), or by a target and a *source* leg that
prefills for it. Items of the prompt may have an *encoder* leg each. Laws:

1. The first token relayed for (choice, index) is committed. Every later token for the same place
   is compared: an equal one is dropped, another one closes the attempt.
2. What a closed leg still says is dropped.
3. The target's word counts for the end of a choice. The source's counts if it said that token 0
   ends every choice and the target then says nothing for `finish_grace_s`, or fails.
4. A source that fails is the target's business: its node notices the failed hand-over and
   recomputes. A target that fails, stays silent or contradicts what is committed ends the attempt;
   the next one, on other nodes, continues from the committed tokens.
5. An encoder that fails ends no request: as long as the prompt is not computed, a new attempt goes
   on without that node. After the last attempt it is left to the node that prefills, which encodes
   the item itself when its timers tell it.
6. The request ends exactly once: by `Finish` or `Raise`. After that there are no actions.

Event in, list of actions out; the clock is an argument, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Item, Output
from kvbaton.messages.nodes import GenerateRequest
from kvbaton.router.actions import (
    Action,
    CancelLeg,
    Emit,
    Finish,
    Leg,
    LegError,
    Raise,
    StartLeg,
)
from kvbaton.router.bodies import item_body, prompt_items, transfer_params
from kvbaton.router.pairing import Route
from kvbaton.types import TokenLogprobs


@dataclass(frozen=True)
class RelayTimers:
    """Limits of one request.

    Attributes:
        idle_s: a target that says nothing for this long has failed.
        finish_grace_s: how long the target may take to confirm an end that the source announced.
        max_retries: attempts after the first.
    """

    idle_s: float = 120.0
    finish_grace_s: float = 2.0
    max_retries: int = 2


Router = Callable[[int, frozenset[str]], Route | None]
"""(tokens to prefill, node ids to avoid) -> nodes for an attempt, or None."""


@dataclass
class _Choice:
    """What the client knows of one choice.

    Attributes:
        tokens: committed.
        announced: (finish reason, stop reason) that the source gave with token 0, if it did.
        held: the source's token 0 if it stops the text: who turns tokens into text must know that
            when it gets the token, so it waits for the end to be certain.
        finished: the client was told the end.
    """

    tokens: list[int] = field(default_factory=list)
    announced: tuple[str, int | str | None] | None = None
    held: Output | None = None
    finished: bool = False


class RequestMachine:
    """Relays one request. Feed it events, carry out its actions in order.

    Args:
        request: what to generate; its seed is set.
        route: chooses nodes.
        transfer_id: 16 random bytes, the same for all attempts.
        item_ids: the same for each item of the prompt.
        timers: limits.
        now: the clock.

    Attributes:
        attempt: number of the attempt that runs.
        done: it has ended.
        story: what happened, one line per event worth telling.
    """

    def __init__(
        self,
        request: AddRequest,
        route: Router,
        *,
        transfer_id: bytes,
        item_ids: Sequence[bytes] = (),
        timers: RelayTimers,
        now: float,
    ) -> None:
        assert request.params.seed is not None, "two legs without a seed sample different tokens"
        self.request = request
        self.attempt = -1
        self.done = False
        self.story: list[str] = []
        self._route = route
        self._transfer_id = transfer_id
        self._item_ids = item_ids
        self._timers = timers
        self._expires_at = now + request.deadline_s
        self._heard_at = now
        self._confirm_by: float | None = None
        self._first_index = len(request.resume_ids)
        resumed = list(request.resume_ids)
        self._choices = [_Choice(resumed.copy()) for _ in range(request.params.n)]
        self._base = self._first_index
        self._open: dict[Leg, None] = {}
        self._avoid: frozenset[str] = frozenset()
        self._prompt_logprobs_given = False
        self._waiting: list[tuple[Leg, Output]] = []
        self._target_spoke = self._prefilled = False
        self._cached = self._transferred = 0

    # --- events ---

    def start(self, now: float) -> list[Action]:
        """Dispatch the first attempt."""
        return self._dispatch(
            RequestError(
                "No node is ready to serve this request; retry shortly.",
                status=503,
                code="no_node_ready",
            ),
            now,
        )

    def output(self, leg: Leg, output: Output, now: float) -> list[Action]:
        """A leg says something."""
        if not self._is_open(leg):
            return []
        if output.choice >= len(self._choices):
            return self.failed(leg, LegError(f"it sent choice {output.choice}"), now)
        if leg.side != "target" and output.finish_reason == "abort":
            return self.ended(leg, now)  # the receiver has all it wanted and called it off
        if output.finish_reason in ("error", "abort"):
            why = output.error or f"the node ended the request ({output.finish_reason})"
            return self.failed(leg, LegError(why), now)
        self._heard_at = now
        if leg.side == "encoder":
            return self.ended(leg, now) if output.finish_reason is not None else []
        self._account(output)
        self._prefilled = self._prefilled or bool(output.token_ids)
        if leg.side == "source":
            actions = self._from_source(output, now) or self._late_prompt_logprobs(output)
            return actions + self._release(now)
        if output.finish_reason is not None and self._owes_prompt_logprobs(output):
            self._target_spoke = True
            self._waiting.append((leg, output))
            return []
        return self._from_target(leg, output, now) or self._late_prompt_logprobs(output)

    def failed(self, leg: Leg, error: LegError, now: float) -> list[Action]:
        """A leg broke, was refused, or its node is known to be gone."""
        if not self._is_open(leg):
            return []
        del self._open[leg]
        self.story.append(f"attempt {leg.attempt}: {leg.name} {leg.node.node_id}: {error.message}")
        if leg.side == "encoder":
            return [CancelLeg(leg), *self._without_encoder(leg, now)]
        if error.blames_client and not self._has_relayed():
            refusal = RequestError(
                error.message, param=error.param, status=error.status or 400, code=error.code
            )
            return self._raise(refusal)
        if leg.side == "source" and self._target_spoke and not self._waiting:
            return [CancelLeg(leg)]
        # A target whose source is gone would find out by a timer of seconds; a new attempt is
        # faster, and with nobody else to prefill it is the target alone.
        self._avoid |= {leg.node.node_id}
        busy = error.status in (429, 503)
        return [
            CancelLeg(leg),
            *self._retry(
                RequestError(
                    f"node {leg.node.node_id} failed: {error.summary}",
                    status=error.status if busy and error.status else 502,
                    code=error.code if busy else "node_failed",
                ),
                now,
            ),
        ]

    def ended(self, leg: Leg, now: float) -> list[Action]:
        """A leg's stream ended in good order."""
        if not self._is_open(leg):
            return []
        if leg.side != "target":
            del self._open[leg]
            return self._release(now) if leg.side == "source" else []
        if self._waiting:
            return []
        return self.failed(leg, LegError("its stream ended before the request did"), now)

    def client_gone(self) -> list[Action]:
        """Nobody listens any more."""
        if self.done:
            return []
        self.done = True
        return self._cancel_open()

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        if self.done:
            return []
        if now >= self._expires_at:
            return self._raise(self._expired())
        if self._confirm_by is not None and now >= self._confirm_by:
            return self._finish_as_announced()
        if now >= self._heard_at + self._timers.idle_s:
            target = next(leg for leg in self._open if leg.side == "target")
            return self.failed(target, LegError("it has been silent too long"), now)
        return []

    def next_deadline(self) -> float:
        """When to call `tick` at the latest."""
        times = [self._expires_at, self._heard_at + self._timers.idle_s]
        return min([*times, self._confirm_by] if self._confirm_by is not None else times)

    # --- tokens ---

    def _from_source(self, output: Output, now: float) -> list[Action]:
        choice = self._choices[output.choice]
        actions: list[Action] = []
        if not output.token_ids or output.index != self._base:
            return actions
        if len(choice.tokens) == self._base and output.finish_reason == "stop":
            choice.held = output
        elif len(choice.tokens) == self._base:
            actions = self._commit(output, output.token_ids[:1], None, None)
        elif choice.tokens[self._base] != output.token_ids[0]:
            return actions  # the target was first, and it agrees with itself
        # A source stops after one token anyway: its "length" says nothing if more were wanted.
        reason, only = output.finish_reason, self._base + 1 >= self.request.params.max_tokens
        if reason is not None and (reason != "length" or only):
            choice.announced = (reason, output.stop_reason)
        if self._all_announced() and self._confirm_by is None:
            self._confirm_by = now + self._timers.finish_grace_s
        return actions

    def _from_target(self, leg: Leg, output: Output, now: float) -> list[Action]:
        self._target_spoke = True
        choice = self._choices[output.choice]
        if choice.finished:
            return []
        if output.index > len(choice.tokens):
            missing = f"it skipped tokens {len(choice.tokens)} to {output.index - 1}"
            return self.failed(leg, LegError(missing), now)
        known = tuple(choice.tokens[output.index :])
        if any(a != b for a, b in zip(known, output.token_ids, strict=False)):
            return self._contradicted(leg, output, now)
        new = output.token_ids[len(known) :]
        ends = output.finish_reason is not None
        if not new and not ends:
            return []
        actions = self._commit(output, new, output.finish_reason, output.stop_reason)
        return [*actions, *self._finish()] if self._all_finished() else actions

    def _contradicted(self, leg: Leg, output: Output, now: float) -> list[Action]:
        self.story.append(
            f"attempt {leg.attempt}: {leg.node.node_id} contradicts committed tokens of choice "
            f"{output.choice} from index {output.index}"
        )
        error = RequestError(
            "Two nodes generated different tokens for this request.",
            status=502,
            code="tokens_differ",
        )
        if len(self._choices) > 1:  # a forced prefix exists for a single choice only
            return self._raise(error)
        return self._retry(error, now)

    def _commit(
        self,
        output: Output,
        new: tuple[int, ...],
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> list[Action]:
        choice = self._choices[output.choice]
        index = len(choice.tokens)
        choice.tokens.extend(new)
        choice.finished = choice.finished or finish_reason is not None
        return [
            Emit(
                Output(
                    request_id=self.request.request_id,
                    choice=output.choice,
                    index=index,
                    token_ids=new,
                    logprobs=_logprobs_from(output, index, len(new)),
                    prompt_logprobs=self._take_prompt_logprobs(output),
                    finish_reason=finish_reason,
                    stop_reason=stop_reason,
                    cached_tokens=self._cached,
                    transferred_tokens=self._transferred,
                )
            )
        ]

    def _take_prompt_logprobs(self, output: Output) -> tuple[TokenLogprobs | None, ...] | None:
        if self._prompt_logprobs_given or output.prompt_logprobs is None:
            return None
        self._prompt_logprobs_given = True
        return output.prompt_logprobs

    def _late_prompt_logprobs(self, output: Output) -> list[Action]:
        """The target was faster than the source, who alone knows the prompt's."""
        if self.done or self._prompt_logprobs_given or output.prompt_logprobs is None:
            return []
        return self._commit(output, (), None, None)

    def _owes_prompt_logprobs(self, output: Output) -> bool:
        """Whether the source, who alone knows those of the prompt, has yet to tell them."""
        wanted = self.request.params.prompt_logprobs is not None
        told = self._prompt_logprobs_given or output.prompt_logprobs is not None
        return wanted and not told and any(leg.side == "source" for leg in self._open)

    def _release(self, now: float) -> list[Action]:
        """Ends that the target told, and that waited for the prompt's log probabilities."""
        waiting, self._waiting = self._waiting, []
        return [action for leg, output in waiting for action in self.output(leg, output, now)]

    def _account(self, output: Output) -> None:
        # Tokens that nobody had to compute. A later attempt finds what the first one left in
        # caches, so it does not count.
        if self._base == self._first_index:
            self._cached = max(self._cached, output.cached_tokens)
        self._transferred = max(self._transferred, output.transferred_tokens)

    # --- attempts ---

    def _retry(self, error: RequestError, now: float) -> list[Action]:
        closing = self._cancel_open()
        if self._ended_by_what_is_known():
            return closing + self._finish_as_announced()
        if now >= self._expires_at:
            return closing + self._raise(self._expired())
        if self.attempt >= self._timers.max_retries:
            return closing + self._raise(error)
        return closing + self._dispatch(error, now)

    def _without_encoder(self, leg: Leg, now: float) -> list[Action]:
        """The node that prefills waits for an output that will not come."""
        self._avoid |= {leg.node.node_id}
        if self._prefilled or self.attempt >= self._timers.max_retries:
            return []
        # It would find out by a timer of seconds: a new attempt is faster, and what the first one
        # has computed, encoded and received is in caches.
        route = self._find_route()
        return [] if route is None else [*self._cancel_open(), *self._begin(route, now)]

    def _dispatch(self, otherwise: RequestError, now: float) -> list[Action]:
        route = self._find_route()
        return self._raise(otherwise) if route is None else self._begin(route, now)

    def _find_route(self) -> Route | None:
        return self._route(len(self.request.token_ids) + len(self._resume_ids()), self._avoid)

    def _resume_ids(self) -> tuple[int, ...]:
        # Several choices can't be forced to a prefix each: they are generated anew, compared with
        # what is committed, and go on from there.
        single = len(self._choices) == 1
        return tuple(self._choices[0].tokens) if single else self.request.resume_ids

    def _begin(self, route: Route, now: float) -> list[Action]:
        self.attempt += 1
        self._base, self._heard_at, self._confirm_by = len(self._resume_ids()), now, None
        self._target_spoke = self._prefilled = False
        self._waiting.clear()
        legs = self._legs(route)
        self._open = dict.fromkeys(legs)
        return [StartLeg(leg, self._body(leg, route, now)) for leg in legs]

    def _legs(self, route: Route) -> list[Leg]:
        legs = [Leg(self.attempt, "target", route.target)]
        if route.source is not None:
            legs.append(Leg(self.attempt, "source", route.source))
        return legs + [
            Leg(self.attempt, "encoder", encoder, index)
            for index, encoder in enumerate(route.encoders)
            if encoder is not None
        ]

    def _body(self, leg: Leg, route: Route, now: float) -> GenerateRequest:
        deadline_s = max(self._expires_at - now, 0.001)
        if leg.side == "encoder":
            transfer_id = self._item_ids[leg.item]
            return item_body(self.request, leg.item, transfer_id, leg.attempt, deadline_s)
        params = self.request.params
        if self._prompt_logprobs_given:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return GenerateRequest(
            token_ids=self.request.token_ids,
            sampling_params=params,
            # Of its own for each attempt: the node may not yet have buried the last one.
            request_id=f"{self.request.request_id[:200]}.{self.attempt}",
            stream=True,
            resume_token_ids=self._resume_ids(),
            cache_salt=self.request.cache_salt or None,
            priority=self.request.priority,
            deadline_s=deadline_s,
            kv_transfer_params=transfer_params(leg, route, self._transfer_id),
            items=self._items(leg, route),
        )

    def _items(self, leg: Leg, route: Route) -> tuple[Item, ...]:
        if leg.side == "target" and route.source is not None:
            return self.request.items  # the prompt's KV comes from the source
        return prompt_items(self.request.items, route.encoders, self._item_ids, self.attempt)

    # --- ends ---

    def _finish(self) -> list[Action]:
        self.done = True
        return [*(CancelLeg(leg) for leg in self._open if leg.side != "target"), Finish()]

    def _finish_as_announced(self) -> list[Action]:
        actions: list[Action] = []
        for index, choice in enumerate(self._choices):
            if not choice.finished:
                reason, stop = choice.announced or ("length", None)
                last = Output(request_id=self.request.request_id, choice=index)
                if choice.held is not None and len(choice.tokens) == self._base:
                    last = choice.held
                actions += self._commit(last, last.token_ids[:1], reason, stop)
        self.done = True
        return [*self._cancel_open(), *actions, Finish()]

    def _raise(self, error: RequestError) -> list[Action]:
        self.done = True
        return [*self._cancel_open(), Raise(error)]

    def _cancel_open(self) -> list[Action]:
        legs, self._open = self._open, {}
        return [CancelLeg(leg) for leg in legs]

    def _expired(self) -> RequestError:
        return RequestError(
            f"The request was not complete after {self.request.deadline_s:g} s.",
            status=504,
            code="deadline_exceeded",
        )

    # --- questions ---

    def _is_open(self, leg: Leg) -> bool:
        return not self.done and leg in self._open

    def _has_relayed(self) -> bool:
        return any(len(c.tokens) > self._first_index or c.finished for c in self._choices)

    def _all_finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    def _all_announced(self) -> bool:
        return all(choice.finished or choice.announced for choice in self._choices)

    def _ended_by_what_is_known(self) -> bool:
        limit = self.request.params.max_tokens
        return all(
            choice.finished or choice.announced or len(choice.tokens) >= limit
            for choice in self._choices
        )


def _logprobs_from(output: Output, index: int, count: int) -> tuple[TokenLogprobs, ...] | None:
    """Of the tokens at [index, index + count) of an output."""
    if output.logprobs is None:
        return None
    start = index - output.index
    return output.logprobs[start : start + count]
