"""Runs the trials and prints what they and the machine say: versions, limits, UCX, NIXL."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import msgspec
from msgspec import Struct

import kvbaton
from kvbaton.connectors.base import Device
from kvbaton.connectors.registry import load_store
from kvbaton.connectors.store import Namespaced
from kvbaton.doctor.trials import StoreTrial, TransportTrial, copy_rate, try_store, try_transport
from kvbaton.errors import ConfigError

TRANSPORTS = ("memory", "tcp", "nixl")
SLOW = 0.2
"""A transport below this share of a plain copy is told of."""


class DoctorReport(Struct, kw_only=True):
    """All that ``kvbaton doctor --json`` prints.

    Attributes:
        healthy: whether every trial went well.
        copy_gib_per_s: of a plain copy in memory.
        trials: one per transport and kind of memory.
        stores: one per store that was asked for.
        surroundings: the machine.
    """

    healthy: bool
    copy_gib_per_s: float
    trials: list[TransportTrial]
    stores: list[StoreTrial]
    surroundings: SystemInfo


def run(
    transports: Sequence[str] = (), stores: Sequence[str] = (), *, as_json: bool = False
) -> int:
    """Examine this machine; returns the exit status: 0 if every trial went well, else 1.

    Args:
        transports: specs to try; empty takes `TRANSPORTS`.
        stores: specs to try.
        as_json: print JSON instead of text.
    """
    report = examine(transports or TRANSPORTS, stores)
    text = msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else render(report)
    print(text)
    return 0 if report.healthy else 1


def examine(transports: Sequence[str], stores: Sequence[str] = ()) -> DoctorReport:
    """Try stores, and transports on every kind of memory that this machine has and they take."""
    surroundings, rate = look(), copy_rate()
    devices: list[Device] = ["cpu", "cuda"] if surroundings.gpus else ["cpu"]
    # Memory works on host memory; whoever names another transport wants it all.
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
    """How a trial that went well shows that bytes take a longer way than they should."""
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
    lines += ["", f"{'transport':<14}{'memory':<8}{'GiB/s':>8}{'4 KiB in us':>14}  result"]
    for trial in report.trials:
        figures = f"{trial.gib_per_s:>8.2f}{trial.small_us:>14.0f}  moved and verified"
        if not trial.ok:
            figures = f"{'-':>8}{'-':>14}  failed to {trial.failed_at}: {trial.error}"
        lines += [f"{trial.transport:<14}{trial.device:<8}{figures}"]
    lines += [f"{'(plain copy)':<14}{'cpu':<8}{report.copy_gib_per_s:>8.2f}"]
    if report.stores:
        heads = f"{'store GiB/s':>12}{'load GiB/s':>12}{'lookup us':>11}"
        lines += ["", f"{'store':<14}{heads}  result"]
    for kept in report.stores:
        rates = f"{kept.store_gib_per_s:>12.2f}{kept.load_gib_per_s:>12.2f}"
        figures = f"{rates}{kept.lookup_us:>11.0f}  kept and verified"
        if not kept.ok:
            figures = f"{'-':>12}{'-':>12}{'-':>11}  failed to {kept.failed_at}: {kept.error}"
        lines += [f"{kept.store:<14}{figures}"]
    if found.warnings:
        lines += ["", *(f"warning: {text}" for text in found.warnings)]
    return "\n".join(lines)


PACKAGES = ("torch", "nixl-cu13", "nixl", "pyzmq", "tokenizers", "transformers")
SMALL_SHM_BYTES = 256 << 20


class SystemInfo(Struct, kw_only=True):
    """The machine.

    Attributes:
        versions: of packages and libraries; ``missing`` where there is none.
        gpus: models of the GPUs.
        rdma: names of the RDMA devices.
        ucx_settings: environment variables that steer UCX.
        warnings: what falls back to a slow path, and why.
    """

    versions: dict[str, str]
    gpus: list[str]
    rdma: list[str]
    ucx_settings: dict[str, str]
    warnings: list[str]


def look(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> SystemInfo:
    """Look around.

    Args:
        root: of the file system that is looked at.
        env: environment.
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
    """Of ourselves and of what moves bytes for us."""
    found = {"kvbaton": kvbaton.__version__, "python": platform.python_version()}
    ucx = "missing"
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if package.startswith("nixl") and ucx == "missing":
            # The UCX that NIXL brings with it.
            for file in importlib.metadata.files(package) or []:
                if re.fullmatch(r"libucp[-.].*", file.name):
                    try:
                        library = ctypes.CDLL(str(file.locate()))
                    except OSError as error:
                        ucx = f"unknown ({error})"
                        continue
                    library.ucp_get_version_string.restype = ctypes.c_char_p
                    ucx = library.ucp_get_version_string().decode()
    return found | {"ucx": ucx}


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
        return ""  # not on this kernel, or not for us: nothing to tell


CLEAR_S = 600.0
"""A store may have to look at every object."""


def run_namespaces(spec: str, clear: str | None = None) -> int:
    """List a store's namespaces, and forget one if it is named; the exit status.

    Raises:
        ConfigError: the store can't be opened, or does not tell namespaces apart.
        StoreError: it fails.
    """
    store = load_store(spec)
    if not store.capabilities.namespaces:
        raise ConfigError("SPEC", f"{store.name} does not tell namespaces apart")
    store.open()
    with closing(store):
        able = cast(Namespaced, store)
        if clear is not None:
            print(f"{clear}: {able.clear(clear).result(CLEAR_S)} objects forgotten")
        for name, usage in sorted(able.namespaces().result(CLEAR_S).items()):
            tenants = ", ".join(f"{who} {held}" for who, held in sorted(usage.tenants.items()))
            print(
                f"{name or '(none)'}: {usage.objects} objects, {usage.num_bytes} bytes"
                + (f" ({tenants})" if tenants else "")
            )
    return 0
