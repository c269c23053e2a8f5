"""Membership: events in, states out, on an invented clock."""

from __future__ import annotations

import pytest

from kvbaton.errors import RequestError
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.membership import Membership, MembershipTimers, State

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


def state(membership: Membership, node_id: str = "d0") -> State:
    return membership.members[node_id].state


def make_ready(membership: Membership, node: NodeInfo, now: float = 0.0) -> None:
    membership.register(node, now)
    membership.probed(node.node_id, node.generation, None, now)


def test_a_node_is_ready_once_it_has_answered_a_probe(membership: Membership) -> None:
    _, changes = membership.register(info(), 0.0)
    assert [change.new for change in changes] == [State.STARTING]
    assert membership.ready() == []
    [change] = membership.probed("d0", "1", None, 0.1)
    assert (change.old, change.new) == (State.STARTING, State.READY)
    assert [member.info.node_id for member in membership.ready()] == ["d0"]


def test_a_heartbeat_changes_nothing(membership: Membership) -> None:
    make_ready(membership, info())
    _, changes = membership.register(info(), 1.0)
    assert changes == []
    assert state(membership) is State.READY


def test_encoder_nodes_are_members_but_serve_no_prompts(membership: Membership) -> None:
    make_ready(membership, info("e0", role="encode", max_model_len=33))
    assert len(membership.ready()) == 1
    assert (membership.serving(), membership.max_model_len()) == ([], None)
    told, _ = membership.register(info("p0", role="prefill", max_model_len=99, vocab_size=512), 0.0)
    assert told.control_addresses == (control_address("e0"),)
    membership.probed("p0", "1", None, 0.1)
    assert [m.info.node_id for m in membership.serving()] == ["p0"]
    assert (membership.max_model_len(), membership.vocab_size()) == (99, 512)


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
    assert state(membership) is State.READY
    [change] = membership.probed("d0", "1", "refused", 0.5, answered=False)
    assert (change.new, change.lost, change.reason) == (State.UNHEALTHY, True, "refused")
    membership.probed("d0", "1", None, 0.6)
    assert state(membership) is State.READY


def test_a_node_that_says_it_is_unhealthy_is_not_lost(membership: Membership) -> None:
    make_ready(membership, info())
    changes = [c for _ in range(3) for c in membership.probed("d0", "1", "503", 0.5)]
    assert [(c.new, c.lost) for c in changes] == [(State.UNHEALTHY, False)]


def test_silence_makes_it_unhealthy_and_then_forgotten(membership: Membership) -> None:
    make_ready(membership, info())
    assert membership.tick(4.9) == []
    membership.tick(5.0)
    assert state(membership) is State.UNHEALTHY
    membership.probed("d0", "1", None, 6.0)
    assert state(membership) is State.UNHEALTHY, "a probe does not stand for heartbeats"
    membership.register(info(), 7.0)
    membership.probed("d0", "1", None, 7.0)
    assert state(membership) is State.READY
    [change] = [c for c in membership.tick(67.0) if c.new is State.GONE]
    assert change.node_id == "d0"
    assert membership.members == {}
    membership.register(info(), 68.0)
    assert state(membership) is State.STARTING, "who was only silent may come back"


def test_a_new_generation_replaces_the_old_and_loses_its_requests(membership: Membership) -> None:
    make_ready(membership, info())
    _, changes = membership.register(info(generation="2"), 1.0)
    assert [(c.new, c.lost) for c in changes] == [(State.GONE, True), (State.STARTING, False)]
    assert membership.probed("d0", "1", None, 1.0) == [], "the old life's probe counts for nothing"
    assert state(membership) is State.STARTING


def test_draining_lasts_until_the_node_leaves(membership: Membership) -> None:
    make_ready(membership, info())
    membership.drain("d0")
    assert membership.ready() == []
    membership.register(info(), 1.0)
    membership.probed("d0", "1", None, 1.0)
    membership.unreachable("d0", "1", "refused")
    assert state(membership) is State.DRAINING
    make_ready(membership, info(generation="2"), 2.0)
    assert state(membership) is State.READY


def test_a_removed_generation_never_comes_back(membership: Membership) -> None:
    make_ready(membership, info())
    membership.remove("d0")
    with pytest.raises(RequestError, match="removed") as caught:
        membership.register(info(), 1.0)
    assert caught.value.status == 410
    make_ready(membership, info(generation="2"), 2.0)
    assert state(membership) is State.READY
    with pytest.raises(RequestError) as unknown:
        membership.remove("nobody")
    assert unknown.value.status == 404


def test_what_a_node_announces_of_itself_counts(membership: Membership) -> None:
    membership.register(info(state="loading"), 0.0)
    assert state(membership) is State.LOADING
    assert membership.probe_targets() == []
    membership.register(info(), 1.0)
    assert state(membership) is State.STARTING
    membership.probed("d0", "1", None, 1.0)
    membership.register(info(state="draining"), 2.0)
    assert state(membership) is State.DRAINING


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"role": "chef"}, 400, "chef"),
        ({"url": "ftp://127.0.0.1"}, 400, "http"),
        ({"url": "http://10.0.0.1:80"}, 403, "--cluster-key"),
        ({"node_id": "a/b"}, 400, "slash"),
        ({"control_address": "tcp://127.0.0.1"}, 400, "control_address"),
        ({"control_address": "tcp://127.0.0.1:x"}, 400, "control_address"),
        ({"control_address": "tcp://127.0.0.1:99999"}, 400, "control_address"),
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
    with pytest.raises(RequestError, match="'a'") as caught:
        membership.register(info("d1", model="b"), 0.0)
    assert caught.value.status == 409


def test_a_static_node_is_asked_who_it_is(membership: Membership) -> None:
    membership.add_static("http://127.0.0.1:9", "decode", 0.0)
    url = "http://127.0.0.1:9"
    for _ in range(5):
        membership.probed(url, "", "refused", 1.0, answered=False)
    assert state(membership, url) is State.STARTING, "it may still be loading"
    membership.identified(url, info("d5", url="http://0.0.0.0:9"), 2.0)
    membership.probed("d5", "1", None, 2.0)
    assert set(membership.members) == {"d5"}
    assert membership.members["d5"].info.url == url
    assert state(membership, "d5") is State.READY
    membership.tick(1000.0)
    assert state(membership, "d5") is State.READY, "nobody expects heartbeats of it"
    membership.identified(url, info("d5", generation="2"), 1001.0)
    assert state(membership, "d5") is State.STARTING


def test_a_static_node_of_the_wrong_role_is_not_used(membership: Membership) -> None:
    membership.add_static("http://127.0.0.1:9", "prefill", 0.0)
    [change] = membership.identified("http://127.0.0.1:9", info("d5"), 1.0)
    assert change.new is State.UNHEALTHY
    assert "is a decode node" in change.reason
