"""Imported by multiprocessing's fork server, so that processes forked from it die with it."""

from __future__ import annotations

import os

from kvbaton import signals

_die_with_parent = signals.die_with_parent
# The parent is the fork server, which ends with the tests.
signals.die_with_parent = lambda parent: _die_with_parent(os.getppid())
