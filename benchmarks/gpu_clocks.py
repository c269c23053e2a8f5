"""Samples clock and power of a GPU with NVML; needs ``nvidia-ml-py``."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import numpy as np

PERIOD_S = 0.01
"""Seconds between samples. NVML updates power about every 20 ms, clocks at each call."""


class Clocks(NamedTuple):
    """State of a GPU over an interval.

    Attributes:
        mhz: Mean clock of the multiprocessors.
        watts: Mean power.
        capped: Share of samples in which the power cap lowered the clock.
        samples: Number of samples.
    """

    mhz: float
    watts: float
    capped: float
    samples: int


class GpuClocks:
    """Samples one GPU in a thread, from construction until `close`.

    Args:
        gpu: Index among all GPUs of the machine or UUID, as in CUDA_VISIBLE_DEVICES.

    Raises:
        ImportError: ``nvidia-ml-py`` is not installed.
        NVMLError: There is no such GPU.
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
        """State between two times of the monotonic clock; NaN without samples."""
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
