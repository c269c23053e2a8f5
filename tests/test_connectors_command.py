"""``kvbaton connectors list | bench`` and ``kvbaton doctor --store``."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbaton.bench import store as bench
from kvbaton.bench.store import LOOKUP_KEYS, drop_pages, make_calls
from kvbaton.cli import main
from kvbaton.connectors.store import Found, Hints, Store
from kvbaton.connectors.stores.filesystem import FilesystemStore
from kvbaton.connectors.stores.memory import MemoryStore
from kvbaton.doctor import main as doctor
from kvbaton.doctor.main import try_store
from kvbaton.errors import StoreError
from tests.support.few_keys import FEW_KEYS

Capture = pytest.CaptureFixture[str]
SMALL = ["--object-bytes", "4K", "64K", "--bytes", "256K", "--concurrency", "1", "3"]
FILES = 'filesystem:{"path": "{tmp}"}'


@pytest.fixture(autouse=True)
def _no_threads_are_left() -> Iterator[None]:
    """But the guard, which a process has once."""
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before]
    assert left in ([], ["kvbaton-guard"])


def listed(capsys: Capture, *specs: str) -> dict[tuple[str, str], dict[str, Any]]:
    capsys.readouterr()
    main(["connectors", "list", "--json", *specs])
    found = json.loads(capsys.readouterr().out)
    return {(one["kind"], one["name"]): one for one in found}


def test_list_tells_what_is_installed_and_what_it_can_do(capsys: Capture) -> None:
    found = listed(capsys)
    memory = found["store", "memory"]
    assert memory["where"] == "kvbaton.connectors.stores.memory:MemoryStore"
    assert (memory["problem"], memory["capabilities"]["pins"]) == (None, True)
    assert found["transport", "tcp"]["capabilities"]["fence"] == "PEER"
    files = found["store", "filesystem"]
    assert (files["problem"], files["capabilities"]) == ("it needs path", None)
    assert "path*" in files["options"]
    assert main(["connectors", "list"]) == 0
    out = capsys.readouterr().out
    assert ("persistent" in out, "devices \n" in out) == (True, False)


class Remote(FilesystemStore):
    """A vendor's, whose option has the name of what we tell transports."""

    def __init__(self, name: str, *, host: str) -> None:
        super().__init__(name, path=f"/nonexistent/{host}")


def test_list_tells_a_stores_host_among_its_options(capsys: Capture) -> None:
    spec = f"{__name__}:Remote"
    found = listed(capsys, spec)["store", spec]
    assert (found["options"], found["problem"]) == (["host*"], "it needs host")
    assert "host" not in listed(capsys, "tcp")["transport", "tcp"]["options"]


