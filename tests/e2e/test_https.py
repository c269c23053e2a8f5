"""A router of two processes and a node of two, all over https."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli import main
from tests.support.certificates import write_certificates
from tests.support.cluster import Cluster
from tests.support.servers import START_S, HttpFailure, completion, poll

pytestmark = pytest.mark.e2e


def test_everything_is_asked_over_https(
    tmp_path: Path, model: Path, prompt: Callable[[int], list[int]]
) -> None:
    ca, certificate, key = write_certificates(tmp_path)
    files = {"ssl-ca-certs": str(ca), "ssl-certfile": str(certificate), "ssl-keyfile": str(key)}
    cluster = Cluster(tmp_path, model)
    try:
        words = [f"--{name}={value}" for name, value in files.items()]
        router = cluster.start_router("router", "--workers=2", *words)
        assert router.url.startswith("https://")
        node = cluster.start_node("any", "secret", {**files, "workers": "2"}, router=router)
        assert node.url.startswith("https://")

        def states() -> list[str]:
            return [seen["state"] for seen in router.get("/nodes")["nodes"]]

        poll("the node is ready", lambda: states() == ["ready"], START_S, router.tail)
        assert router.get("/nodes")["nodes"][0]["url"] == node.url
        body = completion(prompt(20), max_tokens=3)

        def answered() -> Any:
            """By whichever worker; one may not have reached the engine yet."""
            try:
                return router.post("/v1/completions", body)
            except HttpFailure as failure:
                if failure.status != 503:
                    raise
                return None

        whole = poll("an answer", answered, START_S, router.tail)
        assert (
            whole["choices"][0]["text"] == node.post("/v1/completions", body)["choices"][0]["text"]
        )
        assert router.post("/reset_prefix_cache", {})["nodes"] == {"secret": True}
        load = ["--requests=2", "--input-len=4", "--output-len=2"]
        assert main(["bench", "serve", "--url", router.url, *load]) == 0
        assert main(["drain", node.url, "--timeout", "30"]) == 0
    finally:
        cluster.stop()
