"""A set of servers shared by many tests: started together, stopped together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from tests.support.servers import START_S, Node, Router, Server, poll

ENGINE = {"num-blocks": "256", "max-model-len": "512", "max-num-batched-tokens": "32"}
"""Flags of every node: a prompt above 32 tokens takes several chunks."""

SLOW_CHUNK = 128
"""Tokens of a step that takes the slow model tenths of a second."""

DECODE = {"debug-poison": None, "debug-forbid-prompt-compute": None}
"""Flags of D: blocks hold NaN until bytes arrive, and only the last prompt token is computed."""


class Cluster:
    """Starts servers, and stops them all at the end.

    Args:
        folder: Folder for their logs.
        model: Default model of the nodes.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.servers: list[Server] = []

    def start_router(
        self, name: str = "router", *flags: str, env: Mapping[str, str] | None = None
    ) -> Router:
        # Always hands over, since most tests are about hand-overs.
        words = ["router", "--port=0", f"--model={self.model}", "--policy=least-loaded"]
        words.append("--served-model-name=tiny")
        router = Router(name, [*words, *flags], self.folder, env=env)
        self.servers.append(router)
        return router

    def start_node(
        self,
        role: Literal["any", "prefill", "decode", "encode"],
        name: str,
        flags: Mapping[str, str | None] | None = None,
        *,
        model: Path | None = None,
        router: Router | None = None,
        env: Mapping[str, str] | None = None,
        names: Path | None = None,
        network: str = "",
    ) -> Node:
        """Start a node in the background; `until_up` waits for it.

        Args:
            role: Role of the node.
            name: Node id.
            flags: Flags of its engine beyond `ENGINE` (which encoder nodes do not have); None for
                a flag without a value.
            model: Model other than the cluster's.
            router: Router to register with.
            env: As for `Server`.
            names: As for `Server`.
            network: As for `Server`.
        """
        common = {"port": "0", "node-id": name, "served-model-name": "tiny"}
        common["model"] = str(model or self.model)
        if router is not None:
            common["router"] = router.url
        engine = {} if role == "encode" else ENGINE
        words = ["serve" if role == "any" else role, *_words({**common, **engine, **(flags or {})})]
        node = Node(name, words, self.folder, env=env, names=names, network=network)
        self.servers.append(node)
        return node

    def until_up(self, *nodes: Node, router: Router | None = None, pairs: int = 0) -> None:
        """Wait until nodes serve, and the router has `pairs` pairs."""
        for node in nodes:
            assert node.url
        if router is not None:
            poll(
                f"{pairs} pairs",
                lambda: router.num_pairs() == pairs,
                START_S,
                self.tails,
            )

    def tails(self) -> str:
        """The last lines of all logs."""
        return "\n".join(server.tail() for server in self.servers)

    def stop(self, servers: Iterable[Server] | None = None) -> None:
        """Stop these servers, or all, in reverse order of start."""
        ending = list(self.servers[::-1] if servers is None else servers)
        for server in ending:
            server.ask_to_stop()
        for server in ending:
            server.stop()
            self.servers.remove(server)


def _words(flags: Mapping[str, str | None]) -> list[str]:
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in flags.items()]
