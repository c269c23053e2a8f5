"""What tests alter in a forked process, by its environment: timers, and when its engine may step.

`env_of` and `StepHold.env` give variables for `Server`; `alter` heeds them in the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

DEFAULTS, HOLD = "KVBATON_TESTS_DEFAULTS", "KVBATON_TESTS_HOLD"


def env_of(*defaults: tuple[type, dict[str, float]]) -> dict[str, str]:
    """Environment of a process in which fields of dataclasses have other defaults."""
    named = {f"{cls.__module__}:{cls.__qualname__}": values for cls, values in defaults}
    return {DEFAULTS: json.dumps(named)}


class StepHold:
    """Holds the steps of one engine, which otherwise does all that it does.

    Args:
        path: File of the hold; it is there while steps are held.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def env(self) -> dict[str, str]:
        """Environment of the engine's node."""
        return {HOLD: str(self._path)}

    @contextmanager
    def between(self, sequences: int, tokens: int) -> Iterator[None]:
        """No step begins before so many sequences are there, or after one has so many tokens."""
        new = self._path.with_suffix(".new")
        new.write_text(f"{sequences} {tokens}")
        new.replace(self._path)
        try:
            yield
        finally:
            self._path.unlink()


# --- in the process ---


def alter() -> None:
    """Heed the environment, before the command runs."""
    for name, values in json.loads(os.environ.get(DEFAULTS, "{}")).items():
        cls = resolve_name(name)
        having = [field for field in fields(cls) if field.default is not MISSING]
        assert values.keys() <= {field.name for field in having}
        cls.__init__.__defaults__ = tuple(values.get(f.name, f.default) for f in having)
    if path := os.environ.get(HOLD):
        _hold_steps(Path(path))


def _hold_steps(path: Path) -> None:
    from kvbaton.engine.core import EngineCore

    launch = EngineCore.launch

    def launch_unless_held(core: Any) -> None:
        with suppress(FileNotFoundError):
            sequences, tokens = map(int, path.read_text().split())
            there = [*core.scheduler.running, *core.scheduler.waiting]
            if len(there) < sequences or any(one.num_generated >= tokens for one in there):
                return
        launch(core)

    EngineCore.launch = launch_unless_held  # type: ignore[method-assign, assignment]
