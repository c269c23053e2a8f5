"""``kvbaton drain``: tells a node or router to accept no new requests, and waits for the rest."""

from __future__ import annotations

import asyncio
import errno
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import msgspec

from kvbaton.config import Seconds, flag, secret_flag
from kvbaton.errors import ConfigError
from kvbaton.messages import UNREADABLE
from kvbaton.messages.nodes import DrainProgress
from kvbaton.messages.openai import ErrorBody
from kvbaton.server.config import check_url
from kvbaton.server.network import TrustConfig, bearer, first_key, operator_token, scheme_hint

POLL_S = 0.2
ANSWER_S = 5.0
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Connection errors that do not tell whether a process listens there."""


@dataclass(frozen=True, kw_only=True)
class DrainConfig:
    """Settings of ``kvbaton drain``.

    Attributes:
        url: URL of the node or router.
        timeout_s: Maximum seconds to wait until no request is left.
        settle_s: Minimum seconds to wait, so that load balancers notice that it is drained.
        cluster_key: Key of the cluster, needed from another machine.
        operator_key: Key of an operator, needed instead if there is no cluster key; of several the
            first is used.
        trust: Which certificates are trusted.
    """

    url: str = "http://127.0.0.1:8000"
    timeout_s: Seconds = flag(
        60.0, "give up if requests are left after this many seconds", name="--timeout", metavar="S"
    )
    settle_s: Seconds = flag(
        0.0,
        "wait at least this many seconds, so that load balancers notice",
        name="--settle",
        metavar="S",
    )
    cluster_key: str | None = secret_flag(
        "needed from another machine", "KVBATON_CLUSTER_KEY", metavar="SECRET"
    )
    operator_key: str | None = secret_flag(
        "needed from another machine, without a cluster key", "KVBATON_OPERATOR_KEY", metavar="KEY"
    )
    trust: TrustConfig = field(default_factory=TrustConfig)

    def __post_init__(self) -> None:
        check_url("URL", self.url)


def run(config: DrainConfig) -> int:
    """Drain; return the exit status, 0 once no request is left, 1 if that takes too long.

    Raises:
        ConfigError: The URL is wrong, its certificate is not trusted, access is denied, or it is
            neither a node nor a router.
    """
    idle = asyncio.run(_drain(config))
    if not idle:
        print(f"kvbaton: {config.url} still works after {config.timeout_s:g} s", file=sys.stderr)
    return 0 if idle else 1


async def _drain(config: DrainConfig) -> bool:
    key = operator_token(config.cluster_key) or first_key(config.operator_key)
    url, headers = f"{config.url.rstrip('/')}/drain", bearer(key)
    began, answered, told = time.monotonic(), False, ""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        while True:
            try:
                async with session.post(url, ssl=config.trust.client(url)) as response:
                    status, answer, answered = response.status, await response.read(), True
                if status == 200:
                    idle = msgspec.json.decode(answer, type=DrainProgress).idle
                elif status in (401, 403, 404, 405):
                    why = f"it answers {status}"
                    with suppress(*UNREADABLE):  # it is not kvbaton's answer
                        why = msgspec.json.decode(answer, type=ErrorBody).error.message
                    raise ConfigError("URL", f"{config.url} does not let itself be drained: {why}")
                else:  # a node that is starting has no requests yet
                    idle = msgspec.json.decode(answer, type=ErrorBody).error.code == "starting"
            except aiohttp.ClientConnectorError as failure:
                wrong = aiohttp.ClientSSLError | aiohttp.ClientConnectorDNSError
                if not answered and (isinstance(failure, wrong) or failure.errno in UNREACHABLE):
                    hint = scheme_hint(url, str(failure))
                    if "CERTIFICATE" in str(failure):
                        hint += "; --ssl-ca-certs says whom to trust"
                    why = f"{config.url} can't be asked: {failure}{hint}"
                    raise ConfigError("URL", why) from failure
                if not answered:  # it may have ended before, or the port is wrong
                    print(f"kvbaton: nobody listens at {config.url}", file=sys.stderr)
                return True  # the process has ended
            except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE) as failure:
                if told != repr(failure):
                    told = repr(failure)
                    hint = "" if answered else scheme_hint(url, told)
                    print(f"kvbaton: {url}: {told}{hint}", file=sys.stderr)
                idle = False
            waited = time.monotonic() - began
            if waited >= config.timeout_s or (idle and waited >= config.settle_s):
                if idle:
                    print(f"drained: {config.url}")
                return idle
            await asyncio.sleep(POLL_S)
