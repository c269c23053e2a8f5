"""Profiles of the engine core, as Chrome traces: ``/start_profile`` and ``/stop_profile``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kvbaton.errors import ConfigError, RequestError


class TorchProfiler:
    """Profiles all threads of this process, and its GPUs, between `start` and `stop`.

    Args:
        folder: Folder for traces; None disables profiling.
        name: Name of the node, which file names begin with.

    Raises:
        ConfigError: The folder can't be written to.
    """

    def __init__(self, folder: str | None, name: str) -> None:
        self._folder, self._name = folder, name
        self._profile: Any = None
        if folder is not None:
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                raise ConfigError("--profile-dir", str(error)) from error
            if not os.access(folder, os.W_OK):
                raise ConfigError("--profile-dir", f"{folder!r} can't be written to")

    def start(self) -> None:
        """Start a profile.

        Raises:
            RequestError: 409, there is no folder for it, or a profile is being recorded.
        """
        if self._folder is None:
            raise _refused("no profile is made: this node was started without --profile-dir DIR")
        if self._profile is not None:
            raise _refused("a profile is being made; end it with /stop_profile")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        began: Any = profile(activities=activities, experimental_config=every_thread)
        began.start()
        self._profile = began

    def stop(self) -> str:
        """Stop the profile and write it, while the engine waits; returns the file's path.

        Raises:
            RequestError: 409, no profile is being recorded, or it could not be written.
        """
        if self._profile is None or self._folder is None:
            raise _refused("no profile is being made; begin one with /start_profile")
        ended, self._profile = self._profile, None
        ended.stop()
        date = time.strftime("%Y%m%dT%H%M%S")
        path = Path(self._folder, f"{self._name}-{date}-{time.monotonic_ns()}.pt.trace.json.gz")
        try:
            ended.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            path.unlink(missing_ok=True)  # the rest of it is missing
            raise _refused(f"the profile can't be written: {error}") from error
        return str(path)


def _refused(why: str) -> RequestError:
    return RequestError(why, status=409, code="profile")
