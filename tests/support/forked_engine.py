"""Imported by multiprocessing's fork server, so that an engine's core begins with all it needs."""

from __future__ import annotations

import importlib

from tests.support.forked_command import IMPORTS

for _module in (*IMPORTS, "tests.support.forked_worker"):
    importlib.import_module(_module)
