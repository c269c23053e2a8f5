"""Who encodes an item follows from what is known: no socket needed."""

from __future__ import annotations

import dataclasses
from array import array
from collections import Counter

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kvbaton.messages.engine import AddRequest, Item, SamplingParams
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.choose import HANDOVER_S, UNMEASURED_ROWS, with_encoders
from kvbaton.router.chooser import RouteChooser
from kvbaton.router.config import RoutingPolicy
from kvbaton.router.costs import CostModel
from kvbaton.router.encoded_items import EncodedItems
from kvbaton.router.loads import NodeLoad, NodeLoads
from kvbaton.router.membership import Member, Membership, NodeState, ReadyNodes
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.nodes import KnownNodes
from kvbaton.router.policies import load_policy
from kvbaton.router.route import Route

IDENTITY = "ee"


def member(node_id: str, role: str, encodes: bool = True, **load: float) -> Member:
    info = NodeInfo(
        node_id=node_id,
        generation="1",
        role=role,
        url=f"http://127.0.0.1/{node_id}",
        model="m",
        control_address=f"tcp://127.0.0.1:{sum(map(ord, node_id))}",
        encoder_identity=IDENTITY,
        encodes=encodes,
        load=load,
    )
    return Member(info, static=True, heard_at=0.0, state=NodeState.READY)


P, D = member("p0", "prefill"), member("d0", "decode")
ENCODERS = [member(f"e{i}", "encode") for i in range(4)]


def item(number: int, rows: int = 1000) -> Item:
    return Item(start=number, length=rows, digest=bytes([number]) * 32, grid=(1, 2, 2))


def chosen(
    items: list[Item],
    encoders: list[Member],
    loads: dict[str, NodeLoad] | None = None,
    p: Member = P,
    **how: object,
) -> list[str | None]:
    """Node ids of who encodes each item."""
    route = Route(D.info, p.info)
    found = with_encoders(route, items, ReadyNodes([p, D, *encoders]), loads or {}, **how)  # type: ignore[arg-type]
    assert (found.target, found.source) == (D.info, p.info)
    return [None if encoder is None else encoder.node_id for encoder in found.encoders]


def test_without_encoder_nodes_all_is_encoded_where_it_is_needed() -> None:
    assert chosen([item(1), item(2)], []) == [None, None]
    assert chosen([item(1)], ENCODERS[:1], avoid={"e0"}) == [None]


def test_equal_items_of_different_prompts_go_to_the_same_node_and_others_spread() -> None:
    where = {n: chosen([item(n)], ENCODERS) for n in range(64)}
    assert all(chosen([item(n)], ENCODERS[::-1]) == node for n, node in where.items())
    counts = Counter(node for (node,) in where.values())
    assert len(counts) == 4
    assert max(counts.values()) < 32


def test_what_the_prefill_node_holds_is_not_encoded_elsewhere() -> None:
    items = [item(1), item(2), item(1)]
    held = {items[0].digest}
    assert chosen(items, ENCODERS[:1], held=held) == [None, "e0", None]
    assert chosen(items, ENCODERS[:1], min_rows=1, held=held) == ["e0", "e0", None]
    blind = member("p0", "prefill", encodes=False)  # if it has lost it, it can't make it
    assert chosen(items, ENCODERS[:1], p=blind, held=held) == ["e0", "e0", None]


def test_items_are_thought_to_be_where_their_prompts_were_computed() -> None:
    known, p = EncodedItems(), replace(P.info, max_model_len=3 * 1024)
    items = [item(number) for number in range(5)]  # of 1,024 rows in whole blocks
    known.computed(p, "", items[:3])
    assert known.at(p, "", items) == {i.digest for i in items[:3]}
    assert not known.at(D.info, "", items)
    assert not known.at(p, "salt", items), "other tenants' outputs are others"
    assert not known.at(replace(p, generation="2"), "", items), "it began anew, with nothing"
    known.computed(p, "", items[:1])
    known.computed(p, "", items[3:4])
    assert known.at(p, "", items) == {i.digest for i in (items[0], items[2], items[3])}
    known.computed(replace(p, max_model_len=1000), "", items[4:])
    assert not known.at(p, "", items)


class Present(KnownNodes):
    """Nodes that are there, whatever happens."""

    def unreachable(self, node: NodeInfo, error: str) -> None:
        raise AssertionError("nobody is asked")


@pytest.mark.parametrize(("min_rows", "later"), [(None, [None]), (1, ["e0"])])
def test_who_had_an_image_of_late_has_it_still(
    min_rows: int | None, later: list[str | None]
) -> None:
    """From its first token on, and never with `--min-encode-rows`: then encoder nodes get all."""
    nodes = Present(Membership(), None)
    nodes.membership.show(
        dataclasses.replace(m, info=replace(m.info, max_model_len=4096, identity="id"))
        for m in (P, D, ENCODERS[0])
    )
    settings = RoutingPolicy(policy="least-loaded", min_encode_rows=min_rows)
    metrics = RouterMetrics(CollectorRegistry())
    chooser = RouteChooser(nodes, NodeLoads(), load_policy(settings, CostModel()), metrics)

    def encoders(name: str, salt: str = "") -> list[str | None]:
        request = AddRequest(
            request_id=name,
            token_ids=array("I", (7,) * 1100),
            params=SamplingParams(max_tokens=4),
            deadline_s=60.0,
            cache_salt=salt,
            items=(item(1),),
        )
        route = chooser.route(request, 1100, request.items, frozenset())
        assert route is not None
        return [None if node is None else node.node_id for node in route.encoders]

    assert encoders("first") == encoders("before its token") == ["e0"]
    chooser.first_token("first", 0.1)
    assert encoders("second") == later
    assert encoders("of another tenant", "salt") == ["e0"]


