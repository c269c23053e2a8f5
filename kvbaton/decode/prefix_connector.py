"""Fetches prefixes of prompts from other nodes' caches, if a router or client says who has them.

Their blocks are asked for by key, and come as those of a hand-over do, by the same machine. They
enter the prefix cache once their digests are verified, and the request goes back to the queue and
finds them there. What does not come is computed.
"""

from __future__ import annotations

import os

from typing_extensions import override

from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol.events import Start
from kvbaton.decode.target_connector import TargetConnector, target_of
from kvbaton.engine.kv_connector import KVConnector, Load
from kvbaton.engine.request import Request, Sequence
from kvbaton.messages.control import MAX_KEYS
from kvbaton.messages.engine import AddRequest
from kvbaton.types import Attempt

MAX_FETCH_S = 30.0
"""After so long the rest of a prefix is computed."""


class PrefixConnector(KVConnector):
    """Asks peers for the blocks of prefixes, once for each request.

    Args:
        target: carries loads out, and knows the members.
    """

    name = "prefix"
    medium = "peer"

    def __init__(self, target: TargetConnector) -> None:
        self._target = target
        self._scheduler = target.scheduler
        self._asked: dict[Request, Attempt] = {}

    @override
    def accept(self, request: AddRequest) -> AddRequest:
        if request.prefix is not None:
            self._target.check_member(request.prefix.peer, "remote_prefix")
        return request

    @override
    def match(self, sequence: Sequence, num_cached: int) -> int:
        request, blocks = sequence.request, self._scheduler.blocks
        prefix = request.spec.prefix
        if prefix is None or request in self._asked or not request.reads_cache:
            return 0
        if target_of(request.spec) is not None:  # a hand-over brings all of it
            return 0
        size = blocks.alignment
        if any(group.block_size != size for group in blocks.groups):
            return 0  # a prefix would end inside a block of some group
        end = min(prefix.num_tokens, len(sequence.tokens) - 1, num_cached + MAX_KEYS * size)
        return max(0, end - end % size - num_cached)

    @override
    def start_load(self, load: Load) -> None:
        request, clock = load.sequence.request, self._scheduler.clock
        assert request.spec.prefix is not None, "only what `match` has offered is loaded"
        attempt = self._asked[request] = Attempt(os.urandom(16), 0)
        groups, size = self._scheduler.blocks.groups, self._scheduler.blocks.alignment
        # Behind a window nothing is wanted.
        wanted = zip(groups, load.spans, strict=True)
        firsts = [s[0].first for g, s in wanted if s and g.kind is not GroupKind.STATE]
        first = min(firsts, default=load.start // size)
        keys = load.sequence.chain(size)[first : load.end // size]
        left = max(0.001, min(request.deadline - clock(), MAX_FETCH_S))
        peer, joined = request.spec.prefix.peer, b"".join(keys)
        self._target.begin(load, Start(attempt, peer, keys[-1], load.end, load.spans, left, joined))

    @override
    def finished(self, request: Request) -> None:
        if (attempt := self._asked.pop(request, None)) is not None:
            self._target.cancel(attempt, request)
