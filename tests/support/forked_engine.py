"""Imported by multiprocessing's fork server, so that engine cores start with all imports done."""

from __future__ import annotations

import importlib

from tests.support.forked_command import IMPORTS

for _module in (*IMPORTS, "tests.support.forked_worker"):
    importlib.import_module(_module)
