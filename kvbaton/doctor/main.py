"""``kvbaton doctor``: tests transports and stores, and reports on the machine.

A transport moves bytes between two processes, a store keeps objects. Each is loaded, used, verified
and timed step by step, with the workers and loops of the conformance kit and the benchmarks; the
report names the first step that fails.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from msgspec import Struct

import kvbaton
from kvbaton.connectors.base import Device, Ranges
from kvbaton.connectors.registry import as_written, load_store, load_transport
from kvbaton.connectors.store import KEY_BYTES
from kvbaton.errors import StoreError, TransportError
from kvbaton.testing.kit import CaseFailure, KitBroke
from kvbaton.testing.remote import start_worker
from kvbaton.testing.remote_worker import QUIET
from kvbaton.testing.store_rig import timed_call, views
from kvbaton.testing.transport_rig import Buffer, fresh_name, timed_write

TRANSPORTS = ("memory", "tcp", "nixl")
SLOW = 0.2
"""Share of the speed of a plain copy below which a transport gets a warning."""


class DoctorReport(Struct, kw_only=True):
    """The output of ``kvbaton doctor --json``.

    Attributes:
        healthy: Whether every trial passed.
        copy_gib_per_s: Speed of a plain copy in memory, in GiB/s.
        trials: One per transport and kind of memory.
        stores: One per store that was asked for.
        surroundings: The machine.
    """

    healthy: bool
    copy_gib_per_s: float
    trials: list[TransportTrial]
    stores: list[StoreTrial]
    surroundings: SystemInfo


def run(
    transports: Sequence[str] = (), stores: Sequence[str] = (), *, as_json: bool = False
) -> int:
    """Examine this machine; return the exit status, 0 if every trial passed, else 1.

    Args:
        transports: Specs of transports to test; empty takes `TRANSPORTS`.
        stores: Specs of stores to test.
        as_json: Print JSON instead of text.
    """
    report = examine(transports or TRANSPORTS, stores)
    text = msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else render(report)
    print(text)
    return 0 if report.healthy else 1


def examine(transports: Sequence[str], stores: Sequence[str] = ()) -> DoctorReport:
    """Test stores, and transports on each kind of memory that the machine has."""
    surroundings, rate = look(), copy_rate()
    devices: list[Device] = ["cpu", "cuda"] if surroundings.gpus else ["cpu"]
    # The transport `memory` works on host memory only; others are tested on all kinds.
    trials = [
        try_transport(spec, device)
        for spec in transports
        for device in devices
        if device == "cpu" or spec.partition(":")[0] != "memory"
    ]
    kept = [try_store(spec) for spec in stores]
    surroundings.warnings += [text for trial in trials if (text := slow_path(trial, rate))]
    surroundings.warnings += [text for trial in kept for text in trial.warnings]
    return DoctorReport(
        healthy=all(trial.ok for trial in trials) and all(trial.ok for trial in kept),
        copy_gib_per_s=rate,
        trials=trials,
        stores=kept,
        surroundings=surroundings,
    )


def slow_path(trial: TransportTrial, rate: float) -> str:
    """Warning if a passed trial shows that bytes take a slow path; else empty."""
    if trial.ok and trial.host_staged:
        how = "through the host, a slow path: use nixl where GPUs reach each other"
        return f"{trial.transport} moves GPU memory at {trial.gib_per_s:.1f} GiB/s {how}"
    if trial.ok and trial.device == "cuda" and trial.gib_per_s < rate:
        how = f"no faster than a copy in host memory ({rate:.1f} GiB/s): CUDA IPC is not in use"
        return f"{trial.transport} moves GPU memory at {trial.gib_per_s:.1f} GiB/s, {how}"
    if trial.ok and trial.device == "cpu" and trial.gib_per_s < SLOW * rate:
        share = f"{trial.gib_per_s / rate:.0%} of a plain copy's {rate:.1f} GiB/s"
        return f"{trial.transport} is slow here: {share}"
    return ""


def render(report: DoctorReport) -> str:
    """The report for people."""
    found = report.surroundings
    lines = [f"{name:<14}{version}" for name, version in found.versions.items()]
    lines += [f"{'GPUs':<14}{', '.join(found.gpus) or 'none'}"]
    lines += [f"{'RDMA devices':<14}{', '.join(found.rdma) or 'none'}"]
    lines += [f"{name:<14}{value}" for name, value in found.ucx_settings.items()]
    shown = [trial.transport for trial in report.trials] + [kept.store for kept in report.stores]
    width = max(13, *map(len, shown)) + 1
    lines += ["", f"{'transport':<{width}}{'memory':<8}{'GiB/s':>8}{'4 KiB in us':>14}  result"]
    for trial in report.trials:
        figures = f"{trial.gib_per_s:>8.2f}{trial.small_us:>14.0f}  moved and verified"
        if not trial.ok:
            figures = f"{'-':>8}{'-':>14}  failed to {trial.failed_at}: {trial.error}"
        lines += [f"{trial.transport:<{width}}{trial.device:<8}{figures}"]
    lines += [f"{'(plain copy)':<{width}}{'cpu':<8}{report.copy_gib_per_s:>8.2f}"]
    if report.stores:
        heads = f"{'store GiB/s':>12}{'load GiB/s':>12}{'lookup us':>11}"
        lines += ["", f"{'store':<{width}}{heads}  result"]
    for kept in report.stores:
        rates = f"{kept.store_gib_per_s:>12.2f}{kept.load_gib_per_s:>12.2f}"
        figures = f"{rates}{kept.lookup_us:>11.0f}  kept and verified"
        if not kept.ok:
            figures = f"{'-':>12}{'-':>12}{'-':>11}  failed to {kept.failed_at}: {kept.error}"
        lines += [f"{kept.store:<{width}}{figures}"]
    if found.warnings:
        lines += ["", *(f"warning: {text}" for text in found.warnings)]
    return "\n".join(lines)


# --- the machine ---

PACKAGES = ("torch", "nixl-cu13", "nixl", "pyzmq", "tokenizers", "transformers")
SMALL_SHM_BYTES = 256 << 20


class SystemInfo(Struct, kw_only=True):
    """The machine.

    Attributes:
        versions: Versions of packages and libraries; ``missing`` if there is none.
        gpus: Models of the GPUs.
        rdma: Names of the RDMA devices.
        ucx_settings: Environment variables of UCX.
        warnings: What falls back to a slow path, and why.
    """

    versions: dict[str, str]
    gpus: list[str]
    rdma: list[str]
    ucx_settings: dict[str, str]
    warnings: list[str]


def look(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> SystemInfo:
    """Examine the machine.

    Args:
        root: Root of the file system to read.
        env: Environment variables.
    """
    gpus = []
    for gpu in sorted(_list(root / "proc/driver/nvidia/gpus")):
        model = re.search(r"^Model:\s*(.+)$", _read(gpu / "information"), re.MULTILINE)
        gpus.append(model[1] if model else "unknown model")
    found = SystemInfo(
        versions=versions(),
        gpus=gpus,
        rdma=sorted(path.name for path in _list(root / "sys/class/infiniband")),
        ucx_settings={name: env[name] for name in sorted(env) if name.startswith("UCX_")},
        warnings=[],
    )
    found.warnings = _warnings(found, root)
    return found


def versions() -> dict[str, str]:
    """Versions of kvbaton, Python, and packages that kvbaton depends on."""
    found = {"kvbaton": kvbaton.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    brought = (_ucx_of(package) for package in found if package.startswith("nixl"))
    return found | {"ucx": next(filter(None, brought), "missing")}


def _ucx_of(package: str) -> str:
    """Version of the UCX in a package of NIXL; empty if it has none."""
    told = ""
    for file in importlib.metadata.files(package) or []:
        if re.fullmatch(r"libucp[-.].*", file.name):
            try:
                library = ctypes.CDLL(str(file.locate()))
            except OSError as error:
                told = f"unknown ({error})"
                continue
            library.ucp_get_version_string.restype = ctypes.c_char_p
            return str(library.ucp_get_version_string().decode())
    return told


def _warnings(found: SystemInfo, root: Path) -> list[str]:
    modules = _read(root / "proc/modules")
    peermem = re.search(r"^nvidia_peermem\b", modules, re.MULTILINE) is not None
    dmabuf = re.search(r"^ib_uverbs\b", modules, re.MULTILINE) is not None
    scope = _read(root / "proc/sys/kernel/yama/ptrace_scope").strip()
    transports, shm = found.ucx_settings.get("UCX_TLS", ""), root / "dev/shm"
    told = {
        "no RDMA device: between machines UCX falls back to TCP": not found.rdma,
        "no NVIDIA GPU: models and KV cache stay on the CPU": not found.gpus,
        "neither nvidia_peermem nor ib_uverbs is loaded: GPU memory reaches the network through "
        "the host": found.gpus and found.rdma and not (peermem or dmabuf),
        f"kernel.yama.ptrace_scope is {scope}: UCX can't copy between processes in one go (CMA) "
        "and goes through shared memory": scope not in ("", "0"),
        f"UCX_TLS={transports} leaves out cuda_ipc: GPU memory of one machine goes through the "
        "host": found.gpus and transports and not re.search(r"\b(all|cuda|cuda_ipc)\b", transports),
        f"/dev/shm has less than {SMALL_SHM_BYTES >> 20} MiB free: shared memory may fail": (
            not shm.is_dir() or shutil.disk_usage(shm).free < SMALL_SHM_BYTES
        ),
        "NIXL is not installed: only the transport tcp works between processes": (
            not {"nixl-cu13", "nixl"} & found.versions.keys()
        ),
    }
    return [text for text, holds in told.items() if holds]


def _list(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # this kernel does not have it, or it is not readable


# --- trials ---

NUM_BYTES = 64 << 20
RUN_BYTES = 64 << 10
"""Bytes of a run in the test pattern; each run is swapped with its neighbour."""
SMALL_BYTES = 4 << 10
REPEATS = 5
OBJECT_BYTES = 1 << 20
NUM_OBJECTS = 32
STEP_S = 30.0


class ConnectorTrial(Struct, kw_only=True):
    """Result of testing a connector.

    Attributes:
        failed_at: The step that failed; None if all passed.
        error: Why it failed.
    """

    failed_at: str | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether every step passed."""
        return self.failed_at is None

    def take(self, names: Sequence[str], steps: Generator[None]) -> None:
        """Run named steps up to the first that fails; exceptions of the connector are recorded."""
        try:
            with closing(steps):
                for name in names:
                    self.failed_at = name
                    next(steps)
                self.failed_at = "close"
            self.failed_at = None
        # Errors of the remote process; their text names the type.
        except (CaseFailure, KitBroke) as failure:
            self.error = as_written(str(failure))
        except (Exception, SystemExit) as error:
            self.error = as_written(f"{type(error).__name__}: {error}")


