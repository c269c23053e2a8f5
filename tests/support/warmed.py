"""Imported by the fork server after all others: what each command makes first, it has made once.

All of it is cached by kvbaton itself and depends on no setting.
"""

from __future__ import annotations

from kvbaton import cli
from kvbaton.connectors import registry
from kvbaton.router import page
from kvbaton.server import network

cli.make_parser()
for _kind in (registry.STORES, registry.TRANSPORTS):
    registry._entry_points(_kind)
for _name in ("page.html", "status.html"):
    page._TEMPLATES.get_template(_name)
network._client(None, verified=False)
