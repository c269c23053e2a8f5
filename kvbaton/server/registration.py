"""A node's side of membership: registers with the router and repeats it as a heartbeat."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import quote

import aiohttp
import msgspec

from kvbaton.errors import ConfigError
from kvbaton.messages.nodes import Members, NodeInfo
from kvbaton.messages.openai import ErrorBody
from kvbaton.server.network import registration_token

logger = logging.getLogger(__name__)

OnMembers = Callable[[tuple[str, ...]], Awaitable[None]]

REFUSALS = (400, 401, 403, 404, 405, 409, 410, 422)
"""Answers that repeating the question does not change.

Once it was registered a node has work to do: then it goes on and asks again, whoever answers in the
router's place, until the router says that it was removed.
"""


class NodeRegistrar:
    """Keeps one node registered.

    Args:
        router_url: base URL of the router.
        info: what the node says of itself, asked anew for every heartbeat.
        on_members: called with the control addresses of all other members, first at registration
            and then whenever they have changed.
        cluster_key: of this cluster, if it has one.
        first_deadline_s: the router must be reached for the first time within this time; after
            that the node serves on and keeps trying.
        timeout_s: for one heartbeat.
        max_backoff_s: longest pause between two attempts.
    """

    def __init__(
        self,
        router_url: str,
        info: Callable[[], NodeInfo],
        on_members: OnMembers,
        *,
        cluster_key: str | None = None,
        first_deadline_s: float = 60.0,
        timeout_s: float = 2.0,
        max_backoff_s: float = 2.0,
    ) -> None:
        self._url = router_url.rstrip("/") + "/nodes"
        self._info = info
        self._on_members = on_members
        self._headers = {"Content-Type": "application/json"}
        if cluster_key:
            self._headers["Authorization"] = f"Bearer {registration_token(cluster_key)}"
        self._first_deadline_s = first_deadline_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._max_backoff_s = max_backoff_s
        self._known: tuple[str, ...] | None = None
        self._news = asyncio.Event()

    def nudge(self) -> None:
        """Say now, not at the next heartbeat, that something has changed."""
        self._news.set()

    async def run(self) -> None:
        """Register, then repeat until cancelled.

        Raises:
            ConfigError: ``--router`` can't be reached or refuses this node at first, or has removed
                it.
        """
        give_up, failures = time.monotonic() + self._first_deadline_s, 0
        async with aiohttp.ClientSession(timeout=self._timeout) as session:
            while True:
                try:
                    members = await self._register(session)
                    if members.control_addresses != self._known:
                        await self._on_members(members.control_addresses)
                except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
                    if self._known is None and time.monotonic() >= give_up:
                        raise ConfigError(
                            "--router", f"can't register at {self._url}: {error!r}"
                        ) from error
                    if failures == 0:
                        logger.warning("can't register at %s, trying on: %r", self._url, error)
                    failures += 1
                    longest = min(0.1 * 2**failures, self._max_backoff_s)
                    await asyncio.sleep(random.uniform(0.05, longest))
                    continue
                if failures or self._known is None:
                    logger.info("registered at %s", self._url)
                failures = 0
                self._known = members.control_addresses
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), members.heartbeat_s)
                    self._news.clear()

    async def leave(self) -> None:
        """Tell the router that this node goes away; what it is serving there goes on.

        A router that can't be told notices by itself.
        """
        info = self._info()
        url = f"{self._url}/{quote(info.node_id)}?generation={quote(info.generation)}"
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.delete(url, headers=self._headers) as response,
            ):
                response.raise_for_status()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.info("could not tell the router that this node leaves: %r", error)

    async def _register(self, session: aiohttp.ClientSession) -> Members:
        body = msgspec.json.encode(self._info())
        async with session.post(self._url, data=body, headers=self._headers) as response:
            answer = await response.read()
            if response.ok:
                return msgspec.json.decode(answer, type=Members)
            try:
                error = msgspec.json.decode(answer, type=ErrorBody).error
                reason, code = error.message, error.code
            except msgspec.DecodeError:
                reason, code = answer[:200].decode(errors="replace"), None
            if response.status in REFUSALS and (self._known is None or code == "removed"):
                raise ConfigError("--router", f"it refused this node: {reason}")
            raise aiohttp.ClientError(reason)  # later, perhaps
