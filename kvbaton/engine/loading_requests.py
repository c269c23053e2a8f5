"""Live requests whose KV connectors load: whether there is room, how loads begin, end and fail."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import Literal

from kvbaton.engine.kv_cache_manager import Match
from kvbaton.engine.kv_connector import KVConnector, Load
from kvbaton.engine.live_requests import LiveRequests
from kvbaton.engine.request import Request, Sequence, SequenceState
from kvbaton.messages.engine import Output
from kvbaton.types import PINNED_SHARE_PER_PEER, ChoiceStart, PromptLimits


class LoadingRequests(LiveRequests):
    """Requests from their arrival to their end, and the loads of some.

    Attributes:
        both_sides: the node prefills for others and is prefilled for. Two such nodes, each full of
            loads that wait for the other's prompts, would wait for ever: so loads leave half of the
            seats to prompts, and blocks for any of them (`load_share`), and who has no room before
            a load ends waits beside the queue.
    """

    both_sides = False

    @cached_property
    def load_share(self) -> float:
        """Share of the blocks that loads may take where `both_sides`: half of them, or more.

        What is left is enough for the longest prompt with as many choices as have seats.
        """
        forks = self.config.max_num_seqs // 2 * len(self.blocks.groups)
        longest = self.blocks.need(self.blocks.empty(), self.config.max_model_len) + forks
        left = 1.0 - longest / max(1, self.blocks.pool.usable)
        return max(0.5, min(self.config.max_loading_share, left))

    def prompt_limits(self, most_blocks: int | None = None) -> PromptLimits:
        """The longest prompts that are computed, and taken from other nodes: what a router is told.

        They follow from the rules for an idle engine, so that no prompt is computed elsewhere for
        an engine that never has the room to load it (`_has_room_to_load`).

        Args:
            most_blocks: that may wait for one source; None for any number.
        """
        blocks, config = self.blocks, self.config
        lengths = range(1, config.max_model_len)
        computed = bisect_left(lengths, True, key=lambda n: blocks.too_large(n) is not None)
        received, lengths = computed, lengths[:computed]

        def within(most: int) -> int:
            return bisect_right(
                lengths, most, key=lambda n: blocks.need(blocks.empty(), n, start=n)
            )

        lent = within(config.groups[0].num_blocks // PINNED_SHARE_PER_PEER)
        if most_blocks is not None:
            received = within(most_blocks)
        if not self.both_sides:
            return PromptLimits(computed, received, config.max_num_seqs, lent=lent)

        def held(num_tokens: int) -> int:
            return blocks.need(blocks.empty(), num_tokens + 1)

        # Some blocks and half of the seats are left to prompts for others; each choice takes a
        # block of every group: of a prompt that is shorter by one, only groups that keep all give
        # one back.
        most, groups = int(self.load_share * blocks.pool.usable), len(blocks.groups)
        received = min(received, bisect_right(lengths, most, key=held))
        choices, keeping = config.max_num_seqs // 2, sum(group.keeps_all for group in blocks.groups)
        if keeping:
            each = -(-groups // keeping) * blocks.alignment
            return PromptLimits(computed, received, choices, each, lent)
        spare = most - held(received) if received else 0
        return PromptLimits(computed, received, min(choices, 1 + spare // groups), lent=lent)

    # --- their begin ---

    def load_beyond(self, sequence: Sequence, match: Match) -> Literal["done", "wait", "compute"]:
        """Let a connector bring what is beyond a cached prefix.

        Returns:
            ``done`` if one does, will tell later, or must and can't; ``wait`` if there has to be
            room first; ``compute`` if none has anything to bring.
        """
        for connector in self.connectors.having[KVConnector.match]:
            if connector in self.connectors.failing:
                continue
            try:
                offer = connector.match(sequence, match.num_tokens)
            except Exception as raised:
                reason = self.connectors.contain(connector, raised, sequence)
                if self.must_not_compute(sequence.request, connector):
                    self._reject(sequence, reason)
                    return "done"
                continue
            if offer is None:
                self.park(sequence)
                return "done"
            if not offer:
                continue
            end = match.num_tokens + offer
            if self._has_room_to_load(sequence, match, next_after(connector, sequence, end)):
                self.begin_load(connector, sequence, match, end)
                return "done"
            if self.both_sides:
                if sequence.request.source:
                    continue  # the node that waits for it may be who these loads wait for
                if self.loading and self.step_aside(sequence):
                    return "done"
                if self._exceeds(sequence, self.load_share, 0.5):
                    continue  # there will never be room
            # Room comes with the end of a load, which has a deadline.
            if connector.waits_for_room or self.loading:
                return "wait"
        return "compute"

    def _has_room_to_load(self, sequence: Sequence, match: Match, start: int) -> bool:
        """Loads that have not come in may not reserve everything, unless one is alone.

        On a node that prefills for others they leave room for a prompt in any case, and half of the
        seats, and none overtakes who waits for the end of one.
        """
        need = self.blocks.need(match.tables, len(sequence.tokens), start=start)
        incoming = self.blocks.num_incoming()
        share = min(self.config.max_loading_share, self.load_share if self.both_sides else 1.0)
        if incoming and incoming + need > int(share * self.blocks.pool.usable):
            return False
        if self.both_sides and (self.crowded or self._exceeds(sequence, self.load_share, 0.5)):
            return False
        return self.blocks.fits(need, beside=self.wanted(self.holders()), hits=match.tables)

    def _exceeds(self, sequence: Sequence, of_blocks: float, of_seats: float) -> bool:
        """Whether a sequence, beside all that load, takes more than a share of blocks or of seats.

        Each with its cached prefix, and what it wants at its next step.
        """
        blocks = seats = 0
        for one in (sequence, *(load.sequence for load in self.loading.values())):
            blocks += self.blocks.need(self.blocks.empty(), len(one.tokens) + 1)
            blocks += one.unforked * len(self.blocks.groups)
            seats += 1 + one.unforked
        too_many = blocks > of_blocks * self.blocks.pool.usable
        return too_many or seats > of_seats * self.config.max_num_seqs

    def is_crowded_out(self, sequence: Sequence) -> bool:
        """Whether a sequence has no room before a load ends, on a node that prefills for others."""
        return self.both_sides and bool(self.loading) and self._exceeds(sequence, 1.0, 1.0)

    def step_aside(self, sequence: Sequence) -> Literal[True]:
        """Wait for the end of a load beside the queue: who is behind may have to go first."""
        self.park(sequence)
        self.crowded.add(sequence)
        return True

    def holders(self) -> Iterable[Sequence]:
        """Who has blocks, or is getting some."""
        if not self.loading:
            return self.running
        return [*self.running, *(load.sequence for load in self.loading.values())]

    def wanted(self, holders: Iterable[Sequence]) -> int:
        """Blocks that those who have some, or are getting them, may want at their next step.

        Behind a window it is all steps of a prompt: what they give back they want again.
        """
        wanted = 0
        for sequence in holders:
            if sequence.is_ending:
                continue
            forks, known = sequence.unforked, len(sequence.tokens)
            loading = sequence.state is SequenceState.LOADING
            scheduled = known if forks or loading else sequence.num_scheduled
            start = known if loading else sequence.num_scheduled
            copy_at = scheduled if sequence.shares_tail else None
            end = max(scheduled + 1, known)
            wanted += self.blocks.need(sequence.tables, end, start=start, copy_at=copy_at)
            wanted += forks * len(self.blocks.groups)
        return wanted

    def begin_load(
        self, connector: KVConnector, sequence: Sequence, match: Match, end: int
    ) -> None:
        """Take blocks for the tokens from a cached prefix to `end`; a connector fills them."""
        self.adopt(sequence, match)
        following = next_after(connector, sequence, end)
        self.blocks.skip_unneeded(sequence.tables, following)
        self.blocks.trim(sequence, following)
        if connector.medium == "transferred":  # only what is needed was verified, or came at all
            wholes = [group.first_whole(end) for group in self.blocks.groups]
            sequence.committed = list(map(max, sequence.committed, wholes))
        spans = self.blocks.reserve(sequence.tables, end)
        self._leave(sequence)
        sequence.request.mark("loading", self.clock())
        sequence.state = SequenceState.LOADING
        load = Load(sequence, match.num_tokens, end, spans, connector)
        self.loading[sequence.request.request_id] = load
        try:
            connector.start_load(load)
        except Exception as error:
            self.connectors.contain(connector, error, load)

    # --- their end ---

    def is_loading(self, load: Load) -> bool:
        """Whether the sequence still waits for a load."""
        return self.loading.get(load.sequence.request.request_id) is load

    def finish_load(
        self, load: Load, choices: SequenceOf[ChoiceStart] = (), *, cached_at_source: int = 0
    ) -> list[Output]:
        """All of a load is here and verified. Loads that nobody waits for are ignored.

        Args:
            load: what was begun.
            choices: what another node sampled first, one per choice: the sequence goes on from
                there. Without any it goes back to the queue, and finds the blocks in the cache.
            cached_at_source: how many of the tokens that node had in its cache.
        """
        if not self.is_loading(load):
            return []
        request = load.sequence.request
        unknown = (choice.token for choice in choices if choice.token >= self.config.vocab_size)
        bad = next(unknown, None)
        if choices and len(choices) != request.params.n:
            wrong = f"the source sent {len(choices)} first tokens for n={request.params.n}"
            return self.fail_load(load, load.end, wrong)
        if bad is not None:
            wrong = f"the source sent token {bad}, which the model does not have"
            return self.fail_load(load, load.end, wrong)
        self.totals.cached_at_source += cached_at_source
        self._keep(load, load.end)
        # A proxy that asks the source for one token can't tell it of `min_tokens`, and may not tell
        # it of `logprobs` or a grammar: one that ends the text before, has no scores or does not
        # fit is sampled anew here.
        params = request.params
        ends = () if params.ignore_eos else self.config.eos_token_ids
        early = params.min_tokens and load.sequence.num_generated < params.min_tokens
        early = early and any(
            choice.token in ends or choice.token in params.stop_token_ids for choice in choices
        )
        unscored = params.logprobs is not None and any(c.logprobs is None for c in choices)
        unfit = params.grammar and not all(
            self.grammars.fits(load.sequence, choice.token) for choice in choices
        )
        if early or unscored or unfit or not choices:
            self._requeue(load)
            return []
        self.run(load.sequence)
        for choice in range(1, request.params.n):
            known = load.sequence.tokens[:]
            child = Sequence(request, choice, known, len(self.blocks.groups))
            self.fork(load.sequence, child)
            child.parent = None  # The runner does not know it; the child comes with its tokens.
        outputs = []
        for sequence, start in zip(request.sequences, choices, strict=True):
            # The source was perhaps asked for one token only: its "length" is no limit of ours.
            stops = start.finish_reason == "stop"
            finish = (start.finish_reason, start.stop_reason) if stops else None
            outputs.append(self.append(sequence, start.token, start.logprobs, finish))
        for sequence in tuple(request.sequences):
            if sequence.finish_reason is not None:
                self.retire(sequence)
        return outputs

    def fail_load(self, load: Load, valid_through: int, reason: str) -> list[Output]:
        """Apply the load-failure policy to a load of which only so many tokens are verified.

        Those, in whole blocks, go to the prefix cache; the request goes back to the queue and gets
        fresh blocks for the rest when it is admitted. Loads that nobody waits for are ignored.
        """
        if not self.is_loading(load):
            return []
        self.totals.load_failures += 1
        load.sequence.request.mark("load_failed", self.clock())
        if self.config.kv_load_failure_policy == "fail":
            whence = " from the store" if load.connector.medium == "store" else ""
            error = f"the KV cache could not be loaded{whence}: {reason}"
            return self.end(load.sequence.request, "error", error)
        self.cut_load(load, valid_through)
        if load.connector.medium == "transferred":
            if any(self.connectors.call(KVConnector.load_failed, load.sequence)):
                self.park(load.sequence)
        return []

    def cut_load(self, load: Load, valid_through: int) -> None:
        """Of a load only so many tokens came: keep them, in whole blocks, and compute the others.

        Loads that nobody waits for are ignored.
        """
        if self.is_loading(load):
            valid = min(valid_through, load.end)
            self._keep(load, valid - valid % self.blocks.alignment)
            self._requeue(load)

    def _keep(self, load: Load, end: int) -> None:
        """Tokens up to `end` have valid KV, from now on for everybody."""
        sequence, request = load.sequence, load.sequence.request
        sequence.num_computed = sequence.num_scheduled = max(load.start, end)
        if load.connector.medium == "transferred":
            request.received = sequence.num_computed
            gained = max(0, min(request.received, len(request.prompt)) - load.start)
            request.transferred_tokens = gained
        else:
            usable = min(sequence.num_computed, len(request.prompt), len(sequence.tokens) - 1)
            cached = request.cached_tokens or 0
            gained = max(0, usable - cached)
            request.cached_tokens = cached + gained
        self.totals.prompt_tokens[load.connector.medium] += gained
        self.commit(sequence)

    def _requeue(self, load: Load) -> None:
        """Put a sequence that was loading back into the queue, without its blocks."""
        self._leave(load.sequence)
        self.blocks.clear(load.sequence)
        self._enqueue(load.sequence, SequenceState.WAITING)

    def fail_connector(
        self, connector: KVConnector, request: Request | None, reason: str
    ) -> list[Output]:
        """Fail what a connector that has raised owes: to one request, or to all of them.

        Loads fail by the load-failure policy. Hand-overs that it was to serve end with an error.
        """
        outputs: list[Output] = []
        for one in [*self.requests.values()] if request is None else [request]:
            load = self.loading.get(one.request_id)
            if load is not None and load.connector is connector:
                outputs += self.fail_load(load, load.start, reason)
            elif self.requests.get(one.request_id) is one and self.must_not_compute(one, connector):
                outputs += self.end(one, "error", reason)
        if request is None:
            for sequence in list(self.parked):  # it may be what they wait for
                self.unpark(sequence)
        return outputs

    def must_not_compute(self, request: Request, connector: KVConnector) -> bool:
        """Whether a request is of no use without a connector that plays a part in its hand-over."""
        transfer = request.spec.transfer
        if transfer is None or transfer.role != connector.transfer_role:
            return False
        waits = request.cached_tokens is None and self.config.kv_load_failure_policy == "fail"
        return request.source or waits


def next_after(connector: KVConnector, sequence: Sequence, end: int) -> int:
    """The first token that is computed after a load up to `end`.

    A source has sampled what follows a prompt; of one that a store has the last token is computed.
    """
    return end if connector.medium == "transferred" else min(end, len(sequence.tokens) - 1)
