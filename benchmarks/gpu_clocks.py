"""Clock and power of a GPU while something ran on it, by NVML; needs ``nvidia-ml-py``."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import numpy as np

PERIOD_S = 0.01
"""NVML gives a new momentary power about every 20 ms, a clock whenever asked."""


class Clocks(NamedTuple):
    """What a GPU did over a while.

    Attributes:
        mhz: of its multiprocessors, mean.
        watts: mean.
        capped: share of the samples in which its power cap held the clock down.
        samples: how many there were.
    """

    mhz: float
    watts: float
    capped: float
    samples: int


class GpuClocks:
    """Samples one GPU from construction until `close`, by a thread.

    Args:
        gpu: as CUDA_VISIBLE_DEVICES names it: its number among all of the machine, or its UUID.

    Raises:
        ImportError: ``nvidia-ml-py`` is not installed.
        NVMLError: there is no such GPU.
    """

    def __init__(self, gpu: str) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._gpu = (
            pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
            if gpu.isdigit()
            else pynvml.nvmlDeviceGetHandleByUUID(gpu)
        )
        self._rows: list[tuple[float, float, float, bool]] = []
        self._closed = threading.Event()
        self._sample()
        self._thread = threading.Thread(target=self._run, name="gpu-clocks", daemon=True)
        self._thread.start()

    def between(self, began: float, ended: float) -> Clocks:
        """Over a while of the monotonic clock; NaN where nothing was sampled."""
        rows = [row[1:] for row in list(self._rows) if began <= row[0] <= ended]
        mhz, watts, capped = np.mean(rows, axis=0) if rows else (float("nan"),) * 3
        return Clocks(float(mhz), float(watts), float(capped), len(rows))

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            self._sample()

    def _sample(self) -> None:
        nvml, gpu = self._nvml, self._gpu
        mhz = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
        power = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        capped = bool(reasons & nvml.nvmlClocksThrottleReasonSwPowerCap)
        self._rows.append((time.monotonic(), mhz, power.value.uiVal / 1e3, capped))
