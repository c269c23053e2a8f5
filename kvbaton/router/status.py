"""The state of a router's cluster: its nodes and traffic, recent rates, and a short history."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvbaton.messages.nodes import FailingPairView, NodeInfo, NodesView, NodeView, RouterTraffic
from kvbaton.router.loads import IDLE, NodeLoads, RouterTotals
from kvbaton.router.membership import Member, Membership, failing

INTERVAL_S = 1.0
WINDOW = 5
"""Number of intervals that rates are taken over: nodes report every other second."""
HISTORY = 60
"""Number of intervals that are kept."""
USE_FADE = 0.8
"""Weight of a node's past use after one more interval."""
USED, UNUSED = 0.5, 0.1
"""Shares of recent intervals with use, above which a node starts to count as used, and below which
it stops."""
MAX_LIVES = 1024
"""Maximum number of node generations whose totals are kept."""

_Life = tuple[str, str]


@dataclass(frozen=True)
class _Sample:
    """Totals at one time.

    Attributes:
        time: Seconds on a monotonic clock.
        totals: Totals of the router.
        sent_bytes: Bytes sent by all nodes.
        generated: Generated tokens, by node and generation.
    """

    time: float
    totals: RouterTotals
    sent_bytes: float
    generated: dict[_Life, float]


@dataclass
class _Use:
    """Whether a node was recently used for something."""

    share: float = 0.0
    is_used: bool = False

    def observe(self, busy: bool) -> None:
        self.share = USE_FADE * self.share + (1 - USE_FADE) * busy
        self.is_used = self.share > (UNUSED if self.is_used else USED)


class ClusterStatus:
    """Status of a cluster; `sample` has to be called every `INTERVAL_S`.

    Args:
        membership: All nodes.
        loads: Their loads.
        totals: Returns the router's totals.
        clock: Monotonic seconds.

    Attributes:
        history: Traffic at each sample, newest last.
    """

    def __init__(
        self,
        membership: Membership,
        loads: NodeLoads,
        totals: Callable[[], RouterTotals],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership, self._loads, self._totals, self._clock = membership, loads, totals, clock
        self._samples: deque[_Sample] = deque(maxlen=WINDOW)
        self._sent_by: dict[_Life, float] = {}
        self._sent_bytes = 0.0
        self.history: deque[RouterTraffic] = deque(maxlen=HISTORY)
        self._uses: dict[_Life, dict[str, _Use]] = {}

    def sample(self) -> NodesView:
        """The current view, which is added to the history."""
        now = self._now()
        known, self._uses = self._uses, {}
        for member in self._membership.members.values():
            info, load = member.info, self._loads.get(member.info.node_id, IDLE)
            uses = known.get(_life(info)) or {"prefill": _Use(), "decode": _Use()}
            uses["prefill"].observe(load.prompt_tokens > 0)
            uses["decode"].observe(load.sequences > load.pending)
            self._uses[_life(info)] = uses
        view = self._view(now)
        self._samples.append(now)
        self.history.append(view.traffic)
        return view

    def view(self) -> NodesView:
        """The current view."""
        return self._view(self._now())

    def _now(self) -> _Sample:
        infos = [member.info for member in self._membership.members.values()]
        for info in infos:
            sent = info.load.get("sent_bytes", 0.0)
            self._sent_bytes += max(0.0, sent - self._sent_by.get(_life(info), 0.0))
            self._sent_by[_life(info)] = sent
        if len(self._sent_by) > MAX_LIVES:
            present = {_life(info) for info in infos}
            self._sent_by = {life: n for life, n in self._sent_by.items() if life in present}
        generated = {
            _life(info): info.load["generated_tokens"]
            for info in infos
            if "generated_tokens" in info.load
        }
        return _Sample(self._clock(), self._totals(), self._sent_bytes, generated)

    def _view(self, now: _Sample) -> NodesView:
        old = self._samples[0] if self._samples else now
        seconds = max(now.time - old.time, INTERVAL_S)
        totals, before = now.totals, old.totals
        traffic = RouterTraffic(
            running=totals.running,
            waiting=totals.waiting,
            finished=totals.finished,
            failed=totals.failed,
            requests_per_s=(totals.finished - before.finished) / seconds,
            tokens=totals.tokens,
            tokens_per_s=(totals.tokens - before.tokens) / seconds,
            sent_bytes=now.sent_bytes,
            sent_bytes_per_s=(now.sent_bytes - old.sent_bytes) / seconds,
        )
        members = self._membership.members.values()
        ready = self._membership.ready()
        return NodesView(
            nodes=[
                self._node(member, now, old, seconds)
                for member in sorted(members, key=lambda m: (m.info.role, m.info.node_id))
            ],
            pairs=[(source.node_id, target.node_id) for source, target in ready.pairs],
            encoder_pairs=[(one.node_id, node.node_id) for one, node in ready.encoder_pairs],
            traffic=traffic,
            failing_pairs=[
                FailingPairView(
                    source=source,
                    target=target,
                    failures=pair.failures,
                    trials=pair.trials,
                    trial_in_s=max(0.0, pair.trial_at - now.time),
                )
                for source, target, pair in failing(members)
            ],
        )

    def _node(self, member: Member, now: _Sample, old: _Sample, seconds: float) -> NodeView:
        info, told, limits = member.info, member.info.load, member.info.prompt_limits
        load, generated = self._loads.get(info.node_id, IDLE), now.generated.get(_life(info))
        rate = None
        if generated is not None:
            rate = max(0.0, generated - old.generated.get(_life(info), generated)) / seconds
        usage = None
        if info.num_blocks > 0 and "free_blocks" in told:
            usage = min(max(1 - told["free_blocks"] / info.num_blocks, 0.0), 1.0)
        return NodeView(
            node_id=info.node_id,
            generation=info.generation,
            role=info.role,
            url=info.url,
            state=member.state,
            reason=member.reason,
            paused=member.paused,
            model=info.model,
            control_address=info.control_address,
            requests=load.sequences,
            prompt_tokens=load.prompt_tokens,
            item_rows=load.rows,
            used_for=[name for name, use in self._uses.get(_life(info), {}).items() if use.is_used],
            running=int(told["running"]) if "running" in told else None,
            waiting=int(told["waiting"] + told.get("loading", 0)) if "waiting" in told else None,
            tokens_per_s=rate,
            sent_bytes=told.get("sent_bytes"),
            kv_usage=usage,
            max_prompt_len=None if limits is None else limits.computed,
            max_received_len=None if limits is None else limits.received,
            stores=info.stores,
        )


def _life(info: NodeInfo) -> _Life:
    return info.node_id, info.generation