# --- a transport ---


class TransportTrial(ConnectorTrial, kw_only=True):
    """Result of testing a transport.

    Attributes:
        transport: Name of the transport.
        device: Kind of the memory at both ends.
        gib_per_s: Speed in GiB/s of 64 KiB runs, the best of a few writes of 64 MiB.
        small_us: Microseconds of a 4 KiB write until it is known to have landed.
        host_staged: Whether the bytes passed through host memory on their way.
    """

    transport: str
    device: str
    gib_per_s: float = 0.0
    small_us: float = 0.0
    host_staged: bool = False


def try_transport(spec: str, device: Device) -> TransportTrial:
    """Test a transport: move bytes of a device into another process."""
    trial = TransportTrial(transport=spec.partition(":{")[0], device=device)
    names = ("load", "register", "connect", "move", "verify", "time")
    trial.take(names, _transport_steps(spec, device, trial))
    return trial


def _transport_steps(spec: str, device: Device, trial: TransportTrial) -> Generator[None]:
    """Yield after each step."""
    with ExitStack() as ending:
        near = load_transport(spec, name=fresh_name())
        ending.callback(near.shutdown)
        yield
        ours = Buffer(device, NUM_BYTES, None)  # a transport need not keep it alive
        near.register(ours.memory)
        trial.host_staged = device in near.capabilities.host_staged
        yield
        poll: Callable[[], object] | None = None  # drives a target within this process
        if near.capabilities.processes:
            remote = start_worker("transport", spec, NUM_BYTES, device, patience=STEP_S)
            ending.enter_context(remote)
            card = remote.card()
        else:
            far, buffer = load_transport(spec, name=fresh_name()), Buffer(device, NUM_BYTES, 0)
            ending.callback(far.shutdown)
            far.register(buffer.memory)
            card, poll = far.card(), far.notices
        peer = near.connect(card)
        yield

        def seconds(ranges: Ranges, notice: bytes) -> float:
            return timed_write(near, peer, ranges, notice, poll=poll, patience=STEP_S)

        count = NUM_BYTES // RUN_BYTES
        large = np.zeros((count, 8), np.int64)
        large[:, 1] = np.arange(count) * RUN_BYTES
        large[:, 3] = (np.arange(count) ^ 1) * RUN_BYTES  # each run swapped with its neighbour
        large[:, 4], large[:, 5] = RUN_BYTES, 1
        seconds(large, b"check")
        yield
        local = not near.capabilities.processes
        found = buffer.digest() if local else remote.line("notice", idle=near.notices)[-1]
        wanted = Buffer("cpu", NUM_BYTES, None)
        pairs = np.asarray(wanted.memory.owner).reshape(-1, 2, RUN_BYTES)
        pairs[:] = pairs[:, ::-1].copy()
        if found != wanted.digest():
            raise TransportError(f"the far side holds {found}, but {wanted.digest()} was sent")
        yield
        small = np.array([[0, 0, 0, 0, SMALL_BYTES, 1, 0, 0]], np.int64)
        best = min(seconds(large, QUIET) for _ in range(REPEATS))
        trial.gib_per_s = NUM_BYTES / best / 2**30
        trial.small_us = 1e6 * median(seconds(small, QUIET) for _ in range(10 * REPEATS))
        yield


