"""Membership: events in, states out, on an invented clock."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.errors import RequestError
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.config import MembershipTimers
from kvbaton.router.membership import MAX_LENGTH, Membership, NodeState

TIMERS = MembershipTimers(heartbeat_s=1.0, missed=5, failures=3, forget_s=60.0)


def control_address(node_id: str) -> str:
    return f"tcp://127.0.0.1:{7000 + sum(node_id.encode())}"


def info(node_id: str = "d0", **fields: object) -> NodeInfo:
    defaults: dict[str, object] = {
        "generation": "1",
        "role": "decode",
        "url": f"http://127.0.0.1:1/{node_id}",
        "model": "m",
        "control_address": control_address(node_id),
    }
    return NodeInfo(node_id=node_id, **{**defaults, **fields})  # type: ignore[arg-type]


@pytest.fixture
def membership() -> Membership:
    return Membership(TIMERS)


def state(membership: Membership, node_id: str = "d0") -> NodeState:
    return membership.members[node_id].state


def make_ready(membership: Membership, node: NodeInfo, now: float = 0.0) -> None:
    membership.register(node, now)
    membership.probed(node.node_id, node.generation, None, now)


def test_a_node_is_ready_once_it_has_answered_a_probe(membership: Membership) -> None:
    _, changes = membership.register(info(), 0.0)
    assert [change.new for change in changes] == [NodeState.STARTING]
    assert membership.ready().nodes == []
    [change] = membership.probed("d0", "1", None, 0.1)
    assert (change.old, change.new) == (NodeState.STARTING, NodeState.READY)
    assert [node.node_id for node in membership.ready().nodes] == ["d0"]


def test_a_model_in_a_deep_folder_has_a_long_name(membership: Membership) -> None:
    told = msgspec.json.encode(info(model="/deep" * 200))
    make_ready(membership, msgspec.json.decode(told, type=NodeInfo))
    assert state(membership) is NodeState.READY


def test_a_heartbeat_changes_nothing(membership: Membership) -> None:
    make_ready(membership, info())
    _, changes = membership.register(info(), 1.0)
    assert changes == []
    assert state(membership) is NodeState.READY


def test_a_router_that_hears_nobody_any_more_goes_by_probes(membership: Membership) -> None:
    """While it finished its requests, all nodes were lost to those that had to be tried again."""
    make_ready(membership, info())
    membership.hears = False
    assert membership.tick(1000.0) == []
    assert state(membership) is NodeState.READY
    for _ in range(TIMERS.failures):
        membership.probed("d0", "1", "no answer", 1000.0, answered=False)
    assert state(membership) is NodeState.UNHEALTHY
    membership.probed("d0", "1", None, 1001.0)
    assert state(membership) is NodeState.READY


def test_encoder_nodes_are_members_but_serve_no_prompts(membership: Membership) -> None:
    make_ready(membership, info("e0", role="encode", max_model_len=33))
    assert len(membership.ready().nodes) == 1
    assert (membership.ready().serving, membership.ready().max_model_len) == ([], MAX_LENGTH)
    told, _ = membership.register(info("p0", role="prefill", max_model_len=99, vocab_size=512), 0.0)
    assert told.control_addresses == (control_address("e0"),)
    membership.probed("p0", "1", None, 0.1)
    assert [node.node_id for node in membership.ready().serving] == ["p0"]
    assert (membership.ready().max_model_len, membership.ready().vocab_size) == (99, 512)


def test_members_are_told_of_all_others(membership: Membership) -> None:
    first, _ = membership.register(info("d0"), 0.0)
    assert first.control_addresses == ()
    second, _ = membership.register(info("p0", role="prefill"), 0.0)
    assert second.control_addresses == (control_address("d0"),)
    again, _ = membership.register(info("d0"), 1.0)
    assert again.control_addresses == (control_address("p0"),)
    assert again.heartbeat_s == TIMERS.heartbeat_s
    assert membership.members["d0"].told == frozenset({control_address("p0")})


def test_three_failed_probes_in_a_row_make_it_unhealthy_and_one_good_brings_it_back(
    membership: Membership,
) -> None:
    make_ready(membership, info())
    for _ in range(2):
        assert membership.probed("d0", "1", "refused", 0.5, answered=False) == []
    membership.probed("d0", "1", None, 0.5)
    for _ in range(2):
        membership.probed("d0", "1", "refused", 0.5, answered=False)
    assert state(membership) is NodeState.READY
    [change] = membership.probed("d0", "1", "refused", 0.5, answered=False)
    assert (change.new, change.lost, change.reason) == (NodeState.UNHEALTHY, True, "refused")
    membership.probed("d0", "1", None, 0.6)
    assert state(membership) is NodeState.READY


def test_a_node_that_says_it_is_unhealthy_is_not_lost(membership: Membership) -> None:
    make_ready(membership, info())
    changes = [c for _ in range(3) for c in membership.probed("d0", "1", "503", 0.5)]
    assert [(c.new, c.lost) for c in changes] == [(NodeState.UNHEALTHY, False)]


def test_nodes_that_never_hand_over_are_told_why(membership: Membership) -> None:
    make_ready(membership, info("p0", role="prefill", identity="aa", transport="nixl"))
    make_ready(membership, info("d0", identity="aa", transport="nixl"))
    assert membership.misfits("d0") == membership.misfits("p0") == []
    make_ready(membership, info("d1", identity="bb", transport="nixl"))
    [line] = membership.misfits("d1")
    assert line.startswith("never hands over with p0: other weights")
    assert "--kv-cache-dtype" in line
    make_ready(membership, info("d2", identity="aa", transport="tcp"))
    [line] = membership.misfits("d2")
    assert line == "never hands over with p0: transport 'tcp' against 'nixl'"
    make_ready(membership, info("e0", role="encode", identity="cc"))
    assert membership.misfits("e0") == []


def test_silence_makes_it_unhealthy_and_then_forgotten(membership: Membership) -> None:
    make_ready(membership, info())
    assert membership.tick(4.9) == []
    membership.tick(5.0)
    assert state(membership) is NodeState.UNHEALTHY
    membership.probed("d0", "1", None, 6.0)
    assert state(membership) is NodeState.UNHEALTHY, "a probe does not stand for heartbeats"
    membership.register(info(), 7.0)
    membership.probed("d0", "1", None, 7.0)
    assert state(membership) is NodeState.READY
    [change] = [c for c in membership.tick(67.0) if c.new is NodeState.GONE]
    assert change.node_id == "d0"
    assert membership.members == {}
    membership.register(info(), 68.0)
    assert state(membership) is NodeState.STARTING, "who was only silent may come back"


def test_a_new_generation_replaces_the_old_and_loses_its_requests(membership: Membership) -> None:
    make_ready(membership, info())
    _, changes = membership.register(info(generation="2"), 1.0)
    assert [(c.new, c.lost) for c in changes] == [
        (NodeState.GONE, True),
        (NodeState.STARTING, False),
    ]
    assert membership.probed("d0", "1", None, 1.0) == [], "the old life's probe counts for nothing"
    assert state(membership) is NodeState.STARTING


def test_draining_lasts_until_the_node_leaves(membership: Membership) -> None:
    make_ready(membership, info())
    membership.drain("d0")
    assert membership.ready().nodes == []
    membership.register(info(), 1.0)
    membership.probed("d0", "1", None, 1.0)
    membership.unreachable("d0", "1", "refused")
    assert state(membership) is NodeState.DRAINING
    make_ready(membership, info(generation="2"), 2.0)
    assert state(membership) is NodeState.READY


def test_a_removed_generation_never_comes_back(membership: Membership) -> None:
    make_ready(membership, info())
    membership.remove("d0")
    with pytest.raises(RequestError, match="removed") as caught:
        membership.register(info(), 1.0)
    assert caught.value.status == 410
    make_ready(membership, info(generation="2"), 2.0)
    assert state(membership) is NodeState.READY
    with pytest.raises(RequestError) as unknown:
        membership.remove("nobody")
    assert unknown.value.status == 404


def test_what_a_node_announces_of_itself_counts(membership: Membership) -> None:
    membership.register(info(state="loading"), 0.0)
    assert state(membership) is NodeState.LOADING
    assert membership.probe_targets() == []
    membership.register(info(), 1.0)
    assert state(membership) is NodeState.STARTING
    membership.probed("d0", "1", None, 1.0)
    membership.register(info(state="draining"), 2.0)
    assert state(membership) is NodeState.DRAINING


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"role": "chef"}, 400, "chef"),
        ({"url": "ftp://127.0.0.1"}, 400, "http"),
        ({"url": "http://[::1"}, 400, "http"),
        ({"url": "http://127.0.0.1:x"}, 400, "http"),
        ({"url": "http://127.0.0.1:70000"}, 400, "http"),
        ({"url": "http://10.0.0.1:80"}, 403, "--cluster-key"),
        ({"node_id": "a/b"}, 400, "slash"),
        ({"control_address": "tcp://127.0.0.1"}, 400, "control_address"),
        ({"control_address": "tcp://127.0.0.1:x"}, 400, "control_address"),
        ({"control_address": "tcp://127.0.0.1:99999"}, 400, "control_address"),
        ({"control_address": ""}, 400, "control_address"),
        ({"engine_address": "tcp://127.0.0.1"}, 400, "engine_address"),
        ({"engine_address": "tcp://[::1%a b]:9"}, 400, "engine_address"),
        ({"engine_address": "ipc://relative"}, 400, "engine_address"),
        ({"engine_address": "tcp://10.0.0.1:9"}, 403, "--cluster-key"),
        ({"control_address": "tcp://127.0.0.1:7000;tcp://evil:1"}, 400, "control_address"),
        ({"control_address": "ipc:///tmp/x"}, 400, "control_address"),
        ({"control_address": "tcp://[::1:7000"}, 400, "control_address"),
        ({"control_address": "tcp://10.0.0.1:7000"}, 403, "--cluster-key"),
    ],
)
def test_bad_registrations_are_refused_by_name(
    membership: Membership, change: dict[str, str], status: int, word: str
) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        membership.register(info(**{"node_id": "d0", **change}), 0.0)
    assert caught.value.status == status
    assert membership.members == {}


def test_only_one_model_is_served(membership: Membership) -> None:
    membership.register(info("d0", model="a"), 0.0)
    told = "'a' until it is restarted, the node 'b'; give both the same --served-model-name"
    with pytest.raises(RequestError, match=told) as caught:
        membership.register(info("d1", model="b"), 0.0)
    assert caught.value.status == 409


def test_a_static_node_is_asked_who_it_is(membership: Membership) -> None:
    membership.add_static("http://127.0.0.1:9", "decode", 0.0)
    url = "http://127.0.0.1:9"
    for _ in range(5):
        membership.probed(url, "", "refused", 1.0, answered=False)
    assert state(membership, url) is NodeState.STARTING, "it may still be loading"
    membership.identified(url, info("d5", url="http://0.0.0.0:9"), 2.0)
    membership.probed("d5", "1", None, 2.0)
    assert set(membership.members) == {"d5"}
    assert membership.members["d5"].info.url == url
    assert state(membership, "d5") is NodeState.READY
    membership.tick(1000.0)
    assert state(membership, "d5") is NodeState.READY, "nobody expects heartbeats of it"
    membership.identified(url, info("d5", generation="2"), 1001.0)
    assert state(membership, "d5") is NodeState.STARTING


def test_a_static_node_of_the_wrong_role_is_not_used(membership: Membership) -> None:
    membership.add_static("http://127.0.0.1:9", "prefill", 0.0)
    [change] = membership.identified("http://127.0.0.1:9", info("d5"), 1.0)
    assert change.new is NodeState.UNHEALTHY
    assert "a node of role 'decode'" in change.reason


# --- two nodes with one id ---


def elsewhere() -> NodeInfo:
    """Another node that was given the id of `info`."""
    return info(generation="2", url="http://127.0.0.1:2/other")


def test_a_living_node_keeps_its_id_and_the_other_is_put_off_by_name(
    membership: Membership,
) -> None:
    make_ready(membership, info())
    for now in (1.0, 2.0, 3.0):
        with pytest.raises(RequestError, match=r"'d0' belongs to the node at .*:1/d0") as caught:
            membership.register(elsewhere(), now)
        assert (caught.value.status, caught.value.code) == (503, "node_id_in_use")
        assert "--node-id" in caught.value.message
        _, changes = membership.register(info(), now)
        assert changes == [], "nothing happens to who was first"
    assert membership.members["d0"].info.generation == "1"


@pytest.mark.parametrize("how", ["unreachable", "silent"])
def test_a_node_on_another_port_takes_over_once_the_old_one_is_dead(
    membership: Membership, how: str
) -> None:
    make_ready(membership, info())
    if how == "unreachable":
        membership.unreachable("d0", "1", "refused")
    _, changes = membership.register(elsewhere(), 1.0 if how == "unreachable" else 5.0)
    assert [(c.new, c.lost) for c in changes] == [
        (NodeState.GONE, True),
        (NodeState.STARTING, False),
    ]
    with pytest.raises(RequestError, match="replaced") as caught:
        membership.register(info(), 6.0)
    assert caught.value.status == 410, "it does not take its place back"
    assert membership.members["d0"].info.generation == "2"


def test_two_static_nodes_with_one_id_do_not_displace_each_other(membership: Membership) -> None:
    urls = "http://127.0.0.1:9", "http://127.0.0.1:10"
    for url in urls:
        membership.add_static(url, "decode", 0.0)
    membership.identified(urls[0], info("d5"), 1.0)
    membership.probed("d5", "1", None, 1.0)
    for _ in range(2):
        membership.identified(urls[1], info("d5", generation="2"), 2.0)
        assert state(membership, "d5") is NodeState.READY
        assert membership.members["d5"].info.url == urls[0]
        second = membership.members[urls[1]]
        assert second.state is NodeState.UNHEALTHY
        assert "'d5' belongs to http://127.0.0.1:9" in second.reason


def test_a_static_node_that_takes_another_id_is_gone_under_the_old_one(
    membership: Membership,
) -> None:
    url = "http://127.0.0.1:9"
    membership.add_static(url, "decode", 0.0)
    membership.identified(url, info("d5"), 1.0)
    changes = membership.identified(url, info("d6", generation="2"), 2.0)
    assert [(c.node_id, c.new) for c in changes] == [
        ("d5", NodeState.GONE),
        ("d6", NodeState.STARTING),
    ]
    assert set(membership.members) == {"d6"}


def test_a_flag_names_a_node_and_nobody_registers_in_its_place(membership: Membership) -> None:
    membership.add_static("http://127.0.0.1:9", "decode", 0.0)
    membership.identified("http://127.0.0.1:9", info("d5"), 1.0)
    with pytest.raises(RequestError, match="flag") as caught:
        membership.register(info("d5", generation="2"), 2.0)
    assert caught.value.status == 409
    other = Membership(TIMERS)
    make_ready(other, info("d5"))
    other.add_static("http://127.0.0.1:9", "decode", 1.0)
    other.identified("http://127.0.0.1:9", info("d5", generation="2"), 2.0)
    assert state(other, "d5") is NodeState.READY
    assert state(other, "http://127.0.0.1:9") is NodeState.UNHEALTHY


def test_a_node_with_a_key_is_told_that_the_router_has_none(membership: Membership) -> None:
    with pytest.raises(RequestError, match="--cluster-key") as caught:
        membership.register(info(engine_address="tcp://127.0.0.1:5"), 0.0)
    assert (caught.value.status, caught.value.param) == (403, "engine_address")
    keyed = Membership(TIMERS, loopback_only=False)
    keyed.register(info(engine_address="tcp://10.0.0.1:5"), 0.0)
    assert state(keyed) is NodeState.STARTING


def test_what_the_router_itself_did_not_hear_is_nobodys_silence(membership: Membership) -> None:
    limit = TIMERS.missed * TIMERS.heartbeat_s
    make_ready(membership, info("d0"))
    membership.tick(0.5)
    membership.stood_still(99.0, 100.0)
    assert membership.tick(100.0) == []
    assert membership.probed("d0", "1", None, 100.0) == []
    assert state(membership) is NodeState.READY
    [change] = membership.tick(99.0 + limit)
    assert (change.new, change.reason) == (NodeState.UNHEALTHY, "heartbeats stopped")
