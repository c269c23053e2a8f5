"""A vendor's transport: small, built on the SDK's public names alone, and the kit certifies it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples.vendor import ROOT, check_imports, install, run

PACKAGE = ROOT / "examples" / "vendor_transport"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package was installed."""
    return install(PACKAGE, tmp_path_factory.mktemp("vendor"))


def test_it_is_certified(installed: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run(installed, "-m", "kvbaton", "connectors", "check", "vm", "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "vm: certified"
    cases = json.loads(report.read_text())["cases"]
    assert [c["case"] for c in cases if c["verdict"] != "passed"] == ["L2.prepared-writes"]


def test_an_option_that_it_does_not_know_is_told(installed: Path) -> None:
    done = run(installed, "-m", "kvbaton", "connectors", "check", 'vm:{"lanes": 4}')
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--transport" in done.stderr
    assert "lanes" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_is_small_and_imports_public_names_only() -> None:
    assert len((PACKAGE / "kvbaton_vm.py").read_text().splitlines()) <= 280
    check_imports(PACKAGE / "kvbaton_vm.py")