def copy_rate() -> float:
    """Speed of a plain copy in memory, in GiB/s."""
    source, target = np.ones(NUM_BYTES, np.uint8), np.zeros(NUM_BYTES, np.uint8)
    each = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        np.copyto(target, source)
        each.append(time.perf_counter() - start)
    return NUM_BYTES / min(each) / 2**30


# --- a store ---


class StoreTrial(ConnectorTrial, kw_only=True):
    """Result of testing a store.

    Attributes:
        store: Name of the store.
        store_gib_per_s: Speed in GiB/s of storing 32 objects of 1 MiB in one call.
        load_gib_per_s: Speed in GiB/s of loading these objects, just stored.
        lookup_us: Microseconds of one lookup of the 32 keys.
        warnings: Outages of the store or of its tiers.
    """

    store: str
    store_gib_per_s: float = 0.0
    load_gib_per_s: float = 0.0
    lookup_us: float = 0.0
    warnings: list[str] = []


def try_store(spec: str) -> StoreTrial:
    """Test a store: store objects, load and verify them, and delete them."""
    trial = StoreTrial(store=spec.partition(":{")[0])
    trial.take(("load", "open", "store", "lookup", "verify", "delete"), _store_steps(spec, trial))
    return trial


def _store_steps(spec: str, trial: StoreTrial) -> Generator[None]:
    """Yield after each step."""
    store = load_store(spec)
    yield
    store.open()
    with closing(store):
        yield
        count = min(NUM_OBJECTS, store.capabilities.max_keys)
        keys = [os.urandom(KEY_BYTES) for _ in range(count)]
        sent = np.random.default_rng(1).integers(0, 256, (count, OBJECT_BYTES), np.uint8)
        kept, seconds = timed_call(partial(store.store, keys, views(sent)), STEP_S)
        trial.store_gib_per_s = sent.nbytes / seconds / 2**30
        if not all(kept):
            raise StoreError(f"it has room for {sum(kept)} of {count} objects of 1 MiB")
        yield
        found, seconds = timed_call(partial(store.lookup, keys), STEP_S)
        trial.lookup_us = 1e6 * seconds
        if not all(found.present):
            raise StoreError(f"it finds {sum(found.present)} of {count} objects it keeps")
        yield
        came = np.zeros_like(sent)
        loaded, seconds = timed_call(partial(store.load, keys, views(came)), STEP_S)
        trial.load_gib_per_s = sent.nbytes / seconds / 2**30
        if not all(loaded):
            raise StoreError(f"it gives {sum(loaded)} of {count} objects it keeps")
        if wrong := int((came != sent).any(axis=1).sum()):
            raise StoreError(f"{wrong} of {count} objects came back with other bytes")
        yield
        if store.capabilities.deletes:
            timed_call(partial(store.delete, keys), STEP_S)
        outages: dict[str, str] = getattr(store, "outages", dict)()
        reasons = [f"{tier} is passed over: {why}" for tier, why in outages.items()]
        if (health := store.health()) is not None:
            reasons.append(health)
        trial.warnings = [as_written(f"{trial.store}: {reason}") for reason in reasons]
        yield