def test_items_that_a_node_can_not_keep_go_elsewhere() -> None:
    def sized(node_id: str, rows: int) -> Member:
        base = member(node_id, "encode")
        return Member(replace(base.info, max_model_len=rows + 1), True, 0.0, NodeState.READY)

    small, large = sized("e0", 992), sized("e1", 1024)
    assert {*chosen([item(n, 993) for n in range(20)], [small, large])} == {"e1"}
    assert chosen([item(1, 1025)], [small, large]) == [None]
    assert chosen([item(1, 992)], [small]) == ["e0"]


def test_a_node_that_leaves_moves_only_its_own_items() -> None:
    for n in range(64):
        before = chosen([item(n)], ENCODERS)
        after = chosen([item(n)], ENCODERS[1:])
        assert before == after or before == ["e0"]


def test_the_second_of_two_equal_items_needs_nobody() -> None:
    first, other, again = chosen([item(1), item(2), item(1)], ENCODERS)
    assert first is not None
    assert other is not None
    assert again is None


def test_an_overloaded_favourite_is_passed_over() -> None:
    (favourite,) = chosen([item(1)], ENCODERS)
    assert favourite is not None
    light = {favourite: NodeLoad(rows=1000)}
    assert chosen([item(1)], ENCODERS, light) == [favourite], "an item more is no overload"
    heavy = {e.info.node_id: NodeLoad(rows=2000) for e in ENCODERS}
    heavy[favourite] = NodeLoad(rows=9000)
    heavy["e9"] = NodeLoad()
    least = min(node for node in heavy if node not in (favourite, "e9"))
    assert chosen([item(1)], ENCODERS, heavy) == [least]


def test_one_prompt_with_many_items_spreads_them() -> None:
    counts = Counter(chosen([item(n) for n in range(40)], ENCODERS))
    assert max(counts.values()) <= 14
    assert set(counts) == {"e0", "e1", "e2", "e3"}


def test_before_anything_is_measured_size_decides() -> None:
    small, large = item(1, UNMEASURED_ROWS - 1), item(2, UNMEASURED_ROWS)
    assert chosen([small, large], ENCODERS[:1]) == [None, "e0"]


@pytest.mark.parametrize(("least", "expected"), [(0, ["e0"] * 2), (50, [None, "e0"])])
def test_a_limit_of_the_user_decides_alone(least: int, expected: list[str | None]) -> None:
    fast = member("e0", "encode", encoder_row_s=1e-9)
    assert chosen([item(1, 49), item(2, 50)], [fast], min_rows=least) == expected


def test_what_is_faster_here_than_a_hand_over_stays() -> None:
    row_s = 1e-5
    p, e = member("p0", "prefill", encoder_row_s=row_s), member("e0", "encode", encoder_row_s=row_s)
    edge = round(HANDOVER_S / row_s)
    assert chosen([item(1, edge - 1)], [e], p=p) == [None]
    assert chosen([item(1, edge + 1)], [e], p=p) == ["e0"]


def test_queues_count_on_both_sides() -> None:
    p = member("p0", "prefill", encoder_row_s=1e-5, prompt_token_s=1e-4)
    e = member("e0", "encode", encoder_row_s=1e-5)
    small = [item(1, 100)]
    assert chosen(small, [e], p=p) == [None]
    assert chosen(small, [e], {"p0": NodeLoad(prompt_tokens=100)}, p=p) == ["e0"]
    assert chosen(small, [e], {"p0": NodeLoad(rows=1000)}, p=p) == ["e0"]
    assert chosen([item(1, 1000)], [e], {"e0": NodeLoad(rows=5000)}, p=p) == [None]


def test_several_small_items_are_shared_out() -> None:
    p, e = member("p0", "prefill", encoder_row_s=1e-5), member("e0", "encode", encoder_row_s=1e-5)
    where = chosen([item(n, 100) for n in range(12)], [e], p=p)
    assert where[0] is None
    assert "e0" in where


def test_a_slow_node_with_a_fast_encoder_beside_it_encodes_nothing() -> None:
    p, e = member("p0", "prefill", encoder_row_s=1e-2), member("e0", "encode", encoder_row_s=1e-5)
    assert chosen([item(1, 10)], [e], p=p) == ["e0"]


def test_a_node_without_an_encoder_needs_one_for_the_smallest_item() -> None:
    p = member("p0", "prefill", encodes=False)
    assert chosen([item(1, 1)], ENCODERS[:1], p=p) == ["e0"]
    assert chosen([item(1, 1)], ENCODERS[:1], p=p, min_rows=1000) == ["e0"]
