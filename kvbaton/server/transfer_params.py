"""``kv_transfer_params`` (vLLM's field names): parsed into a `TransferSpec`, and a source's answer.

A proxy written for vLLM asks the source with ``do_remote_decode``. It copies the source's answer,
which has ``do_remote_prefill``, unchanged into the target's request. `remote_request_id` carries
our transfer id. The core decides by membership whether it may connect to the peer.
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
    """A node that has the first tokens of the prompt cached; this node is to fetch them.

    Attributes:
        remote_host: Host of that node's control channel.
        remote_port: Port of that node's control channel.
        num_tokens: Number of tokens that it is thought to hold; whole blocks of them are fetched.
    """

    remote_host: Annotated[str, Meta(max_length=253)]
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    num_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]


class KvTransferParams(Struct, kw_only=True):
    """The fields that are read; others are ignored.

    Attributes:
        do_remote_decode: This node is the source.
        do_remote_prefill: This node is the target.
        transfer_id: 32 hex digits, chosen by a router.
        attempt: Number of the attempt, chosen by a router.
        remote_engine_id: Node id of the source.
        remote_host: Host of the source's control channel.
        remote_port: Port of the source's control channel.
        remote_request_id: The transfer id, as the source answered it.
        remote_block_ids: Only its type is checked: a target reserves its own blocks.
        tp_size: Only its type is checked: the nodes exchange their ranks.
        remote_num_tokens: Number of prompt tokens with valid KV, as the source answered it.
        remote_prefix: A prefix to fetch (kvbaton's extension); for a source, or without a role.
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
    """Parse ``kv_transfer_params``.

    Returns:
        The request's role in a hand-over, and the prefix to fetch; each None if there is none.

    Raises:
        RequestError: A field is missing or wrong (400, naming it), or both roles are asked for.
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
    """Check an item's role in a hand-over, which a client sends as a `TransferSpec`.

    Raises:
        RequestError: It is not a target with the address of a source; the error names `where`.
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
    """A source's answer, ready to be copied into the target's request.

    Args:
        transfer_id: 16 bytes.
        attempt: Number of the attempt.
        node_id: Id of this node.
        control_address: Address of this node for peers, ``tcp://host:port``.
        tp_size: Number of ranks of this node.
        num_tokens: Number of prompt tokens with valid KV.
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
