"""Runs the trials and prints what they and the surroundings say."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from kvbaton.connectors.base import Device
from kvbaton.doctor.store_trial import StoreTrial, try_store
from kvbaton.doctor.surroundings import Surroundings, look
from kvbaton.doctor.trial import Trial, copy_rate, try_transport

TRANSPORTS = ("memory", "tcp", "nixl")
SLOW = 0.2
"""A transport below this share of a plain copy is told of."""


class Report(Struct, kw_only=True):
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
    trials: list[Trial]
    stores: list[StoreTrial]
    surroundings: Surroundings


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
    sys.stdout.write(text + "\n")
    return 0 if report.healthy else 1


def examine(transports: Sequence[str], stores: Sequence[str] = ()) -> Report:
    """Try stores, and transports on every kind of memory that this machine has and they take."""
    surroundings, rate = look(), copy_rate()
    devices: list[Device] = ["cpu", "cuda"] if surroundings.gpus else ["cpu"]
    wanted = [(spec, device) for spec in transports for device in devices]
    trials = [try_transport(spec, device) for spec, device in wanted if _takes(spec, device)]
    kept = [try_store(spec) for spec in stores]
    surroundings.warnings += [text for trial in trials if (text := _slow(trial, rate))]
    surroundings.warnings += [text for trial in kept for text in trial.warnings]
    return Report(
        healthy=all(trial.ok for trial in trials) and all(trial.ok for trial in kept),
        copy_gib_per_s=rate,
        trials=trials,
        stores=kept,
        surroundings=surroundings,
    )


def _slow(trial: Trial, rate: float) -> str:
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


def _takes(spec: str, device: Device) -> bool:
    """Memory works on host memory; whoever names another transport wants it all."""
    return device == "cpu" or spec.partition(":")[0] != "memory"


def render(report: Report) -> str:
    """The report for people."""
    found = report.surroundings
    lines = [f"{name:<14}{version}" for name, version in found.versions.items()]
    lines += [f"{'GPUs':<14}{', '.join(found.gpus) or 'none'}"]
    lines += [f"{'RDMA devices':<14}{', '.join(found.rdma) or 'none'}"]
    lines += [f"{name:<14}{value}" for name, value in found.ucx_settings.items()]
    lines += ["", f"{'transport':<14}{'memory':<8}{'GiB/s':>8}{'4 KiB in us':>14}  result"]
    lines += [_row(trial) for trial in report.trials]
    lines += [f"{'(plain copy)':<14}{'cpu':<8}{report.copy_gib_per_s:>8.2f}"]
    if report.stores:
        lines += [
            "",
            f"{'store':<14}{'store GiB/s':>12}{'load GiB/s':>12}{'lookup us':>11}  result",
        ]
        lines += [_store_row(trial) for trial in report.stores]
    if found.warnings:
        lines += ["", *(f"warning: {text}" for text in found.warnings)]
    return "\n".join(lines)


def _row(trial: Trial) -> str:
    where = f"{trial.transport:<14}{trial.device:<8}"
    if not trial.ok:
        return f"{where}{'-':>8}{'-':>14}  failed to {trial.failed_at}: {trial.error}"
    return f"{where}{trial.gib_per_s:>8.2f}{trial.small_us:>14.0f}  moved and verified"


def _store_row(trial: StoreTrial) -> str:
    if not trial.ok:
        nothing = f"{'-':>12}{'-':>12}{'-':>11}"
        return f"{trial.store:<14}{nothing}  failed to {trial.failed_at}: {trial.error}"
    rates = f"{trial.store_gib_per_s:>12.2f}{trial.load_gib_per_s:>12.2f}{trial.lookup_us:>11.0f}"
    return f"{trial.store:<14}{rates}  kept and verified"
