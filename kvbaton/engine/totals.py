"""What a scheduler has done so far, for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvbaton.engine.speculative import SpeculativeConfig


@dataclass
class Totals:
    """Monotonic totals.

    Attributes:
        received: requests taken.
        finished: requests that are over, by finish reason of their last choice.
        prompt_tokens: prompt tokens by source: ``computed``, ``local_cache``, ``transferred``,
            ``store``.
        cached_at_source: of the transferred ones, those that the source had in its cache.
        generated: tokens put out.
        preemptions: sequences whose blocks went to others.
        load_failures: hand-overs and loads from a store that failed.
        drafts: steps of a sequence with a draft.
        draft_tokens: tokens of those.
        accepted: how many were accepted, by place in the draft.
    """

    received: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    cached_at_source: int = 0
    generated: int = 0
    preemptions: int = 0
    load_failures: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)

    def counters(self, speculative: SpeculativeConfig | None) -> dict[str, float]:
        """By Prometheus name; what concerns drafts for an engine that makes some."""
        values = {
            "kvbaton_requests_received_total": float(self.received),
            **_labelled("kvbaton_requests_finished_total", "reason", self.finished.items()),
            **_labelled("kvbaton_prompt_tokens_total", "source", self.prompt_tokens.items()),
            "kvbaton_prompt_tokens_cached_at_source_total": float(self.cached_at_source),
            "kvbaton_generation_tokens_total": float(self.generated),
            "kvbaton_preemptions_total": float(self.preemptions),
            "kvbaton_load_failures_total": float(self.load_failures),
        }
        if speculative is not None:  # under vLLM's names
            head, places = "kvbaton_spec_decode_num", speculative.num_speculative_tokens
            accepted = [(str(place), self.accepted[place]) for place in range(places)]
            values |= {
                f"{head}_drafts_total": float(self.drafts),
                f"{head}_draft_tokens_total": float(self.draft_tokens),
                f"{head}_accepted_tokens_total": float(self.accepted.total()),
                **_labelled(f"{head}_accepted_tokens_per_pos_total", "position", accepted),
            }
        return values


def _labelled(name: str, label: str, counts: Iterable[tuple[str, int]]) -> dict[str, float]:
    return {f'{name}{{{label}="{value}"}}': float(count) for value, count in counts}
