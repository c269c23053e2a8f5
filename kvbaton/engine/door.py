"""Refuses requests that can never be served, naming the field and the limit."""

from __future__ import annotations

from kvbaton.engine.kv_cache_manager import KVCacheManager
from kvbaton.engine.roster import SchedulerConfig
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest
from kvbaton.types import Attempt


def check_limits(request: AddRequest, config: SchedulerConfig, blocks: KVCacheManager) -> None:
    """Refuse what exceeds a limit of this engine.

    Raises:
        RequestError: the prompt, `n`, `max_tokens` or the resumed tokens do.
    """
    _check_length(request, config.max_model_len, blocks)
    _check_choices(request, config.max_num_seqs)
    _check_budget(request)


def _check_length(request: AddRequest, limit: int, blocks: KVCacheManager) -> None:
    known = len(request.token_ids) + len(request.resume_ids)
    if not request.token_ids:
        raise RequestError("the prompt is empty; at least 1 token is needed", param="prompt")
    error = blocks.too_large(known)
    if known + 1 > limit:
        error = (
            f"the prompt has {known} tokens, but at most {limit - 1} fit: "
            f"max_model_len is {limit} and must leave room for a new token"
        )
    if error is not None:
        raise RequestError(error, param="prompt", code="context_length_exceeded")


def _check_choices(request: AddRequest, limit: int) -> None:
    if not 1 <= request.params.n <= limit:
        raise RequestError(f"n is {request.params.n}, but must be in [1, {limit}]", param="n")


def _check_budget(request: AddRequest) -> None:
    most, resumed = request.params.max_tokens, len(request.resume_ids)
    if most < 1:
        raise RequestError(f"max_tokens is {most}, but must be at least 1", param="max_tokens")
    if resumed >= most:
        raise RequestError(
            f"{resumed} tokens are resumed, but max_tokens is {most}", param="resume_token_ids"
        )


def target_attempt(request: AddRequest) -> Attempt | None:
    """The hand-over that a target awaits; None for other requests.

    Raises:
        RequestError: its role is unknown.
    """
    transfer = request.transfer
    if transfer is None or transfer.role == "source":
        return None
    if transfer.role != "target":
        raise RequestError(
            f"transfer role {transfer.role!r} is neither 'source' nor 'target'",
            param="kv_transfer_params",
        )
    return Attempt(transfer.transfer_id, transfer.attempt)
