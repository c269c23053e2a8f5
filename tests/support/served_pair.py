"""A prefill and a decode node, asked directly, and the accounts of their hand-overs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from kvbaton.messages.nodes import GenerateResponse
from tests.support.servers import HttpFailure, Metrics, Node, Router, poll

SETTLE_S = 60.0
POOL = ThreadPoolExecutor(64, thread_name_prefix="e2e")
"""Threads that wait for answers."""

Moves = Literal["all", "some", "nothing"]


def bytes_per_token(model: Path) -> int:
    """KV bytes per token, computed from the model's configuration; models are float32."""
    config: dict[str, int] = json.loads((model / "config.json").read_text())
    per_layer = 2 * config["num_key_value_heads"] * config["head_dim"]
    return config["num_hidden_layers"] * per_layer * 4


def unrest(metrics: Metrics) -> dict[str, float]:
    """Non-zero metrics of work, debts and blocks neither free nor cached; empty at rest."""
    zero = ("unhealthy", "transfers_live", "transfers_quarantined", "leases")
    names = ["kvbaton_ledger_imbalance", *(f"kvbaton_{name}" for name in zero)]
    names += [f"kvbaton_sequences_{state}" for state in ("waiting", "running", "loading")]
    found = {name: metrics(name) for name in names}
    for owner in ("request", "incoming", "outgoing", "fenced"):
        found[f"kvbaton_blocks of {owner}"] = metrics("kvbaton_blocks", owner=owner)
    return {name: value for name, value in found.items() if value}


def settle(*nodes: Node, seconds: float = SETTLE_S) -> None:
    """Wait until nothing is in flight and the ledgers of all nodes balance."""
    for node in nodes:
        poll(
            f"{node.name} is at rest",
            lambda node=node: not unrest(node.metrics()),  # type: ignore[misc]
            seconds,
            lambda node=node: f"{unrest(node.metrics())}\n{node.tail()}",  # type: ignore[misc]
        )


def first_tokens(answer: Future[GenerateResponse]) -> list[int]:
    """P's token 0 of each choice; none if D cancelled the hand-over, having all KV already."""
    try:
        return [choice.token_ids[0] for choice in answer.result().choices]
    except HttpFailure as failure:
        if b'"code":"aborted"' not in failure.body:
            raise
        return []


class Pair:
    """P and D during one test.

    Attributes:
        moves: Transfers that the books must show at the end: ``all`` (every byte that P posted
            arrived, and is needed by D's tokens), ``some`` (not all bytes were used) or
            ``nothing``.
    """

    def __init__(self, p: Node, d: Node, model: Path, router: Router | None = None) -> None:
        self.p = p
        self.d = d
        self.model = model
        self.bytes_per_token = bytes_per_token(model)
        self.moves: Moves = "all"
        self._router = router
        settle(p, d)
        self._before = {p: p.metrics(), d: d.metrics()}

    @property
    def router(self) -> Router:
        """Router of only these two nodes."""
        assert self._router is not None
        return self._router

    # --- requests ---

    def submit(self, token_ids: Sequence[int], **params: Any) -> Future[GenerateResponse]:
        """Send a request to both nodes at once, as a router does; a future of D's answer."""
        ours = os.urandom(16)
        first = POOL.submit(self.p.generate, token_ids, self.source_params(ours), **params)

        def finish() -> GenerateResponse:
            answer = self.d.generate(token_ids, self.target_params(ours), **params)
            for choice, token in zip(answer.choices, first_tokens(first), strict=False):
                assert choice.token_ids[0] == token, "P and D differ in token 0"
            return answer

        return POOL.submit(finish)

    def submit_to_both(self, token_ids: Sequence[int], **params: Any) -> Future[GenerateResponse]:
        """As `submit`, but P may fail."""
        ours = os.urandom(16)
        POOL.submit(self.p.generate, token_ids, self.source_params(ours), **params)
        return POOL.submit(self.d.generate, token_ids, self.target_params(ours), **params)

    def generate(self, token_ids: Sequence[int], **params: Any) -> GenerateResponse:
        """As `submit`, but wait for D's answer."""
        return self.submit(token_ids, **params).result()

    def tokens(self, token_ids: Sequence[int], **params: Any) -> list[int]:
        """Tokens of the only choice."""
        (choice,) = self.generate(token_ids, **params).choices
        return list(choice.token_ids)

    def alone(self, token_ids: Sequence[int], **params: Any) -> list[int]:
        """Tokens of the only choice if P serves the request alone."""
        (choice,) = self.p.generate(token_ids, **params).choices
        return list(choice.token_ids)

    def source_params(self, transfer_id: bytes) -> dict[str, Any]:
        return {"do_remote_decode": True, "transfer_id": transfer_id.hex(), "attempt": 0}

    def target_params(self, transfer_id: bytes) -> dict[str, Any]:
        info = self.p.info()
        address = urlsplit(info["control_address"])
        return {
            "do_remote_prefill": True,
            "transfer_id": transfer_id.hex(),
            "attempt": 0,
            "remote_engine_id": info["node_id"],
            "remote_host": address.hostname,
            "remote_port": address.port,
            "remote_request_id": transfer_id.hex(),
        }

    def forget(self) -> None:
        """Empty both prefix caches."""
        settle(self.p, self.d)
        self.p.forget()
        self.d.forget()

    # --- books ---

    def at_p(self) -> Metrics:
        """P's metrics since the test began."""
        return self.p.metrics() - self._before[self.p]

    def at_d(self) -> Metrics:
        """D's metrics since the test began."""
        return self.d.metrics() - self._before[self.d]

    def close_books(self, tokens_needed: int | None = None) -> None:
        """Check that as many bytes moved as the tokens need, and that both nodes are at rest.

        With a window, fewer tokens are needed than were computed for D.
        """
        settle(self.p, self.d)
        p, d = self.at_p(), self.at_d()
        sent, posted = (p(f"kvbaton_transfer_{n}_bytes_total") for n in ("sent", "posted"))
        tokens = d("kvbaton_prompt_tokens_total", source="transferred")
        if self.moves == "nothing":
            assert (posted, tokens) == (0, 0)
            return
        assert sent > 0
        if self.moves == "all":
            needed = tokens if tokens_needed is None else tokens_needed
            assert sent == posted == needed * self.bytes_per_token
            assert d("kvbaton_transfer_notices_total") == p("kvbaton_transfer_writes_total")
            assert d("kvbaton_transfer_digests_checked_total") > 0
            assert d("kvbaton_transfer_digests_failed_total") == 0
            assert d("kvbaton_load_failures_total") == 0
