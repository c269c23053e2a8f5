"""``kv_transfer_params``: vLLM's field names to a `TransferSpec`, and a source's answer back.

A proxy written for vLLM asks the source with ``do_remote_decode``, and pastes the source's answer
unchanged into the target's request, where it says ``do_remote_prefill``. `remote_request_id`
carries our transfer id. Whether the peer may be dialled is decided by the core, by membership.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvbaton.connectors.address import address_of, host_of
from kvbaton.errors import RequestError
from kvbaton.messages.engine import PrefixAt, TransferSpec

PARAM = "kv_transfer_params"

Hex128 = Annotated[str, Meta(pattern="^[0-9a-fA-F]*$", min_length=32, max_length=32)]
Small = Annotated[int, Meta(ge=0, lt=1 << 31)]
BlockId = Annotated[int, Meta(ge=0, lt=1 << 62)]


class RemotePrefix(Struct, kw_only=True):
    """Where the first tokens of a prompt are cached; this node is to fetch them.

    Attributes:
        remote_host: of that node's control channel.
        remote_port: of that node's control channel.
        num_tokens: that it is thought to hold; of those, whole blocks are asked for.
    """

    remote_host: Annotated[str, Meta(max_length=253)]
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    num_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]


class KvTransferParams(Struct, kw_only=True):
    """The fields that we read; others are ignored.

    Attributes:
        do_remote_decode: this node is the source.
        do_remote_prefill: this node is the target.
        transfer_id: 32 hex digits, as minted by a router.
        attempt: as minted by a router.
        remote_engine_id: the source's node id.
        remote_host: of the source's control channel.
        remote_port: of the source's control channel.
        remote_request_id: the transfer id as the source answered it.
        remote_block_ids: type-checked, else ignored: a target reserves its own blocks.
        tp_size: type-checked, else ignored: ranks are exchanged between the nodes.
        remote_prefix: ours; it goes with any part in a hand-over but the target's, and with none.
    """

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer_id: Hex128 | None = None
    attempt: Small | None = None
    remote_engine_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    remote_host: Annotated[str, Meta(max_length=253)] | None = None
    remote_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    remote_request_id: Hex128 | None = None
    remote_block_ids: list[list[BlockId]] | None = None
    tp_size: Annotated[int, Meta(ge=1, le=4096)] | None = None
    remote_num_tokens: Small | None = None
    remote_prefix: RemotePrefix | None = None


def parse_transfer(params: dict[str, Any] | None) -> tuple[TransferSpec | None, PrefixAt | None]:
    """A request's part in a hand-over, and who has the first tokens of its prompt.

    Each is None if there is none.

    Raises:
        RequestError: a field is missing or wrong (400, naming it), or both roles are asked for.
    """
    if not params:
        return None, None
    try:
        fields = msgspec.convert(params, KvTransferParams)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at ")
        field = where.strip("`").removeprefix("$.")
        raise RequestError(
            f"{PARAM}: {reason} at {field or 'the top'}",
            param=f"{PARAM}.{field}" if field else PARAM,
        ) from error
    prefix = None
    if (named := fields.remote_prefix) is not None:
        peer = _address(named.remote_host, named.remote_port, "remote_prefix.remote_host")
        prefix = PrefixAt(peer=peer, num_tokens=named.num_tokens)
    if fields.do_remote_decode and fields.do_remote_prefill:
        raise RequestError(
            "do_remote_decode and do_remote_prefill exclude each other",
            param=f"{PARAM}.do_remote_prefill",
        )
    if fields.do_remote_decode:
        minted = fields.transfer_id
        spec = TransferSpec(
            role="source",
            transfer_id=secrets.token_bytes(16) if minted is None else bytes.fromhex(minted),
            attempt=fields.attempt or 0,
        )
        return spec, prefix
    return _target(fields) if fields.do_remote_prefill else None, prefix


def _address(host: str, port: int, field: str) -> str:
    try:
        return address_of(host, port)
    except ValueError as error:
        raise RequestError(f"{field}: {error}", param=f"{PARAM}.{field}") from None


def check_item_transfer(transfer: TransferSpec | None, where: str) -> None:
    """Check an item's part in a hand-over, which comes as it is.

    Raises:
        RequestError: naming `where`; it says no address of a source.
    """
    if transfer is None:
        return
    if transfer.role != "target" or tcp_host(transfer.peer or "") is None:
        raise RequestError(
            "an item's transfer needs the role target, and a peer of the form tcp://host:port",
            param=where,
        )


def tcp_host(address: str) -> str | None:
    """The host of ``tcp://host:port``, without brackets; None if an address is not of that form."""
    try:
        return host_of(address)
    except ValueError:
        return None


def source_params(
    transfer_id: bytes,
    attempt: int,
    *,
    node_id: str,
    control_address: str,
    tp_size: int,
    num_tokens: int,
) -> dict[str, Any]:
    """A source's answer, ready to be pasted into the target's request.

    Args:
        transfer_id: 16 bytes.
        attempt: of the transfer.
        node_id: of this node.
        control_address: ``tcp://host:port`` as peers reach it.
        tp_size: ranks of this node.
        num_tokens: prompt tokens with valid KV.
    """
    host, _, port = control_address.removeprefix("tcp://").rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": node_id,
        "remote_host": host.strip("[]"),
        "remote_port": int(port),
        "remote_request_id": transfer_id.hex(),
        "remote_block_ids": [[]],
        "tp_size": tp_size,
        "transfer_id": transfer_id.hex(),
        "attempt": attempt,
        "remote_num_tokens": num_tokens,
    }


def _target(fields: KvTransferParams) -> TransferSpec:
    for name in ("remote_engine_id", "remote_host", "remote_port"):
        if getattr(fields, name) is None:
            raise _missing(name)
    peer = _address(fields.remote_host or "", fields.remote_port or 0, "remote_host")
    named = fields.remote_request_id or fields.transfer_id
    if named is None:
        raise _missing("remote_request_id")
    if fields.transfer_id is not None and fields.transfer_id.lower() != named.lower():
        raise RequestError(
            "transfer_id and remote_request_id name different transfers",
            param=f"{PARAM}.transfer_id",
        )
    return TransferSpec(
        role="target",
        transfer_id=bytes.fromhex(named),
        attempt=fields.attempt or 0,
        peer=peer,
        peer_node=fields.remote_engine_id,
    )


def _missing(name: str) -> RequestError:
    return RequestError(
        f"do_remote_prefill needs {name}; paste the prefill node's answer unchanged",
        param=f"{PARAM}.{name}",
    )