def test_list_needs_no_torch(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import takes longer than all the rest."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if "vllm_adapter" in name]:
        monkeypatch.delitem(sys.modules, name)
    found = listed(capsys)
    assert found["store", "vllm"]["problem"] == "it needs connector"
    nccl = found["transport", "nccl"]
    assert (nccl["problem"], nccl["capabilities"]["fence"]) == (None, "PEER")


def test_list_builds_what_a_spec_names_and_tells_what_keeps_it(
    capsys: Capture, tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere"
    spec = f"filesystem:{json.dumps({'path': str(nowhere)})}"
    assert listed(capsys, spec)["store", spec]["capabilities"]["persistent"]
    assert main(["connectors", "list", spec]) == 0
    assert not nowhere.exists()
    missing = "no_such_package.stores:Store"
    assert "No module" in listed(capsys, missing)["store", missing]["problem"]
    assert main(["connectors", "list", missing]) == 1


def test_list_is_content_if_a_spec_can_be_a_store_or_a_transport(capsys: Capture) -> None:
    """Of a name that is that of both, options are of one."""
    assert main(["connectors", "list", 'memory:{"max_bytes": 4096}']) == 0
    assert "not built: --transport: memory does not take" in capsys.readouterr().out
    assert main(["connectors", "list", "memory", 'memory:{"colour": 1}']) == 1


@pytest.mark.parametrize("words", [[], ["--json"], ["--markdown"]])
def test_list_tells_of_a_class_whose_options_python_does_not_know(
    capsys: Capture, words: list[str]
) -> None:
    main(["connectors", "list", *words, "builtins:dict"])
    assert "builtins:dict" in capsys.readouterr().out


def test_a_missing_dependency_is_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl_cu13", "nixl_cu13._api", "nixl", "nixl._api"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "nixl-cu13" in listed(capsys)["transport", "nixl"]["problem"]


def test_bench_measures_a_store_beside_the_machine(tmp_path: Path, capsys: Capture) -> None:
    out, plot = tmp_path / "store.json", tmp_path / "store.png"
    words = ["connectors", "bench", FILES, *SMALL, "--out", str(out), "--plot", str(plot)]
    assert main(words) == 0
    report = json.loads(out.read_text())
    machine = [("copy", 1), ("disk write", 1), ("disk read", 1), ("disk read cold", 1)]
    ours = [(what, calls) for calls in (1, 3) for what in ("store", "load", "load cold")]
    assert [(row["object KiB"], row["what"], row["at once"]) for row in report["rows"]] == [
        (size, *line) for size in (4, 64) for line in machine + ours
    ]
    for row in report["rows"]:
        assert row["GiB/s"] > 0
        assert row["p50 ms"] <= row["p90 ms"] <= row["p99 ms"]
        assert (row["objects"], row["refused"]) == (256 // row["object KiB"], 0)
    assert [row["keys"] for row in report["lookups"]] == list(LOOKUP_KEYS)
    assert report["machine"]["cores"] >= 1
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "load cold" in capsys.readouterr().out


def test_bench_counts_what_a_store_refuses(capsys: Capture, tmp_path: Path) -> None:
    out, spec = tmp_path / "store.json", 'faulty:{"lose": 0.5}'
    assert main(["connectors", "bench", "--kind=store", spec, *SMALL, "--out", str(out)]) == 0
    rows = [row for row in json.loads(out.read_text())["rows"] if row["what"] == "load"]
    assert 0.2 < sum(row["refused"] for row in rows) / sum(row["objects"] for row in rows) < 0.8
    assert "loads were warm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "status", "says"),
    [
        ('faulty:{"corrupt": [7]}', 1, "what was loaded is not what was stored"),
        ('faulty:{"error": [7]}', 1, "injected error"),
        ('filesystem:{"path": "/proc/nowhere"}', 1, "/proc/nowhere"),
        ("filesystem", 2, "missing a required argument: 'path'"),
        ("nope", 2, "unknown store"),
    ],
)
def test_bench_says_what_a_store_does_wrong(
    spec: str, status: int, says: str, capsys: Capture
) -> None:
    assert main(["connectors", "bench", "--kind=store", spec, *SMALL]) == status
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--plot", "--out", "--folder"])
def test_bench_names_a_place_that_is_none(flag: str, tmp_path: Path, capsys: Capture) -> None:
    place = tmp_path / "none" if flag == "--folder" else tmp_path
    assert main(["connectors", "bench", FILES, *SMALL, flag, str(place)]) == 2
    assert f"error: {flag}: " in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--plot", "--folder"])
def test_bench_refuses_what_is_for_stores(flag: str, tmp_path: Path, capsys: Capture) -> None:
    words = ["connectors", "bench", "tcp", "--object-bytes", "8K", "--bytes", "64K"]
    assert main([*words, flag, str(tmp_path)]) == 2
    assert f"error: {flag}: is for stores, and tcp is a transport" in capsys.readouterr().err


def test_bench_names_sizes_of_a_transports_blocks_as_they_were_given(capsys: Capture) -> None:
    """It named a flag that it does not have."""
    words = ["--object-bytes", "16k", "--bytes", "64K"]
    assert main(["connectors", "bench", "tcp", *words]) == 2
    assert "error: --object-bytes: 16000 is no multiple of" in capsys.readouterr().err


def test_bench_says_that_a_transport_reaches_no_other_process(capsys: Capture) -> None:
    words = ["connectors", "bench", "memory", "--kind", "transport"]
    assert main([*words, "--object-bytes", "8192", "--bytes", "8192"]) == 2
    assert "memory reaches no other process" in capsys.readouterr().err


def test_a_plot_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ["connectors", "bench", "--kind=store", "memory", *SMALL]
    assert main([*words, "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'kvbaton[plots]'" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_workers")
def test_bench_measures_a_transport(tmp_path: Path) -> None:
    out = tmp_path / "tcp.json"
    words = ["--object-bytes", "8K", "--bytes", "64K", "--out", str(out)]
    assert main(["connectors", "bench", "tcp", *words]) == 0
    methods = [row["method"] for row in json.loads(out.read_text())["rows"]]
    assert methods == ["memcpy", "source sums", "tcp", "tcp+digests"]


class TakesTen(MemoryStore):
    """A store that takes no more keys than it declares, and answers no lookup if told so."""

    def __init__(self, name: str, *, silent: bool = False) -> None:
        super().__init__(name, max_bytes=64 << 20)
        self.capabilities = replace(self.capabilities, max_keys=10)
        self._silent = silent

    def lookup(
        self, keys: Sequence[bytes], *, pin: bool = False, prefix: bool = False
    ) -> Future[Found]:
        assert len(keys) <= 10
        return Future() if self._silent else super().lookup(keys, pin=pin, prefix=prefix)


def test_a_store_is_asked_for_no_more_keys_than_it_takes(tmp_path: Path) -> None:
    out = tmp_path / "store.json"
    spec = f"{__name__}:TakesTen"
    assert main(["connectors", "bench", spec, *SMALL, "--out", str(out)]) == 0
    assert [row["keys"] for row in json.loads(out.read_text())["lookups"]] == [1, 10]


def test_what_was_measured_until_it_was_interrupted_is_told(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = bench.measure

    def measure(store: Store, load: bench.StoreLoad, size: int) -> list[dict[str, Any]]:
        if size == 64 << 10:
            signal.raise_signal(signal.SIGINT)
        return measured(store, load, size)

    monkeypatch.setattr(bench, "measure", measure)
    out = tmp_path / "store.json"
    assert main(["connectors", "bench", FILES, *SMALL, "--out", str(out)]) == 130
    report = json.loads(out.read_text())
    assert {row["object KiB"] for row in report["rows"]} == {4}
    assert report["lookups"] == []
    assert "interrupted: 1 of 2 sizes were not measured" in capsys.readouterr().out


def test_a_store_that_does_not_answer_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("kvbaton.bench.store.CALL_S", 0.5)
    spec = f'{__name__}:TakesTen:{{"silent": true}}'
    assert main(["connectors", "bench", spec, *SMALL]) == 1
    assert "a call is not done within 0.5 s" in capsys.readouterr().err


def test_calls_are_made_so_many_at_a_time() -> None:
    pending: list[tuple[int, Future[list[bool]]]] = []
    most, ended = 0, threading.Event()

    def call(number: int) -> Future[list[bool]]:
        nonlocal most
        pending.append((number, Future()))
        most = max(most, len(pending))
        return pending[-1][1]

    def answer() -> None:
        while not ended.wait(0.005):
            if pending:
                number, future = pending.pop(0)
                future.set_result([number % 2 == 0])

    answering = threading.Thread(target=answer)
    answering.start()
    took = make_calls(call, 24, 3)
    ended.set()
    answering.join()
    assert most == 3
    assert took.answers == [number % 2 == 0 for number in range(24)]
    assert len(took.each) == 24
    assert took.seconds >= max(took.each) > 0


def test_a_call_that_fails_is_told() -> None:
    def call(number: int) -> Future[list[bool]]:
        answer: Future[list[bool]] = Future()
        answer.set_exception(StoreError("gone")) if number == 2 else answer.set_result([True])
        return answer

    with pytest.raises(StoreError, match="gone"):
        make_calls(call, 4, 2)


def test_dropping_pages_keeps_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"x" * 10_000)
    drop_pages(tmp_path)
    assert (tmp_path / "deep" / "file").read_bytes() == b"x" * 10_000


@pytest.fixture
def quick_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transports move little, and so does the copy beside them: they are not what is tried."""
    monkeypatch.setattr(doctor, "NUM_BYTES", 4 << 20)


@pytest.mark.usefixtures("quick_doctor")
def test_the_doctor_tries_stores(tmp_path: Path, capsys: Capture) -> None:
    spec = f'filesystem:{{"path": "{tmp_path}"}}'
    words = ["doctor", "--transport=memory", f"--store={spec}", "--store=memory"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [trial["store"] for trial in report["stores"]] == ["filesystem", "memory"]
    for trial in report["stores"]:
        assert trial["failed_at"] is None
        assert min(trial[x] for x in ("store_gib_per_s", "load_gib_per_s", "lookup_us")) > 0
    assert main(words) == 0
    assert "kept and verified" in capsys.readouterr().out
    assert main(["doctor", "--transport=memory", "--store=nope"]) == 1
    assert "failed to load" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "step", "told"),
    [
        ("nope", "load", "known are"),
        ('filesystem:{"path": "/proc/nowhere"}', "open", "/proc/nowhere"),
        ('memory:{"max_bytes": 9000000}', "lookup", "it finds 8 of 32"),
        ('memory:{"max_bytes": 9000}', "store", "it has room for 0 of 32"),
        ('faulty:{"lose": [0]}', "verify", "it gives 31 of 32"),
        ('faulty:{"error": [0], "on": ["store"]}', "store", "injected"),
        ('faulty:{"lose": [0], "on": ["lookup"]}', "lookup", "finds 31"),
        ('faulty:{"corrupt": [0, 3]}', "verify", "2 of 32 objects came back with other bytes"),
        ('faulty:{"error": 1.0, "on": ["delete"]}', "delete", "injected"),
    ],
)
def test_the_step_that_fails_is_named(spec: str, step: str, told: str) -> None:
    trial = try_store(spec)
    assert not trial.ok
    assert (trial.failed_at, told in trial.error) == (step, True), trial.error


def test_a_store_is_tried_with_no_more_keys_in_a_call_than_it_takes() -> None:
    trial = try_store(FEW_KEYS)
    assert trial.ok, trial.error


def test_a_tier_that_is_out_is_told_of() -> None:
    bad = '{"faulty": {"error": 1.0, "on": ["store"]}}'
    trial = try_store(f'tiered:{{"tiers": ["memory", {bad}], "retry_s": 60}}')
    assert trial.ok, trial.error
    assert trial.warnings == ["tiered: faulty is passed over: injected error"]


@pytest.mark.usefixtures("quick_doctor")
@pytest.mark.parametrize("opens", [False, True], ids=["open", "lookup"])
@pytest.mark.parametrize(
    "words",
    [
        ["connectors", "check", "--case", "L0.a-miss-is-no-error", "--case", "L1.outlives-close"],
        ["connectors", "bench", "--bytes", "64K", "--object-bytes=4K"],
        ["doctor", "--json", "--transport", "memory", "--store"],
    ],
    ids=["check", "bench", "doctor"],
)
def test_what_a_store_raises_tells_a_secret_as_it_was_written(
    words: list[str], opens: bool, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("KV_PASSWORD", "hunter2")
    options = {"password": "{env:KV_PASSWORD}", "opens": opens}
    store = "tests.store_connector.misbehaving:TellsItsPassword"
    assert main([*words, f"{store}:{json.dumps(options)}"]) != 0
    said = "".join(capfd.readouterr())
    assert "'{env:KV_PASSWORD}' is " in said
    assert "hunter2" not in said


@pytest.mark.parametrize("words", [["bench"], ["namespaces"]])
def test_a_store_that_can_not_be_opened_is_named(capsys: Capture, words: list[str]) -> None:
    spec = 'redis:{"url": "redis://127.0.0.1:9", "retries": 0}'
    assert main(["connectors", *words, spec]) == 1
    assert f"{spec} can't be opened: " in capsys.readouterr().err


def test_namespaces_of_a_folder_that_holds_no_store(tmp_path: Path, capsys: Capture) -> None:
    """To look must not make what is mistyped."""
    for path in (tmp_path, tmp_path / "mistyped"):
        assert main(["connectors", "namespaces", f'filesystem:{{"path": "{path}"}}']) == 2
        assert f"{path}/kvbaton-1 is missing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class InFolder(MemoryStore):
    """Somebody's store that makes a directory when it is opened."""

    def __init__(self, name: str, *, path: str) -> None:
        super().__init__(name)
        self.directory = path

    def open(self) -> None:
        Path(self.directory).mkdir()
        super().open()


def test_namespaces_of_anybodys_store_make_no_folder(tmp_path: Path, capsys: Capture) -> None:
    options = {"path": f"{tmp_path}/mistyped"}
    spec = f"{__name__}:InFolder:{json.dumps(options)}"
    assert main(["connectors", "namespaces", spec]) == 2
    assert f"{tmp_path}/mistyped is missing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_namespaces_are_listed_and_cleared(tmp_path: Path, capsys: Capture) -> None:
    spec = f'filesystem:{{"path": "{tmp_path}"}}'
    store = FilesystemStore("files", path=str(tmp_path))
    store.open()
    hints = [Hints(namespace="a", tenant="bob"), Hints(namespace="b"), Hints()]
    keys = [bytes([number]) * 32 for number in range(3)]
    assert store.store(keys, [[memoryview(b"x")]] * 3, hints=hints).result(30) == [True] * 3
    store.close()
    assert main(["connectors", "namespaces", spec]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("(none): 1 objects, ")
    assert [line.partition(",")[0] for line in rest] == ["a: 1 objects", "b: 1 objects"]
    assert "(bob " in rest[0]
    assert main(["connectors", "namespaces", spec, "--clear", "a"]) == 0
    out = capsys.readouterr().out
    assert "a: 1 objects forgotten" in out
    assert "b: 1 objects" in out
    assert main(["connectors", "namespaces", "decode_bench"]) == 2
