"""Validation of requests: ranges of fields, and limits of this engine.

HTTP endpoints and the core both check, since not every request reaches a core through an endpoint.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvbaton.connectors.address import host_of
from kvbaton.errors import RequestError
from kvbaton.messages.engine import MAX_GRAMMAR, AddRequest, SamplingParams, TransferSpec
from kvbaton.types import TokenIds

if TYPE_CHECKING:
    from kvbaton.engine.config import SchedulerConfig
    from kvbaton.engine.kv_cache_manager import KVCacheManager

INT32 = 2**31 - 1
MAX_IDS = 1024
"""Maximum number of ids in `stop_token_ids` and `logit_bias`, and of alternatives in `logprobs`."""
MAX_BAD_TOKENS = 4096
"""Maximum number of tokens in all `bad_words_token_ids` together."""
MAX_DEADLINE_S = 1e9


class Range(NamedTuple):
    """Range of valid values; `open` excludes the low end."""

    low: float
    high: float
    open: bool = False

    def __str__(self) -> str:
        return f"{'(' if self.open else '['}{shown(self.low)}, {shown(self.high)}]"


RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, open=True),
    "top_k": Range(0, INT32),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(1e-6, 100),
    "max_tokens": Range(1, INT32),
    "min_tokens": Range(0, INT32),
}
"""Valid ranges of fields of `SamplingParams`."""
REQUEST_RANGES = {
    "deadline_s": Range(0, MAX_DEADLINE_S, open=True),
    "ttft_s": Range(0, MAX_DEADLINE_S),
    "itl_s": Range(0, MAX_DEADLINE_S),
    "prefill_s": Range(0, MAX_DEADLINE_S),
    "priority": Range(-INT32, INT32),
}
"""Valid ranges of fields of `AddRequest`."""


def check_range(name: str, value: float, limit: Range) -> None:
    """Raise `RequestError` if `value` is outside of `limit`."""
    low, high, is_open = limit
    if not low <= value <= high or (is_open and value == low):
        raise RequestError(f"{name} must be in {limit}, not {shown(value)}", param=name)


def shown(value: float) -> str:
    """Format a number for a message; a client's integer may exceed every float."""
    if isinstance(value, int) and abs(value) < 1e15:
        return str(value)
    return f"{value:.6g}" if abs(value) < 1e300 else "a number beyond all bounds"


def check_ids(name: str, ids: Sequence[int], vocab_size: int, *, most: int = MAX_IDS) -> TokenIds:
    """Check token ids; returns them as an array.

    Raises:
        RequestError: There are too many, or the model does not have one of them.
    """
    if len(ids) > most:
        raise RequestError(f"{name} may hold at most {most} ids", param=name)
    if not ids:
        return array("I")
    try:
        found = array("I", ids)
    except OverflowError:  # beyond any vocabulary
        found, low, high = array("I"), min(ids), max(ids)
    else:  # NumPy takes a tenth of the time
        span = np.frombuffer(found, np.uint32)
        low, high = int(span.min()), int(span.max())
    if low < 0 or high >= vocab_size:
        spans = f"it spans {shown(low)} to {shown(high)}"
        raise RequestError(f"{name} must hold token ids in [0, {vocab_size}); {spans}", param=name)
    return found


def check_params(
    params: SamplingParams,
    vocab_size: int,
    *,
    prefix: str = "",
    limits: Mapping[str, Range] = RANGES,
) -> None:
    """Check sampling parameters.

    Args:
        params: Parameters to check.
        vocab_size: Token ids must be below it.
        prefix: Prefix of field names in messages (``sampling_params.``).
        limits: Ranges of numbers by field; fields that are None are not checked.

    Raises:
        RequestError: A field is out of its range, or fields do not go together.
    """
    _check_fields(params, limits, prefix)
    if params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens must not exceed max_tokens ({params.max_tokens})",
            param=f"{prefix}min_tokens",
        )
    if params.grammar:
        if len(params.grammar) > MAX_GRAMMAR:
            raise RequestError(
                f"a grammar may have at most {MAX_GRAMMAR} characters", param=f"{prefix}grammar"
            )
        for name in ("min_tokens", "ignore_eos"):
            if getattr(params, name):
                raise RequestError(
                    f"{name} does not go with a grammar, which decides where the text ends",
                    param=f"{prefix}{name}",
                )
    if params.stop_token_ids:
        check_ids(f"{prefix}stop_token_ids", params.stop_token_ids, vocab_size)
    if (allowed := params.allowed_token_ids) is not None:
        _check_lists(f"{prefix}allowed_token_ids", (allowed,), vocab_size, vocab_size)
    if words := params.bad_words_token_ids:
        _check_lists(f"{prefix}bad_words_token_ids", words, vocab_size, MAX_BAD_TOKENS)
    if params.logit_bias:
        check_ids(f"{prefix}logit_bias", list(params.logit_bias), vocab_size)
    for value in params.logit_bias.values():
        check_range(f"{prefix}logit_bias", value, Range(-100, 100))


