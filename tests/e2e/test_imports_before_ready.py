"""Nodes and routers import nothing once they are ready.

An import holds the interpreter, and with it all that the process does: `numpy.ma`, which NumPy
imports when `np.unique` is first called, took 60 ms of the first hand-over's time.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.workload import cluster_of
from tests.support.servers import completion

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOOK = """
import os, sys, time
class Log:
    def find_spec(self, name, path=None, target=None):
        with open(os.path.join(os.environ["IMPORTS"], str(os.getpid())), "a") as log:
            log.write(f"{time.monotonic()} {name}\\n")
sys.meta_path.insert(0, Log())
"""
"""For `sitecustomize`: notes what is imported, by process."""
REQUESTS = {
    "completions": completion("in a relay race each runner hands over a baton", max_tokens=8),
    "chat/completions": {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8, "temperature": 1.0, "seed": 1, "top_p": 0.9, "n": 2,
        "logprobs": True, "top_logprobs": 2, "stream": True,
    },
}  # fmt: skip


TRANSFERRED = r'^kvbaton_prompt_tokens_total{.*source="transferred".*} (\S+)$'


def get(url: str) -> str:
    """What is there."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def imported(folder: Path, since: float) -> list[str]:
    """Processes and modules."""
    found = []
    for log in folder.iterdir():
        for line in log.read_text().splitlines():
            at, name = line.split()
            if float(at) > since:
                found.append(f"{log.name}: {name}")
    return found


def test_nothing_is_imported_for_a_request(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    site, imports = tmp_path / "site", tmp_path / "imports"
    for folder in (site, imports):
        folder.mkdir()
    (site / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    model = checkpoint()
    words = [f"--model={model}", "--prefill=1", "--decode=1", "--policy=least-loaded"]
    env = {"PYTHONPATH": path, "IMPORTS": str(imports)}
    with cluster_of([*words, "--served-model-name=tiny"], env) as (router, up):
        ready = time.monotonic()
        before = sorted(log.name for log in imports.iterdir())
        assert len(before) > 5, "nobody noted what it imports"
        for where, body in REQUESTS.items():
            asked = urllib.request.Request(
                f"{router}/v1/{where}",
                json.dumps({"model": "tiny", **body}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert answer.read()
        found = imported(imports, ready)
        nodes = json.loads(get(f"{router}/nodes"))["nodes"]
        (target,) = (node["url"] for node in nodes if node["role"] == "decode")
        moved = re.search(TRANSFERRED, get(f"{target}/metrics"), re.MULTILINE)
    assert [line for line in found if not line.startswith(f"{up}:")] == []
    assert moved is not None
    assert float(moved[1]) > 0, "nothing was handed over"
