"""The units for systemd: their commands, their limits, and what systemd itself says of them."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kvbaton.cli import make_parser

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
COMMAND = "/opt/kvbaton/bin/kvbaton"
UNITS = {"kvbaton-router.service": "router.yaml", "kvbaton-node@.service": "node-0.yaml"}


def values_of(unit: str, key: str) -> list[str]:
    """All values of a key; unlike INI files, units may repeat one."""
    text = (FOLDER / unit).read_text().replace("%i", "0")
    return re.findall(rf"^{key}=-?(.*)$", text, re.MULTILINE)


def parsed(unit: str, key: str) -> argparse.Namespace:
    """Arguments of a unit's command, with our example of its configuration."""
    (line,) = values_of(unit, key)
    command, *words = shlex.split(line.replace("/etc/kvbaton", str(FOLDER)))
    assert command == COMMAND
    return make_parser().parse_args(words)


@pytest.mark.parametrize("unit", UNITS)
def test_the_command_takes_the_example_and_ends_in_time(unit: str) -> None:
    args, (timeout,) = parsed(unit, "ExecStart"), values_of(unit, "TimeoutStopSec")
    assert Path(args.config) == FOLDER / UNITS[unit]
    assert args.shutdown_timeout + 10 < float(timeout), "it kills what takes longer"


def test_the_router_is_drained_where_it_listens() -> None:
    drain, args = (parsed("kvbaton-router.service", key) for key in ("ExecStop", "ExecStart"))
    assert drain.url == f"http://127.0.0.1:{args.port}"
    assert args.host == "0.0.0.0"
    (timeout,) = values_of("kvbaton-router.service", "TimeoutStopSec")
    assert drain.settle < drain.timeout < float(timeout)


def test_the_nodes_router_is_the_routers_port() -> None:
    (url,) = parsed("kvbaton-node@.service", "ExecStart").router
    assert url.endswith(f":{parsed('kvbaton-router.service', 'ExecStart').port}")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_finds_nothing_wrong(unit: str, tmp_path: Path) -> None:
    copy = tmp_path / unit
    copy.write_text((FOLDER / unit).read_text().replace(COMMAND, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60
    )
    assert (done.stderr, done.returncode) == ("", 0)