def validate_request(request: AddRequest, config: SchedulerConfig, blocks: KVCacheManager) -> None:
    """Check everything of a request that does not depend on the state of the engine.

    Raises:
        RequestError: A field is out of range, or exceeds a limit of this engine; names both.
    """
    if not request.request_id:
        raise RequestError("request_id is empty", param="request_id")
    known = len(request.token_ids) + len(request.resume_ids)
    if not request.token_ids:
        raise RequestError("the prompt is empty; at least 1 token is needed", param="prompt")
    error = blocks.too_large(known)
    if known + 1 > config.max_model_len:
        error = (
            f"it has {known} tokens, but at most {config.max_model_len - 1} fit: "
            f"max_model_len is {config.max_model_len} and must leave room for a new token"
        )
    if error is not None:
        told = f"the prompt is too long: {error}"
        raise RequestError(told, param="prompt", code="context_length_exceeded")
    check_ids("prompt", request.token_ids, config.vocab_size, most=INT32)
    if request.resume_ids:
        check_ids("resume_token_ids", request.resume_ids, config.vocab_size, most=INT32)
    candidates = Range(0, MAX_IDS)
    limits = {"n": Range(1, config.max_num_seqs), **RANGES}
    limits |= {"logprobs": candidates, "prompt_logprobs": candidates}
    check_params(request.params, config.vocab_size, limits=limits)
    params = request.params
    if params.min_tokens and params.allowed_token_ids:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else config.eos_token_ids)}
        if ends.issuperset(params.allowed_token_ids):
            raise RequestError(
                "all of allowed_token_ids end the text, which min_tokens forbids at first",
                param="allowed_token_ids",
            )
    if len(request.resume_ids) >= request.params.max_tokens:
        raise RequestError(
            f"{len(request.resume_ids)} tokens are resumed, but max_tokens is "
            f"{request.params.max_tokens}",
            param="resume_token_ids",
        )
    _check_fields(request, REQUEST_RANGES)
    if request.transfer is not None:
        _check_transfer(request.transfer, "kv_transfer_params")
    if request.prefix is not None:
        _check_address(request.prefix.peer, "kv_transfer_params.remote_prefix")
    for number, item in enumerate(request.items):
        if item.transfer is not None:
            _check_transfer(item.transfer, f"items[{number}].transfer")
        if 0 in item.grid or max(item.grid) > INT32:
            raise RequestError(f"{item.grid} is no grid of patches", param=f"items[{number}].grid")


def _check_lists(name: str, lists: Sequence[tuple[int, ...]], vocab_size: int, most: int) -> None:
    if not all(lists):
        raise RequestError(f"{name} must not be empty", param=name)
    check_ids(name, [token for ids in lists for token in ids], vocab_size, most=most)


def _check_fields(
    checked: SamplingParams | AddRequest, limits: Mapping[str, Range], prefix: str = ""
) -> None:
    """Call `check_range` on fields by name; fields that are None are not checked."""
    for name, limit in limits.items():
        low, high, is_open = limit
        value = getattr(checked, name)
        if value is None or low < value <= high or (value == low and not is_open):
            continue  # most fields of most prompts, which need no call
        check_range(prefix + name, value, limit)


def _check_transfer(transfer: TransferSpec, param: str) -> None:
    if transfer.role not in ("source", "target"):
        raise RequestError(
            f"transfer role {transfer.role[:20]!r} is neither 'source' nor 'target'", param=param
        )
    if transfer.peer is not None:
        _check_address(transfer.peer, param)


def _check_address(address: str, param: str) -> None:
    try:
        host_of(address)
    except ValueError as error:
        raise RequestError(f"the peer's address: {error}", param=param) from None
