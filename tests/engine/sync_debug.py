"""Torch's mode in which waiting for a GPU is an error, for a while."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Any wait of the host for the device raises within; afterwards none does, whatever happened.

    Torch warns once a process that this mode is a prototype, after it has switched it on: where
    warnings are errors, that call raises and leaves the mode on.
    """
    try:
        _set("error")
        yield
    finally:
        _set("default")


def _set(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
