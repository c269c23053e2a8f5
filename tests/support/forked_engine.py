"""Imported by multiprocessing's fork server, so that an engine's core begins with all it needs."""

from __future__ import annotations

import importlib
import os

from kvbaton import signals
from tests.support.forked_command import IMPORTS

for _module in IMPORTS:
    importlib.import_module(_module)
_die_with_parent = signals.die_with_parent
# The parent of the core is the fork server, which ends with the tests.
signals.die_with_parent = lambda parent: _die_with_parent(os.getppid())
