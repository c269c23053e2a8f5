"""A node's side of membership: it registers with all routers, and repeats this as a heartbeat."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from kvbaton.errors import ConfigError
from kvbaton.messages import UNREADABLE
from kvbaton.messages.nodes import Members, NodeInfo
from kvbaton.messages.openai import ErrorBody
from kvbaton.server.network import TrustConfig, bearer, registration_token, scheme_hint

logger = logging.getLogger(__name__)

OnMembers = Callable[[tuple[str, ...]], Awaitable[None]]

REFUSALS = (400, 401, 403, 404, 405, 409, 410, 422)
"""HTTP statuses that refuse a registration for good.

A node that was registered has requests to serve. It then goes on and tries again after any status,
which another server in the router's place may have sent, until the router says that the node was
removed.
"""
REFUSED_PAUSE_S = 10.0
"""Seconds until a router that refuses this node is asked again, while another has accepted it."""
FIRST_BACKOFF_S = 0.1
"""Half of the longest pause after a first failure, in seconds; each further failure doubles it."""
MAX_BACKOFF_S = 2.0
"""Limit of the longest pause after a failure, in seconds."""
FIRST_DEADLINE_S = 60.0
"""Seconds within which a router must be reached for the first time; later the node serves on and
keeps trying."""
HEARTBEAT_TIMEOUT_S = 2.0
LOOKUP_PERIOD_S = 5.0
"""Interval in seconds at which routers' host names are resolved again."""
LOOKUP_TIMEOUT_S = 5.0

Target = tuple[str, str | None]
"""A router: its base URL, and one of the addresses of its host; None leaves the address to the
connection."""


def _reason(error: BaseException) -> str:
    """Text of an error for the log; a timeout has no text of its own."""
    return str(error) or "no answer in time"


async def targets_of(url: str) -> list[Target]:
    """The routers behind a URL: one for each address of its host name.

    If a name has addresses of both families, those of IPv4 are taken, because the same routers have
    the IPv6 ones.

    Raises:
        OSError: The name has no address.
        TimeoutError: The name was not resolved in time.
    """
    parts = URL(url)
    host = parts.host or ""
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return [(url, None)]
    if host == "localhost":
        return [(url, None)]
    async with asyncio.timeout(LOOKUP_TIMEOUT_S):
        found = await asyncio.get_running_loop().getaddrinfo(
            host, parts.port, type=socket.SOCK_STREAM
        )
    families = {str(where[0]): family for family, *_, where in found}
    chosen = min(families.values(), key=lambda family: family != socket.AF_INET)
    return [(url, name) for name, family in sorted(families.items()) if family == chosen]


