"""What this machine has that transports can use, and which lack makes them slow."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

import kvbaton

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
    found.warnings = [text for text in _warnings(found, root) if text]
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
                    ucx = _ask_ucx(str(file.locate()))
    return found | {"ucx": ucx}


def _ask_ucx(path: str) -> str:
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return f"unknown ({error})"
    library.ucp_get_version_string.restype = ctypes.c_char_p
    text: bytes = library.ucp_get_version_string()
    return text.decode()


def _warnings(found: SystemInfo, root: Path) -> list[str]:
    modules = _read(root / "proc/modules")
    peermem = re.search(r"^nvidia_peermem\b", modules, re.MULTILINE) is not None
    dmabuf = re.search(r"^ib_uverbs\b", modules, re.MULTILINE) is not None
    scope = _read(root / "proc/sys/kernel/yama/ptrace_scope").strip()
    transports, shm = found.ucx_settings.get("UCX_TLS", ""), root / "dev/shm"
    return [
        "" if found.rdma else "no RDMA device: between machines UCX falls back to TCP",
        "" if found.gpus else "no NVIDIA GPU: models and KV cache stay on the CPU",
        "neither nvidia_peermem nor ib_uverbs is loaded: GPU memory reaches the network through "
        "the host"
        if found.gpus and found.rdma and not (peermem or dmabuf)
        else "",
        f"kernel.yama.ptrace_scope is {scope}: UCX can't copy between processes in one go (CMA) "
        "and goes through shared memory"
        if scope not in ("", "0")
        else "",
        f"UCX_TLS={transports} leaves out cuda_ipc: GPU memory of one machine goes through the host"
        if found.gpus and transports and not re.search(r"\b(all|cuda|cuda_ipc)\b", transports)
        else "",
        f"/dev/shm has less than {SMALL_SHM_BYTES >> 20} MiB free: shared memory may fail"
        if not shm.is_dir() or shutil.disk_usage(shm).free < SMALL_SHM_BYTES
        else "",
        "NIXL is not installed: only the transport tcp works between processes"
        if not {"nixl-cu13", "nixl"} & found.versions.keys()
        else "",
    ]


def _list(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # not on this kernel, or not for us: nothing to tell
