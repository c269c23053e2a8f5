"""Transports are found by name or path, and every mistake in a spec is named."""

import concurrent.futures
import json
import re
import sys
import traceback
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kvbaton.connectors.registry import TRANSPORTS, list_connectors, load_store, load_transport
from kvbaton.connectors.stores.filesystem import FilesystemStore
from kvbaton.connectors.stores.memory import MemoryStore
from kvbaton.connectors.stores.threaded import ThreadedStore
from kvbaton.connectors.stores.tiered import TieredStore
from kvbaton.connectors.transports.faulty import FaultyTransport
from kvbaton.connectors.transports.memory import MemoryHub, MemoryTransport
from kvbaton.doctor.main import try_store
from kvbaton.engine.store_calls import StoreCalls, StoreStatus
from kvbaton.errors import ConfigError, StoreError
from tests.support.held_store import Backend, Box

PATH = "kvbaton.connectors.transports.memory:MemoryTransport"


def test_the_built_in_transports_are_listed() -> None:
    assert list_connectors(TRANSPORTS)["memory"] == PATH
    assert {"memory", "nixl", "tcp", "faulty"} <= set(list_connectors(TRANSPORTS))


@pytest.mark.parametrize("spec", ["memory", PATH, "memory:{}", f"{PATH}:{{}}"])
def test_a_name_or_a_path_with_or_without_options(spec: str) -> None:
    transport = load_transport(spec, name="one", hub=MemoryHub())
    assert isinstance(transport, MemoryTransport)
    assert transport.name == "one"


