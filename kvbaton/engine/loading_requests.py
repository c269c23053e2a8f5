"""Loads of live requests by KV connectors: when there is room, how they begin, end and fail."""

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
    """Live requests, and the loads that connectors carry out for some of them.

    Attributes:
        both_sides: Whether the node is source and target of hand-overs. Two such nodes, each full
            of loads that wait for the other's prompts, would deadlock. So loads leave half of the
            sequence slots and enough blocks (`load_share`) to prompts, and a sequence that has no
            room until a load ends waits beside the queue.
    """

    both_sides = False

    @cached_property
    def load_share(self) -> float:
        """Largest share of the blocks that loads may take if `both_sides`; at least a half.

        The rest holds the longest prompt with as many choices as half of the sequence slots.
        """
        forks = self.config.max_num_seqs // 2 * len(self.blocks.groups)
        longest = self.blocks.need(self.blocks.empty(), self.config.max_model_len) + forks
        left = 1.0 - longest / max(1, self.blocks.pool.usable)
        return max(0.5, min(self.config.max_loading_share, left))

    def prompt_limits(self, most_blocks: int | None = None) -> PromptLimits:
        """Longest prompts that this node computes, and takes from other nodes; sent to the router.

        The limits follow from the rules for an idle engine, so that no prompt is prefilled
        elsewhere that this engine could never load (`_has_room_to_load`).

        Args:
            most_blocks: Maximum number of blocks that may wait for one source; None for no limit.
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

        # Prompts for other nodes keep some blocks and half of the sequence slots. Each further
        # choice takes a block of every group, while a prompt that is one block shorter gives one
        # back only in groups that keep all blocks.
        most, groups = int(self.load_share * blocks.pool.usable), len(blocks.groups)
        received = min(received, bisect_right(lengths, most, key=held))
        choices, keeping = config.max_num_seqs // 2, sum(group.keeps_all for group in blocks.groups)
        if keeping:
            each = -(-groups // keeping) * blocks.alignment
            return PromptLimits(computed, received, choices, each, lent)
        spare = most - held(received) if received else 0
        return PromptLimits(computed, received, min(choices, 1 + spare // groups), lent=lent)

    # --- how loads begin ---

    def load_beyond(self, sequence: Sequence, match: Match) -> Literal["done", "wait", "compute"]:
        """Let a connector load what lies beyond a cached prefix.

        Returns:
            ``done`` if a connector loads it, will answer later, or failed although it is required;
            ``wait`` if there must be room first; ``compute`` if no connector offers anything.
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
                    continue  # the other node's loads, and so ours, may wait for this prompt
                if self.loading and self.step_aside(sequence):
                    return "done"
                if self._exceeds(sequence, self.load_share, 0.5):
                    continue  # it would never fit
            # The end of a load makes room, and every load has a deadline.
            if connector.waits_for_room or self.loading:
                return "wait"
        return "compute"

    def _has_room_to_load(self, sequence: Sequence, match: Match, start: int) -> bool:
        """Whether a load fits: those in progress may not reserve every block, but one alone may.

        If `both_sides`, loads also leave room for a prompt and half of the sequence slots, and none
        overtakes a sequence that waits for the end of a load.
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
        """Whether a sequence and all loading ones take more than a share of the blocks or slots.

        Each counts in full: its cached prefix, and what it needs for its next step.
        """
        blocks = seats = 0
        for one in (sequence, *(load.sequence for load in self.loading.values())):
            blocks += self.blocks.need(self.blocks.empty(), len(one.tokens) + 1)
            blocks += one.unforked * len(self.blocks.groups)
            seats += 1 + one.unforked
        too_many = blocks > of_blocks * self.blocks.pool.usable
        return too_many or seats > of_seats * self.config.max_num_seqs

    def is_crowded_out(self, sequence: Sequence) -> bool:
        """Whether a sequence has no room until a load ends, if `both_sides`."""
        return self.both_sides and bool(self.loading) and self._exceeds(sequence, 1.0, 1.0)

    def step_aside(self, sequence: Sequence) -> Literal[True]:
        """Park a sequence until a load ends, so that those behind it in the queue may run first."""
        self.park(sequence)
        self.crowded.add(sequence)
        return True

    def holders(self) -> Iterable[Sequence]:
        """Sequences that have blocks or are loading some."""
        if not self.loading:
            return self.running
        return [*self.running, *(load.sequence for load in self.loading.values())]

    def wanted(self, holders: Iterable[Sequence]) -> int:
        """Maximum number of blocks that `holders` may need for their next step.

        In sliding-window groups, this covers all further steps of a prompt, since blocks that are
        given back behind the window are needed again.
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
        """Allocate blocks for the tokens after a cached prefix to `end`; a connector fills them."""
        self.adopt(sequence, match)
        following = next_after(connector, sequence, end)
        self.blocks.skip_unneeded(sequence.tables, following)
        self.blocks.trim(sequence, following)
        if connector.medium == "transferred":  # blocks not attended to were not sent or verified
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

    # --- how loads end ---

    def is_loading(self, load: Load) -> bool:
        """Whether a load is still in progress and its sequence waits for it."""
        return self.loading.get(load.sequence.request.request_id) is load

    def finish_load(
        self, load: Load, choices: SequenceOf[ChoiceStart] = (), *, cached_at_source: int = 0
    ) -> list[Output]:
        """Go on after a load that is complete and verified; ignored if nothing waits for it.

        Args:
            load: The load, as begun.
            choices: First tokens sampled by the source, per choice, after which decoding goes
                on. If empty, the sequence returns to the queue and finds its blocks in the cache.
            cached_at_source: Number of prompt tokens that the source had in its prefix cache.
        """
        if not self.is_loading(load):
            return []
        request = load.sequence.request
        sampled = [token for choice in choices for token in (choice, *choice.more)]
        unknown = (one.token for one in sampled if one.token >= self.config.vocab_size)
        bad = next(unknown, None)
        if choices and len(choices) != request.params.n:
            wrong = f"the source sent {len(choices)} first tokens for n={request.params.n}"
            return self.fail_load(load, load.end, wrong)
        if bad is not None:
            wrong = f"the source sent token {bad}, which the model does not have"
            return self.fail_load(load, load.end, wrong)
        self.totals.cached_at_source += cached_at_source
        hit = min(cached_at_source, len(request.prompt))  # the client is told, as by one node
        request.cached_tokens = max(request.cached_tokens or 0, hit)
        self._keep(load, load.end)
        # A proxy that asks the source for one token can't pass on `min_tokens`, and perhaps not
        # `logprobs` or a grammar. A first token that stops too early, lacks logprobs or violates
        # the grammar is sampled again here.
        params = request.params
        ends = () if params.ignore_eos else self.config.eos_token_ids
        too_few = max(0, params.min_tokens - load.sequence.num_generated)
        early = any(
            one.token in ends or one.token in params.stop_token_ids
            for choice in choices
            for one in (choice, *choice.more)[:too_few]
        )
        unscored = params.logprobs is not None and any(one.logprobs is None for one in sampled)
        grammars = self.grammars if params.grammar else None
        unfit = grammars and not all(grammars.fits(load.sequence, c.token) for c in choices)
        if early or unscored or unfit or not choices:
            self._requeue(load)
            return []
        self.run(load.sequence)
        for choice in range(1, request.params.n):
            known = load.sequence.tokens[:]
            child = Sequence(request, choice, known, len(self.blocks.groups))
            self.fork(load.sequence, child)
            child.parent = None  # The runner knows no parent: the child is sent with all tokens.
        outputs = []
        for sequence, start in zip(request.sequences, choices, strict=True):
            for one in (start, *start.more):
                if sequence.finish_reason is not None:
                    break
                # The source may have been asked for one token only: ignore its "length".
                stops = one.finish_reason == "stop"
                finish = (one.finish_reason, one.stop_reason) if stops else None
                outputs.append(self.append(sequence, one.token, one.logprobs, finish))
        for sequence in tuple(request.sequences):
            if sequence.finish_reason is not None:
                self.retire(sequence)
        return outputs

    def fail_load(self, load: Load, valid_through: int, reason: str) -> list[Output]:
        """Apply the load-failure policy to a load verified only up to token `valid_through`.

        Verified tokens go, in whole blocks, to the prefix cache; the request returns to the queue
        and is given new blocks for the rest when admitted. Ignored if nothing waits for the load.
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
        """End a load early: keep the whole blocks up to `valid_through`, and compute the rest.

        Ignored if nothing waits for the load.
        """
        if self.is_loading(load):
            valid = min(valid_through, load.end)
            self._keep(load, valid - valid % self.blocks.alignment)
            self._requeue(load)

    def _keep(self, load: Load, end: int) -> None:
        """Take the KV of tokens up to `end` as valid, and offer it to the prefix cache."""
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
        """Put a loading sequence back into the queue, without blocks."""
        self._leave(load.sequence)
        self.blocks.clear(load.sequence)
        self._enqueue(load.sequence, SequenceState.WAITING)

    def fail_connector(
        self, connector: KVConnector, request: Request | None, reason: str
    ) -> list[Output]:
        """Fail what a raising connector owes to one request, or to all if `request` is None.

        Loads follow the load-failure policy; hand-overs that need the connector end with an error.
        """
        outputs: list[Output] = []
        for one in [*self.requests.values()] if request is None else [request]:
            load = self.loading.get(one.request_id)
            if load is not None and load.connector is connector:
                outputs += self.fail_load(load, load.start, reason)
            elif self.requests.get(one.request_id) is one and self.must_not_compute(one, connector):
                outputs += self.end(one, "error", reason)
        if request is None:
            for sequence in list(self.parked):  # perhaps parked by this connector
                self.unpark(sequence)
        return outputs

    def must_not_compute(self, request: Request, connector: KVConnector) -> bool:
        """Whether a request must not be computed here without this connector of its hand-over.

        True for sources, and for targets that wait for KV if the load-failure policy is ``fail``.
        """
        transfer = request.spec.transfer
        if transfer is None or transfer.role != connector.transfer_role:
            return False
        waits = request.cached_tokens is None and self.config.kv_load_failure_policy == "fail"
        return request.source or waits


def next_after(connector: KVConnector, sequence: Sequence, end: int) -> int:
    """Position of the first token to compute after a load up to `end`.

    A source has sampled the next token already; after a store's load the last known token must
    be computed to sample one.
    """
    return end if connector.medium == "transferred" else min(end, len(sequence.tokens) - 1)
