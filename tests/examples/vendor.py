"""Vendors' packages of `examples`: installed apart, run against kvbaton, read for their imports."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import kvbaton.connectors

ROOT = Path(__file__).parents[2]


def install(package: Path, folder: Path) -> Path:
    """Install a package, built from a copy of its sources, below `folder`; returns where to."""
    copy = folder / "sources"
    copy.mkdir()
    for path in package.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    words = [sys.executable, "-m", "pip", "install", *flags, "--target", str(folder / "site")]
    subprocess.run([*words, str(copy)], check=True, timeout=120)
    return folder / "site"


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a package that was installed into `site`."""
    env = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240)


def check_imports(*sources: Path) -> None:
    """Of kvbaton, files import public names of the SDK alone, and at least one of them does."""
    ours = []
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith("kvbaton") for name in node.names)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvbaton"):
                assert node.module == "kvbaton.connectors"
                ours += [name.name for name in node.names]
    assert ours
    assert set(ours) <= set(kvbaton.connectors.__all__)
