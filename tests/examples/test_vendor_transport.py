"""A vendor's transport: small, built on the SDK's public names alone, and the kit certifies it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvbaton.connectors

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "vendor_transport"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package was installed, built from a copy of its sources."""
    folder = tmp_path_factory.mktemp("vendor")
    copy = folder / "sources"
    copy.mkdir()
    for path in PACKAGE.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    words = [sys.executable, "-m", "pip", "install", *flags, "--target", str(folder / "site")]
    subprocess.run([*words, str(copy)], check=True, timeout=120)
    return folder / "site"


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_it_is_certified(installed: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run(installed, "-m", "kvbaton", "connectors", "check", "vm", "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "vm: certified"
    verdicts = {case["verdict"] for case in json.loads(report.read_text())["cases"]}
    assert verdicts == {"passed"}


def test_an_option_that_it_does_not_know_is_told(installed: Path) -> None:
    done = run(installed, "-m", "kvbaton", "connectors", "check", 'vm:{"lanes": 4}')
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--transport" in done.stderr
    assert "lanes" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_is_small_and_imports_public_names_only() -> None:
    text = (PACKAGE / "kvbaton_vm.py").read_text()
    assert len(text.splitlines()) <= 280
    ours = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert not any(name.name.startswith("kvbaton") for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvbaton"):
            assert node.module == "kvbaton.connectors"
            ours += [name.name for name in node.names]
    assert ours
    assert set(ours) <= set(kvbaton.connectors.__all__)
