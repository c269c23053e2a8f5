"""Transports listen on loopback only, and no longer than they live."""

import os
from pathlib import Path

import pytest

from kvbaton.connectors.guard import guard_card
from kvbaton.connectors.registry import load_transport

SPECS = ["tcp", "nixl"]


@pytest.mark.parametrize("spec", SPECS)
def test_sockets_listen_on_loopback_only(spec: str) -> None:
    guard_card("127.0.0.1")  # it listens as long as the process lives
    before = _listening()
    transport = load_transport(spec, name="listener", host="127.0.0.1")
    new = _listening() - before
    transport.shutdown()
    assert new
    assert {address for address, _ in new} == {"0100007F"}
    assert not _listening() & new


def _listening() -> set[tuple[str, str]]:
    """(address, inode) of the TCP sockets of this process that listen; addresses in hex."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = []
    for table in ("tcp", "tcp6"):
        rows += [r.split() for r in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]
    return {(r[1].split(":")[0], r[9]) for r in rows if r[3] == "0A" and r[9] in inodes}
