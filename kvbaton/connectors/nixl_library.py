"""Loads the NIXL Python package, whichever of its builds is installed."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvbaton.errors import ConfigError

PACKAGES = ("nixl_cu13", "nixl")


class NixlLibrary(NamedTuple):
    """The modules of NIXL.

    Attributes:
        api: The module with `nixl_agent` and `nixl_agent_config`.
        bindings: The module with exceptions and enumerations.
        errors: All exceptions of NIXL, which have no common base class.
    """

    api: Any
    bindings: Any
    errors: tuple[type[Exception], ...]


def load_nixl(flag: str) -> NixlLibrary:
    """Import NIXL.

    Args:
        flag: Flag that needs NIXL, named in the error.

    Raises:
        ConfigError: NIXL is not installed.
    """
    errors = []
    for package in PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
            bindings = importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            errors.append(str(error))
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        own = (
            value
            for key, value in vars(bindings).items()
            if key.startswith("nixl") and key.endswith("Error")
        )
        return NixlLibrary(api, bindings, tuple(own))
    raise ConfigError(flag, f"nixl needs the package nixl-cu13: {'; '.join(errors)}")


@contextmanager
def loopback_only() -> Iterator[None]:
    """Agents that are made meanwhile use no network device but the loopback: UCX looks only then.

    Another device that goes away later, as those of containers do, would break their connections.
    """
    before = os.environ.get("UCX_NET_DEVICES")
    os.environ["UCX_NET_DEVICES"] = "lo"
    try:
        yield
    finally:
        if before is None:
            del os.environ["UCX_NET_DEVICES"]
        else:
            os.environ["UCX_NET_DEVICES"] = before