class NodeRegistrar:
    """Keeps one node registered with every router.

    A host name stands for all of its addresses and is resolved periodically, because replicas of a
    router come and go. A router whose address has disappeared still gets heartbeats until it no
    longer answers: it may still have requests on this node.

    Args:
        router_urls: Base URLs of the routers.
        info: Returns the node's description; called for every heartbeat.
        on_members: Called with the control addresses of all other members that any router names,
            first at registration and then whenever they have changed.
        cluster_key: Key of the cluster; None without one.
        trust: Which certificates are trusted.
    """

    def __init__(
        self,
        router_urls: Sequence[str],
        info: Callable[[], NodeInfo],
        on_members: OnMembers,
        *,
        cluster_key: str | None = None,
        trust: TrustConfig | None = None,
    ) -> None:
        self.info = info
        self.headers = bearer(registration_token(cluster_key))
        self.trust = TrustConfig() if trust is None else trust
        self._urls = tuple(url.rstrip("/") for url in router_urls)
        self._on_members = on_members
        self._registrations: dict[Target, _Registration] = {}
        self._failed_lookups: dict[str, str] = {}
        self._known: tuple[str, ...] | None = None
        self._news = asyncio.Event()

    def nudge(self) -> None:
        """Send a heartbeat now, because something has changed."""
        for registration in self._registrations.values():
            registration.news.set()

    async def announce(self) -> None:
        """Send a heartbeat now, and wait until all reachable routers have received it."""
        await self._tell_all(_Registration.announce)

    async def leave(self) -> None:
        """Tell all routers that this node leaves; its running requests go on.

        A router that can't be reached will notice by itself.
        """
        await self._tell_all(_Registration.leave)

    async def _tell_all(self, tell: Callable[[_Registration], Awaitable[Any]]) -> None:
        registrations = list(self._registrations.values())
        done = await asyncio.gather(*map(tell, registrations), return_exceptions=True)
        for registration, error in zip(registrations, done, strict=True):
            if isinstance(error, Exception):
                reason = _reason(error)
                logger.info("could not tell the router at %s: %s", registration.where, reason)

    async def run(self) -> None:
        """Register, and repeat this until cancelled.

        Raises:
            ConfigError: At first no ``--router`` can be reached, or all refuse this node; or later
                one has removed the node and no other has it.
        """
        give_up, look_up_at = time.monotonic() + FIRST_DEADLINE_S, 0.0
        try:
            while True:
                self._news.clear()
                if time.monotonic() >= look_up_at:
                    await self._look_up()
                    look_up_at = time.monotonic() + LOOKUP_PERIOD_S
                await self._take_news(time.monotonic() >= give_up)
                until = look_up_at if self._known is not None else min(look_up_at, give_up)
                # `asyncio.wait_for` of Python 3.11 forgets a cancellation that comes with the news.
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
                        await self._news.wait()
        finally:
            tasks = [one.task for one in self._registrations.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_up(self) -> None:
        """Resolve the host names, and begin a registration with each new router."""
        found = await asyncio.gather(*map(targets_of, self._urls), return_exceptions=True)
        for url, targets in zip(self._urls, found, strict=True):
            if isinstance(targets, BaseException):
                if url not in self._failed_lookups:
                    logger.warning("can't look up the routers at %s, trying on: %r", url, targets)
                self._failed_lookups[url] = repr(targets)
                continue
            self._failed_lookups.pop(url, None)
            for target, registration in self._registrations.items():
                if target[0] == url:
                    registration.listed = target in targets
            for target in targets:
                if target not in self._registrations:
                    self._registrations[target] = _Registration(self, target, self._news.set)

    async def _take_news(self, is_late: bool) -> None:
        """Act on changes of the registrations."""
        for target, registration in list(self._registrations.items()):
            if registration.task.done():
                del self._registrations[target]
                registration.task.result()
                logger.info("the router at %s is gone", registration.where)
        current = self._registrations.values()
        errors = [one.refusal for one in current if one.refusal is not None]
        is_over = self._known is None or any(one.removed for one in current)
        if current and len(errors) == len(current) and is_over:
            raise ConfigError("--router", f"it refused this node: {errors[0]}")
        heard = [one.members for one in current if one.members is not None]
        if heard:
            addresses = tuple(sorted(set().union(*heard)))
            if addresses != self._known:
                try:
                    await self._on_members(addresses)
                    self._known = addresses
                except (OSError, TimeoutError) as error:  # the next heartbeat tries again
                    logger.warning("can't pass on who is a member, trying on: %r", error)
        elif self._known is None and is_late:
            errors += [one.reason(one.error) for one in current if one.error is not None]
            errors += [*self._failed_lookups.values(), "no answer"]
            where = ", ".join(f"{url}/nodes" for url in self._urls)
            raise ConfigError("--router", f"can't register at {where}: {errors[0]}")


class _Registration:
    """Registration with one router.

    Args:
        registrar: The registrar.
        target: The router.
        on_news: Called when an attribute has changed.

    Attributes:
        where: URL and address, for logs.
        listed: Whether the router's host name still resolves to its address.
        members: Control addresses of the other members, from the last answer; None before one.
        refusal: Why the router refuses this node, if its last answer did; else None.
        removed: Whether the router had this node and has removed it for good.
        error: Why the last attempt failed, if it did; else None.
        news: Set it to send a heartbeat at once.
        task: Sends the heartbeats; ends when the router is not listed and does not answer.
    """

    def __init__(
        self, registrar: NodeRegistrar, target: Target, on_news: Callable[[], None]
    ) -> None:
        url, address = target
        self._url = URL(f"{url}/nodes")
        self.where = str(self._url) if address is None else f"{self._url} ({address})"
        # With several addresses the connection goes to one; its certificate has the host name.
        self._dialled = self._url if address is None else self._url.with_host(address)
        self._registrar = registrar
        self._on_news = on_news
        self.listed = True
        self.members: tuple[str, ...] | None = None
        self.refusal: str | None = None
        self.removed = False
        self.error: Exception | None = None
        self.news = asyncio.Event()
        self._heartbeat_s = 1.0
        self.task = asyncio.create_task(self._repeat(), name=f"registration at {self.where}")
        self.task.add_done_callback(lambda task: on_news())

    def reason(self, error: Exception) -> str:
        """Why it could not be asked, and what to try if it never could."""
        hint = scheme_hint(self.where, str(error)) if self.members is None else ""
        return f"{_reason(error)}{hint}"

    async def _repeat(self) -> None:
        longest, registered, told = FIRST_BACKOFF_S, False, set[str]()
        async with self._session() as session:
            while True:
                self.news.clear()
                try:
                    await self._register(session)
                except (aiohttp.ClientError, OSError, TimeoutError, *UNREADABLE) as error:
                    self.error = error
                    if not self.listed:
                        return
                    if (reason := self.reason(error)) not in told:
                        told.add(reason)
                        logger.warning("can't register at %s, trying on: %s", self.where, reason)
                    registered, longest = False, min(2 * longest, MAX_BACKOFF_S)
                    await asyncio.sleep(random.uniform(0.05, longest))
                    continue
                self._on_news()
                if self.refusal is None and not registered:
                    logger.info("registered at %s", self.where)
                told.clear()
                longest, registered = FIRST_BACKOFF_S, self.refusal is None
                pause = self._heartbeat_s if registered else REFUSED_PAUSE_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self.news.wait()

    async def announce(self) -> None:
        """Send a heartbeat now, if the router has accepted this node."""
        if self.members is not None:
            async with self._session() as session:
                await self._register(session)

    async def leave(self) -> None:
        """Tell the router that the node leaves."""
        info = self._registrar.info()
        url = (self._dialled / info.node_id).with_query(generation=info.generation)
        async with (
            self._session() as session,
            session.delete(url, server_hostname=self._url.host) as response,
        ):
            if response.status not in REFUSALS:  # it never had the node, or not any more
                response.raise_for_status()

    def _session(self) -> aiohttp.ClientSession:
        registrar = self._registrar
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=registrar.trust.client(str(self._url))),
            headers={"Host": self._url.authority, **registrar.headers},
            timeout=aiohttp.ClientTimeout(total=HEARTBEAT_TIMEOUT_S),
        )

    async def _register(self, session: aiohttp.ClientSession) -> None:
        """Register, and set `members` or `refusal`.

        Raises:
            ClientError, OSError, TimeoutError, `UNREADABLE`: The router did not answer, or its
                answer is not final.
        """
        async with session.post(
            self._dialled,
            data=msgspec.json.encode(self._registrar.info()),
            headers={"Content-Type": "application/json"},
            server_hostname=self._url.host,
        ) as response:
            answer = await response.read()
            if response.ok:
                members = msgspec.json.decode(answer, type=Members)
                self.members, self._heartbeat_s = members.control_addresses, members.heartbeat_s
                self.refusal = self.error = None
                return
            try:
                said = msgspec.json.decode(answer, type=ErrorBody).error
                reason, code = said.message, said.code
            except UNREADABLE:
                reason, code = answer[:200].decode(errors="replace"), None
            removed = self.members is not None and code == "removed"
            if response.status not in REFUSALS or (self.members is not None and not removed):
                raise aiohttp.ClientError(reason)  # later, perhaps
            self.removed = self.removed or removed
            if self.refusal is None:
                logger.error("the router at %s refuses this node: %s", self.where, reason)
            self.members, self.refusal, self.error = None, reason, None