def test_options_reach_the_constructor_and_win_over_the_context() -> None:
    spec = 'faulty:{"inner": "memory:{}", "corrupt": [3], "name": "given"}'
    transport = load_transport(spec, name="context", host="127.0.0.1", hub=MemoryHub())
    assert isinstance(transport, FaultyTransport)
    assert transport.name == "given"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            "carrier-pigeon",
            "unknown transport 'carrier-pigeon'; known are .*memory, nccl, nixl, tcp",
        ),
        ("", "unknown transport ''"),
        ("memory:{", "is not JSON"),
        ('{"memory": {}}', "NAME or NAME:"),
        ("memory:[1]", "must be a JSON object"),
        ('memory:{"colour": 1}', "does not take these options: .*colour'$"),
        ('tcp:{"colour": 1}', "does not take these options: .*colour'; its options are "),
        ("no_such_package.mod:Class", "can't load no_such_package.mod:Class: No module"),
        (PATH + "s", "can't load .*MemoryTransports"),
        ("kvbaton.connectors.base:RANGES", "can't load"),
        ("kvbaton.messages.control:PROTOCOL_VERSION", "is not a class"),
        ("builtins:dict", "does not take these options"),
        (
            "builtins:object",
            "does not take name, which each transport is given: got an unexpected",
        ),
        ("argparse:Namespace", "is not a Transport: it lacks capabilities, card"),
    ],
)
def test_what_is_wrong_with_a_spec_is_said(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_transport(spec, name="x")


class Leaves(MemoryStore):
    """Its author checks a licence."""

    def __init__(self, name: str) -> None:
        sys.exit("no licence")


class SaysText(MemoryStore):
    """One of its capabilities has a wrong type."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.capabilities = replace(self.capabilities, max_keys=cast("Any", "1024"))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"fence": "PEER"}, "declares fence='PEER', which is no FenceScope"),
        ({"devices": ["cpu"]}, "declares devices=['cpu'], which is no frozenset"),
        ({"max_notice_bytes": 1e3}, "declares max_notice_bytes=1000.0, which is no int"),
        ({"max_ranges": True}, "declares max_ranges=True, which is no int"),
        ({"processes": 1}, "declares processes=1, which is no bool"),
    ],
)
def test_what_a_transport_says_that_it_can_is_of_the_right_type(
    monkeypatch: pytest.MonkeyPatch, wrong: Any, told: str
) -> None:
    hub = MemoryHub()
    right = load_transport("memory", name="one", hub=hub).capabilities
    monkeypatch.setattr(MemoryTransport, "capabilities", replace(right, **wrong))
    with pytest.raises(ConfigError, match=re.escape(f"--transport: memory {told}")):
        load_transport("memory", name="two", hub=hub)


class SaysNothing(MemoryStore):
    """Its capabilities are none."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.capabilities: Any = {"pins": True}


class CannotLoad(MemoryStore):
    """A method is left out as Python lets one do it."""

    load: Any = None


class Awaited(MemoryStore):
    """Its author was told that a store is asynchronous."""

    async def open(self) -> None:  # type: ignore[override]
        super().open()


@pytest.mark.parametrize(
    ("store", "told"),
    [
        (Leaves, "Leaves can't be built: SystemExit: no licence"),
        (SaysNothing, "SaysNothing declares no valid capabilities: {'pins': True}"),
        (SaysText, "SaysText declares max_keys='1024', which is no int"),
        (CannotLoad, "CannotLoad is not a Store: it lacks load"),
        (Awaited, "Awaited has a coroutine, open, which nobody awaits: .* futures of `concurrent"),
    ],
)
def test_what_is_wrong_with_a_class_is_said(store: type, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_store(f"{__name__}:{store.__name__}")


def test_a_missing_dependency_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl_cu13", "nixl_cu13._api", "nixl", "nixl._api"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="nixl-cu13"):
        load_transport("nixl", name="x")


def test_secrets_come_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KV_FOLDER", "shelf")
    (tmp_path / "secret").write_text("hidden\n")
    path = f"/{{env:KV_FOLDER}}/{{file:{tmp_path}/secret}}"
    inner = json.dumps({"path": path})
    tiers = json.dumps({"tiers": ["memory", f"filesystem:{inner}", {"filesystem": {"path": path}}]})
    found = load_store(f"tiered:{tiers}")
    assert isinstance(found, TieredStore)
    for tier in found.tiers[1:]:
        assert isinstance(tier.store, FilesystemStore)
        assert tier.store.backend.root == "/shelf/hidden/kvbaton-1"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("{env:KV_NONE}", "path needs the environment variable KV_NONE"),
        ("{file:/no}", "path can't"),
    ],
)
def test_a_secret_that_is_missing_is_told(path: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_store("filesystem:" + json.dumps({"path": path}))


class TellsItsPassword(MemoryStore):
    """Its author puts all options into an error."""

    def __init__(self, name: str, *, password: str) -> None:
        raise RuntimeError(f"can't log in with {password!r}")


def test_an_error_tells_a_secret_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_PASSWORD", "hunter2")
    spec = f'{__name__}:TellsItsPassword:{{"password": "{{env:KV_PASSWORD}}"}}'
    with pytest.raises(ConfigError, match=r"log in with '\{env:KV_PASSWORD\}'") as raised:
        load_store(spec)
    assert "hunter2" not in "".join(traceback.format_exception(raised.value, chain=True))


class TellsItsPasswordLater(ThreadedStore):
    """Its author puts it into all errors of calls."""

    def __init__(self, name: str, *, url: str, bug: bool = False) -> None:
        backend = Backend(Box(name))
        super().__init__(name, backend)
        kind = RuntimeError if bug else StoreError

        def fail(*_: object) -> Any:
            raise kind(f"can't log in at {url}\nas I said, {url}")

        backend.contains = fail  # type: ignore[method-assign, assignment]
        self.health = lambda: f"can't log in at {url}"  # type: ignore[method-assign]
        self.open = fail  # type: ignore[method-assign]


@pytest.mark.parametrize("bug", [False, True])
def test_errors_of_calls_tell_a_secret_as_it_was_written(
    bug: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KV_PASSWORD", "hunter2")
    options = {"url": "x://me:{env:KV_PASSWORD}@host", "bug": bug}
    store = load_store(f"{__name__}:TellsItsPasswordLater:{json.dumps(options)}")
    calls = StoreCalls(store)
    ThreadedStore.open(cast(ThreadedStore, store))
    job = calls.lookup([bytes(32)])
    concurrent.futures.wait([cast("Future[Any]", next(job))])
    with pytest.raises(StoreError, match=r"me:\{env:KV_PASSWORD\}@host") as raised:
        next(job)
    status = StoreStatus(calls)
    status._health()
    told = f"{raised.value} {status.trouble} {caplog.text}"
    assert "as I said, x://me:{env:KV_PASSWORD}@host" in caplog.text
    assert ("Traceback" in caplog.text) == bug, "its author wants to see where"
    assert "hunter2" not in told
    store.close()


class TakesTooLittle(MemoryStore):
    """Its author misread a signature."""

    def load(self, keys: Any) -> Any:  # type: ignore[override]
        return super().load(keys, [])


def test_the_doctor_survives_a_call_with_a_wrong_signature() -> None:
    trial = try_store(f"{__name__}:TakesTooLittle")
    assert (trial.failed_at, trial.error[:30]) == ("verify", "TypeError: TakesTooLittle.load")
