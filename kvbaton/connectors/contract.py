"""Versions of the contracts of stores and transports: which plug-ins this kvbaton can load.

A contract's version is ``MAJOR.MINOR``. A plug-in's class names the one that it was written to in
an attribute ``contract``; one without it was written to 1.0.

- A minor version adds what a plug-in may have or ignore. One that needs a later minor version than
  ours is refused: it may rely on being asked.
- A major version changes what a plug-in must do. Ours and the one before it are loaded, the latter
  with a warning, for at least two minor releases of kvbaton and six months; after that, and if it
  is of a later one, a plug-in is refused. Both texts say what to install.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

from kvbaton.errors import ConfigError

FIRST = "1.0"
_VERSION = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True)
class Contract:
    """What of one kind this kvbaton loads.

    Attributes:
        major: the present version.
        minor: the present version.
        oldest: the oldest major version that is still loaded, with a warning if it is not ours.
    """

    major: int
    minor: int
    oldest: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    def check(self, flag: str, target: str, connector: object) -> str:
        """The version that a plug-in's class, or the plug-in, was written to.

        Args:
            flag: that named it.
            target: its name or path.
            connector: the class or the plug-in.

        Raises:
            ConfigError: it is none that can be loaded.
        """
        written = getattr(connector, "contract", FIRST)
        version = _VERSION.fullmatch(written) if isinstance(written, str) else None
        if version is None:
            raise ConfigError(flag, f"{target}'s contract is {written!r}, not MAJOR.MINOR")
        major, minor = map(int, version.groups())
        ours = f"this kvbaton knows {self.oldest}.0 to {self}"
        if (major, minor) > (self.major, self.minor):
            raise ConfigError(
                flag, f"{target} was written to contract {written}; {ours}: install a later one"
            )
        if major < self.oldest:
            raise ConfigError(
                flag,
                f"{target} was written to contract {written}; {ours}: install a later {target}",
            )
        if major < self.major:
            told = f"{target} was written to contract {written}, which a later kvbaton refuses"
            warnings.warn(f"{told}; the present one is {self}", FutureWarning, stacklevel=4)
        return written
