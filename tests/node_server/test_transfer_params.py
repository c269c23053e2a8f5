import contextlib
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.errors import RequestError
from kvbaton.messages.engine import PrefixAt, TransferSpec
from kvbaton.server.transfer_params import parse_transfer, source_params

ID = "0123456789abcdef" * 2
TARGET: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_request_id": ID,
    "remote_block_ids": [[1, 2], []],
    "tp_size": 2,
}


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": False, "do_remote_prefill": False, **dict.fromkeys(["remote_host"])},
        {"something_else": object},
        {"do_remote_prefill": None},
    ],
)
def test_no_part_in_a_hand_over(params: Any) -> None:
    assert parse_transfer(params) == (None, None)


def test_a_source_as_a_vllm_proxy_asks_for_it() -> None:
    nulls = dict.fromkeys(["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"])
    ask = {"do_remote_decode": True, "do_remote_prefill": False, **nulls}
    (first, _), (second, _) = parse_transfer(ask), parse_transfer(ask)
    assert first is not None
    assert second is not None
    assert (first.role, first.attempt, first.peer) == ("source", 0, None)
    assert len(first.transfer_id) == 16
    assert first.transfer_id != second.transfer_id


def test_a_source_as_our_router_asks_for_it() -> None:
    spec, _ = parse_transfer({"do_remote_decode": True, "transfer_id": ID.upper(), "attempt": 3})
    assert spec == TransferSpec(role="source", transfer_id=bytes.fromhex(ID), attempt=3)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.1", "tcp://10.0.0.1:5600"),
        ("prefill-0.ns.svc", "tcp://prefill-0.ns.svc:5600"),
        ("::1", "tcp://[::1]:5600"),
        ("[fe80::2]", "tcp://[fe80::2]:5600"),
        ("fe80::2%eth0", "tcp://[fe80::2%eth0]:5600"),
        ("x" * 240, f"tcp://{'x' * 240}:5600"),
    ],
)
def test_a_target(host: str, address: str) -> None:
    spec, _ = parse_transfer({**TARGET, "remote_host": host, "unknown": {"x": 1}})
    assert spec == TransferSpec(
        role="target", transfer_id=bytes.fromhex(ID), peer=address, peer_node="p1"
    )


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:5600", "tcp://[::1]:77", "tcp://node-1:1"])
def test_a_sources_answer_can_be_pasted(address: str) -> None:
    answer = source_params(
        bytes.fromhex(ID), 2, node_id="p1", control_address=address, tp_size=4, num_tokens=99
    )
    spec, prefix = parse_transfer(answer)
    assert spec == TransferSpec(
        role="target", transfer_id=bytes.fromhex(ID), attempt=2, peer=address, peer_node="p1"
    )
    assert prefix is None
    assert answer["remote_block_ids"] == [[]]
    assert (answer["tp_size"], answer["remote_num_tokens"]) == (4, 99)


@pytest.mark.parametrize(
    "field", ["remote_engine_id", "remote_host", "remote_port", "remote_request_id"]
)
@pytest.mark.parametrize("gone", [True, False])
def test_a_missing_field_is_named(field: str, gone: bool) -> None:
    params = {k: v for k, v in TARGET.items() if k != field} if gone else {**TARGET, field: None}
    with pytest.raises(RequestError, match=field) as caught:
        parse_transfer(params)
    assert (caught.value.status, caught.value.param) == (400, f"kv_transfer_params.{field}")


WRONG: list[tuple[str, Any]] = [
    ("do_remote_prefill", "true"),
    ("do_remote_prefill", 1),
    ("do_remote_decode", True),
    ("do_remote_decode", "no"),
    ("remote_port", 0),
    ("remote_port", -1),
    ("remote_port", 65536),
    ("remote_port", 10**30),
    ("remote_port", "5600"),
    ("remote_port", True),
    ("remote_port", 5600.5),
    ("remote_host", 7),
    ("remote_host", ""),
    ("remote_host", "a b"),
    ("remote_host", "host/path"),
    ("remote_host", "user@host"),
    ("remote_host", "host:1"),
    ("remote_host", "ho\nst"),
    ("remote_host", "x" * 300),
    ("remote_host", "x" * 253),
    ("remote_host", "::1%?"),
    ("remote_host", "::1%a b"),
    ("remote_engine_id", 5),
    ("remote_engine_id", ""),
    ("remote_engine_id", "x" * 300),
    ("remote_request_id", "chatcmpl-1"),
    ("remote_request_id", ID + "\n"),
    ("remote_request_id", ID + "ab"),
    ("remote_request_id", 5),
    ("transfer_id", "f" * 32),
    ("transfer_id", "f" * 31),
    ("transfer_id", 5),
    ("attempt", "0"),
    ("attempt", -1),
    ("attempt", 2**31),
    ("attempt", 10**400),
    ("remote_block_ids", 5),
    ("remote_block_ids", [5]),
    ("remote_block_ids", [[-1]]),
    ("remote_block_ids", [["a"]]),
    ("remote_block_ids", [[2**70]]),
    ("tp_size", 0),
    ("tp_size", -1),
    ("tp_size", 2**31),
    ("tp_size", "2"),
    ("remote_num_tokens", "1"),
    ("remote_num_tokens", -1),
    ("remote_num_tokens", 2**31),
    ("remote_num_tokens", 10**400),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse_transfer({**TARGET, field: value})
    named = "do_remote_prefill" if (field, value) == ("do_remote_decode", True) else field
    assert str(caught.value.param).startswith(f"kv_transfer_params.{named}")
    assert caught.value.status == 400


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats().filter(math.isfinite)
    | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(deadline=None, max_examples=300)
@given(changes=st.dictionaries(st.sampled_from(sorted(TARGET)), json_values, max_size=4))
def test_anything_is_taken_or_refused(changes: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):
        spec, _ = parse_transfer({**TARGET, **changes})
        assert spec is None or spec.role in ("source", "target")
        data = msgspec.msgpack.encode(spec)
        assert msgspec.msgpack.decode(data, type=TransferSpec | None) == spec, "a core reads it"


def test_a_prefix_that_another_node_holds() -> None:
    named = {"remote_host": "::1", "remote_port": 77, "num_tokens": 48}
    asked = {"do_remote_decode": True, "remote_prefix": named}
    spec, prefix = parse_transfer(asked)
    assert spec is not None
    assert prefix == PrefixAt(peer="tcp://[::1]:77", num_tokens=48)
    assert parse_transfer({"remote_prefix": named}) == (None, prefix)


@pytest.mark.parametrize(
    ("field", "value"),
    [("remote_host", "a/b"), ("remote_port", 0), ("num_tokens", 0), ("num_tokens", None)],
)
def test_a_prefix_that_cannot_be(field: str, value: Any) -> None:
    named = {"remote_host": "h", "remote_port": 77, "num_tokens": 48, field: value}
    with pytest.raises(RequestError) as raised:
        parse_transfer({"remote_prefix": named})
    assert raised.value.param == f"kv_transfer_params.remote_prefix.{field}"
