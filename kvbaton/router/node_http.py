"""Asking a node over HTTP: for nodes that offer no engine socket. One JSON event per token."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvbaton.messages.engine import AddRequest, Output, TransferSpec
from kvbaton.messages.nodes import GenerateRequest
from kvbaton.messages.openai import ErrorBody
from kvbaton.router.node_request import Listener, NodeError, NodeRequest
from kvbaton.server.sse import DONE, read_events

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
MAX_ERROR_BYTES = 1 << 16

_encoder = msgspec.json.Encoder()
_output = msgspec.json.Decoder(Output)
_error = msgspec.json.Decoder(ErrorBody)


async def ask_over_http(
    session: aiohttp.ClientSession, asked: NodeRequest, request_id: str, listener: Listener
) -> None:
    """Ask a node and report all it says, failures included.

    Cancelling the task closes the connection, which cancels the request at the node.
    """
    try:
        await _converse(session, asked, request_id, listener)
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        listener.failed(asked, NodeError(f"can't connect: {error}"), unreachable=refused)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        listener.failed(asked, NodeError(f"connection lost: {type(error).__name__}: {error}"))
    except msgspec.DecodeError as error:
        listener.failed(asked, NodeError(f"it sent something that is no output: {error}"))
    except Exception as error:
        logger.exception("unforeseen failure of a request to %s", asked.node.node_id)
        listener.failed(asked, NodeError(f"the router failed: {error!r}"))


async def _converse(
    session: aiohttp.ClientSession, asked: NodeRequest, request_id: str, listener: Listener
) -> None:
    response = await session.post(
        f"{asked.node.url.rstrip('/')}/inference/v1/generate",
        data=_encoder.encode(generate_request(asked.request)),
        headers={"Content-Type": "application/json", "X-Request-Id": request_id},
    )
    try:
        if response.status == 200:
            await _listen(asked, response, listener)
        else:
            body = await response.content.read(MAX_ERROR_BYTES)
            listener.failed(asked, _refusal(response.status, body))
    except BaseException:
        response.close()
        raise
    response.release()


async def _listen(asked: NodeRequest, response: aiohttp.ClientResponse, listener: Listener) -> None:
    ended = False
    async for data in read_events(response.content):
        if ended:
            continue  # read on to the end, so that the connection can be used again
        if data == DONE:
            ended = True
            listener.ended(asked)
            continue
        try:
            listener.output(asked, _output.decode(data))
        except msgspec.ValidationError:
            ended = True
            listener.failed(asked, NodeError(_error.decode(data).error.message))
    if not ended:
        listener.failed(asked, NodeError("its stream was cut off"))


def generate_request(request: AddRequest) -> GenerateRequest:
    """The body of a request to a node's token endpoint."""
    return GenerateRequest(
        token_ids=request.token_ids,
        sampling_params=request.params,
        request_id=request.request_id,
        stream=True,
        resume_token_ids=request.resume_ids,
        cache_salt=request.cache_salt or None,
        priority=request.priority,
        deadline_s=request.deadline_s,
        kv_transfer_params=_transfer_params(request.transfer),
        items=request.items,
    )


def _transfer_params(transfer: TransferSpec | None) -> dict[str, object] | None:
    """A part in a hand-over in vLLM's field names."""
    if transfer is None:
        return None
    params: dict[str, object] = {
        "do_remote_decode": transfer.role == "source",
        "do_remote_prefill": transfer.role == "target",
        "transfer_id": transfer.transfer_id.hex(),
        "attempt": transfer.attempt,
    }
    if transfer.role == "target":
        address = urlsplit(transfer.peer or "")
        params |= {
            "remote_engine_id": transfer.peer_node,
            "remote_request_id": transfer.transfer_id.hex(),
            "remote_host": address.hostname,
            "remote_port": address.port,
            "remote_block_ids": [[]],
        }
    return params


def _refusal(status: int, body: bytes) -> NodeError:
    """What a node's error answer says."""
    try:
        info = _error.decode(body).error
    except msgspec.DecodeError:
        return NodeError(f"it answered HTTP {status}", status)
    code = info.code if isinstance(info.code, str) else None
    return NodeError(info.message, status, info.param, code)
