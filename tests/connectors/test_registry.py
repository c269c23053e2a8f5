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
        ("memory:max_bytes=3", "'max_bytes=3' after memory is not JSON"),
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
        ({"max_notice_bytes": 79}, "declares max_notice_bytes=79; it must be at least 80"),
        ({"max_ranges": 0}, "declares max_ranges=0; it must be at least 1"),
        ({"devices": frozenset({"gpu"})}, "declares devices gpu; there is cpu, cuda"),
        ({"host_staged": frozenset({"cuda"})}, "declares host_staged cuda; there is cpu"),
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


class CallsItself(MemoryTransport):
    """Its author wants to see the vendor's name in logs."""

    def __init__(self, name: str, *, host: str, hub: MemoryHub) -> None:
        super().__init__(f"vendor-{name}", hub=hub)


class PreparesInPart(MemoryTransport):
    """What is prepared is never freed."""

    def prepare(self, peer: Any, ranges: Any) -> object:
        return peer, ranges

    def post(self, prepared: Any, notice: bytes) -> Any:
        peer, ranges = prepared
        return self.write(peer, ranges, notice)


class WritesUnnoticed(MemoryTransport):
    """Its author misread a signature."""

    def write(self, peer: Any, ranges: Any) -> Any:  # type: ignore[override]
        return super().write(peer, ranges, b"")


@pytest.mark.parametrize(
    ("transport", "told"),
    [
        (CallsItself, "CallsItself was named 'one', but calls itself 'vendor-one'"),
        (PreparesInPart, "PreparesInPart has some of discard, post, prepare, but lacks discard"),
        (WritesUnnoticed, r"WritesUnnoticed can't be called as write\(peer, ranges, notice\): too"),
    ],
)
def test_what_is_wrong_with_a_transport_is_said(transport: type, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_transport(f"{__name__}:{transport.__name__}", name="one", hub=MemoryHub())


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


class Declares(MemoryStore):
    """Of what `able` says, it has nothing to show."""

    able: Any

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.capabilities = replace(self.capabilities, **self.able)


class ExpiresUnhinted(Declares):
    able = {"hints": False, "namespaces": False}  # noqa: RUF012


class ClearsUnhinted(Declares):
    able = {"hints": False, "expires": False}  # noqa: RUF012


class ClaimsInWords(Declares):
    able = {"claims": True}  # noqa: RUF012
    claim: Any = None


class TakesNoMemory(Declares):
    able = {"devices": frozenset({"cpu"})}  # noqa: RUF012
    register: Any = None


class TakesNoKeys(Declares):
    able = {"max_keys": 0}  # noqa: RUF012


class RegistersLater(MemoryStore):
    async def register(self, regions: Any) -> None:  # type: ignore[override]
        """Nobody awaits it."""


class Unpinned(MemoryStore):
    def lookup(self, keys: Any) -> Any:  # type: ignore[override]
        return super().lookup(keys)


class LoadsMany(Backend):
    """It can't store many."""

    def get_many(self, keys: Any, targets: Any) -> list[bool]:
        return [False] * len(keys)


class LoadsManyLater(LoadsMany):
    async def get_many(self, keys: Any, targets: Any) -> list[bool]:  # type: ignore[override]
        return [False] * len(keys)

    def put_many(self, keys: Any, sources: Any) -> list[bool]:
        return [False] * len(keys)


class Returns(Backend):
    """It returns the bytes, as clients do."""

    def get(self, key: bytes) -> Any:  # type: ignore[override]
        return None


def over(backend: type[Backend]) -> type:
    """A store over a back end."""

    def build(self: ThreadedStore, name: str) -> None:
        ThreadedStore.__init__(self, name, backend(Box(name)))

    made = type(f"Over{backend.__name__}", (ThreadedStore,), {"__init__": build})
    globals()[made.__name__] = made
    return made


@pytest.mark.parametrize(
    ("store", "told"),
    [
        (ExpiresUnhinted, "ExpiresUnhinted declares expires, but not hints, in which"),
        (ClearsUnhinted, "ClearsUnhinted declares namespaces, but not hints, in which"),
        (ClaimsInWords, "ClaimsInWords declares claims, but lacks claim"),
        (TakesNoMemory, "TakesNoMemory declares devices, but lacks register"),
        (TakesNoKeys, "TakesNoKeys declares max_keys=0; it must be at least 1"),
        (RegistersLater, "RegistersLater has a coroutine, register, which nobody awaits"),
        (Unpinned, r"can't be called as lookup\(keys, pin=False\): got an unexpected .* 'pin'"),
        (over(LoadsMany), "LoadsMany, has some of get_many, put_many, but lacks put_many"),
        (over(LoadsManyLater), "LoadsManyLater, has a coroutine, get_many, but its calls block"),
        (over(Returns), r"Returns, can't be called as get\(key, target\): too many positional"),
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


class GivesTooLittle(MemoryStore):
    """Its author misread its client's signature."""

    def load(self, keys: Any, targets: Any) -> Any:
        return super().load(keys)  # type: ignore[call-arg]


def test_the_doctor_survives_a_call_that_raises() -> None:
    trial = try_store(f"{__name__}:GivesTooLittle")
    assert (trial.failed_at, trial.error[:29]) == ("verify", "TypeError: ThreadedStore.load")
