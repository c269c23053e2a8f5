"""``kvbaton bench transfer`` in small."""

import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvbaton.bench import transfer
from kvbaton.bench.transfer import total_sum
from kvbaton.cli import main
from kvbaton.errors import TransportError


@pytest.mark.usefixtures("forked_workers")
def test_it_reports_every_method_at_every_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "gone0")  # as one that UCX found, and that went away
    out = tmp_path / "transfer.json"
    words = ["bench", "transfer", "--block-bytes", "8K", "32K", "--bytes", "256K", "--repeats", "2"]
    assert main([*words, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["machine"]["cores"] >= 1
    methods = ["memcpy", "source sums", "bare-nixl", "nixl", "nixl+digests", "tcp", "tcp+digests"]
    assert [(row["block KiB"], row["method"]) for row in report["rows"]] == [
        (size, method) for size in (8, 32) for method in methods
    ]
    assert all(row["GiB/s"] > 0 for row in report["rows"])
    assert "bare-nixl" in capsys.readouterr().out


def test_what_was_measured_until_it_was_interrupted_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = transfer.measure

    def measure(load: transfer.TransferLoad, size: int) -> list[dict[str, Any]]:
        if size == 32 << 10:
            signal.raise_signal(signal.SIGINT)
        return measured(load, size)

    monkeypatch.setattr(transfer, "measure", measure)
    words = ["--transports", "tcp", "--block-bytes", "8K", "32K", "16K", "--bytes", "256K"]
    out = tmp_path / "transfer.json"
    assert main(["bench", "transfer", *words, "--out", str(out)]) == 130
    assert {row["block KiB"] for row in json.loads(out.read_text())["rows"]} == {8}
    assert "interrupted: 2 of 3 block sizes were not measured" in capsys.readouterr().out


def test_blocks_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--block-bytes", "10000"]) == 2
    assert "--block-bytes" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--bytes", "--repeats"])
def test_nothing_to_measure_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--transports", "tcp", name, "0"]) == 2
    assert f"error: {name}: 0 is not positive" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["bench", "transfer"], ["connectors", "bench", "memory", "--kind=store"]]
)
def test_bytes_that_memory_does_not_hold_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--bytes", str(1 << 52)]) == 2  # beyond all address spaces
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvbaton: error: --bytes: 4503599627370496 can't be had: ")


def test_a_bare_write_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "WRITE_TIMEOUT_S", 0.05)
    bare = transfer.BareNixl("bench-alone")
    stuck = SimpleNamespace(transfer=lambda *_: "PROC", check_xfer_state=lambda _: "PROC")
    monkeypatch.setattr(bare, "agent", stuck)
    with pytest.raises(TransportError, match=r"did not end within 0\.05 s"):
        bare.write(None)


@pytest.mark.parametrize("missing", [True, False])
def test_without_nixl_or_the_other_process_it_says_so(
    missing: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both were tracebacks."""
    if missing:
        for package in ("nixl_cu13", "nixl"):
            monkeypatch.setitem(sys.modules, f"{package}._api", None)
    else:
        monkeypatch.setattr(transfer, "BARE_SPEC", f"{__name__}:Unstartable")
    words = ["bench", "transfer", "--bytes", "64K", "--block-bytes", "8K"]
    assert main(words) == (2 if missing else 1)
    said = capsys.readouterr().err
    assert ("nixl needs the package" if missing else "the remote process has ended") in said


def test_what_reaches_no_other_process_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "transfer", "--bytes", "64K", "--block-bytes", "8K"]
    assert main([*words, "--transports", "memory"]) == 2
    assert "--transports: memory reaches no other process" in capsys.readouterr().err


class Unstartable:
    """A transport that can't be built."""

    def __init__(self, name: str, **options: object) -> None:
        raise RuntimeError("no device")


@pytest.mark.usefixtures("forked_workers")
def test_wrong_bytes_are_noticed() -> None:
    load = transfer.TransferLoad(transports=("tcp",), block_bytes=(8192,), num_bytes=65536)
    source = np.arange(65536, dtype=np.uint8)
    with ExitStack() as closing:
        ways = transfer.ways(load, 8192, source, closing)
        ways["tcp+digests"]()
        source[5] += 1
        with pytest.raises(TransportError, match="not what was sent"):
            ways["tcp+digests"]()


def test_the_sum_knows_the_order_of_blocks() -> None:
    memory = np.random.default_rng(3).integers(0, 256, 32768, np.uint8)
    order = np.arange(4)
    assert total_sum(memory, 8192, order) != total_sum(memory, 8192, order[::-1].copy())
