"""Pairing is a pure function: no socket needed."""

from __future__ import annotations

from typing import Any

from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.choose import Wanted
from kvbaton.router.choose import choose as choose_of
from kvbaton.router.config import RoutingPolicy
from kvbaton.router.costs import CostModel
from kvbaton.router.loads import NodeLoad, NodeLoads
from kvbaton.router.membership import Member, NodeState, ReadyNodes
from kvbaton.router.policies import LeastLoaded
from kvbaton.router.route import Route


def member(node_id: str, role: str, *, told: bool = True, **fields: object) -> Member:
    defaults: dict[str, object] = {
        "generation": "1",
        "url": f"http://127.0.0.1/{node_id}",
        "model": "m",
        "control_address": f"tcp://127.0.0.1:{sum(map(ord, node_id))}",
        "identity": "aa",
    }
    info = NodeInfo(node_id=node_id, role=role, **{**defaults, **fields})  # type: ignore[arg-type]
    return Member(info, static=told, heard_at=0.0, state=NodeState.READY, told=None)


P0, P1 = member("p0", "prefill"), member("p1", "prefill")
D0, D1 = member("d0", "decode"), member("d1", "decode")


def choose(
    members: list[Member],
    loads: dict[str, NodeLoad],
    num_tokens: int,
    *,
    avoid: frozenset[str] = frozenset(),
    min_handover_tokens: int = 0,
) -> Route | None:
    policy = LeastLoaded(RoutingPolicy(min_handover_tokens=min_handover_tokens), CostModel())
    in_flight = NodeLoads()
    in_flight.own.update(loads)
    return choose_of(ReadyNodes(members), in_flight, policy, Wanted(num_tokens), avoid=avoid)


def pairs(*members: Member) -> list[tuple[str, str]]:
    return [(p.node_id, d.node_id) for p, d in ReadyNodes(members).pairs]


def encoder_pairs(*members: Member) -> list[tuple[str, str]]:
    return [(e.node_id, n.node_id) for e, n in ReadyNodes(members).encoder_pairs]


def ids(route: Route | None) -> tuple[str | None, str] | None:
    if route is None:
        return None
    return route.source.node_id if route.source else None, route.target.node_id


def test_an_idle_cluster_breaks_ties_by_node_id() -> None:
    assert ids(choose([D1, P1, P0, D0], {}, 10)) == ("p0", "d0")


def test_the_least_loaded_pair_wins() -> None:
    loads = {
        "p0": NodeLoad(prompt_tokens=100),
        "p1": NodeLoad(prompt_tokens=99),
        "d0": NodeLoad(sequences=2, tokens=10),
        "d1": NodeLoad(sequences=1, tokens=5000),
    }
    assert ids(choose([P0, P1, D0, D1], loads, 10)) == ("p1", "d1")


def test_tokens_decide_between_equal_numbers_of_sequences() -> None:
    loads = {"d0": NodeLoad(sequences=1, tokens=10), "d1": NodeLoad(sequences=1, tokens=9)}
    assert ids(choose([P0, D0, D1], loads, 10)) == ("p0", "d1")


def test_short_prompts_stay_on_one_node() -> None:
    assert ids(choose([P0, D0], {}, 9, min_handover_tokens=10)) == (None, "d0")
    assert ids(choose([P0, D0], {}, 10, min_handover_tokens=10)) == ("p0", "d0")


def test_excluded_nodes_are_avoided_as_long_as_anyone_is_left() -> None:
    assert ids(choose([P0, D0, D1], {}, 10, avoid=frozenset({"d0"}))) == ("p0", "d1")
    assert ids(choose([P0, D0], {}, 10, avoid=frozenset({"d0"}))) == (None, "p0")
    assert choose([P0, D0], {}, 10, avoid=frozenset({"d0", "p0"})) is None


def test_other_models_never_pair() -> None:
    for change in ({"identity": "bb"}, {"model": "n"}, {"transport": "tcp"}):
        other = member("d9", "decode", **dict[str, Any](change))
        assert pairs(P0, other) == []
        assert ids(choose([P0, other], {}, 10)) == (None, "d9")
    assert pairs(member("p9", "prefill", control_address=None), D0) == []


def test_encoder_nodes_never_serve_prompts() -> None:
    encoder = member("a0", "encode", encoder_identity="ee")
    assert choose([encoder], {}, 10) is None
    assert ids(choose([encoder, P0, D0], {}, 10)) == ("p0", "d0")
    assert pairs(encoder, P0, D0) == [("p0", "d0")]


def test_encoders_pair_with_nodes_of_an_equal_encoder_that_know_them() -> None:
    encoder = member("e0", "encode", identity="ee", encoder_identity="ee", transport="tcp")
    here: dict[str, Any] = {"transport": "tcp", "encoder_identity": "ee"}
    p, d = member("p5", "prefill", **here), member("d5", "decode", **here)
    assert encoder_pairs(encoder, p, d) == [("e0", "p5"), ("e0", "d5")]
    for change in ({"encoder_identity": "ef"}, {"transport": "nixl"}, {"model": "n"}):
        other = member("p6", "prefill", **{**here, **dict[str, Any](change)})
        assert encoder_pairs(encoder, other) == []
    nobody = {**here, "encoder_identity": ""}
    assert encoder_pairs(member("e1", "encode", **nobody), member("p7", "prefill", **nobody)) == []
    p.told = frozenset()
    assert encoder_pairs(encoder, p) == []
    assert encoder.info.control_address is not None
    p.told = frozenset({encoder.info.control_address})
    assert encoder_pairs(encoder, p) == [("e0", "p5")]


def test_a_target_pairs_only_with_sources_it_was_told_of() -> None:
    target = member("d7", "decode")
    target.told = frozenset()
    assert pairs(P0, target) == []
    assert P0.info.control_address is not None
    target.told = frozenset({P0.info.control_address})
    assert pairs(P0, P1, target) == [("p0", "d7")]
