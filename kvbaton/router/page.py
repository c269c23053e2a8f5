"""The status page: one table, refreshed by the browser."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

COLUMNS = ("Node", "Role", "State", "URL", "Requests", "Prompt tokens in prefill", "Rows to encode")

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="2">
<title>kvbaton: {model}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #ccc; }}
</style>
</head>
<body>
<h1>{model}</h1>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
<p><a href="/metrics">metrics</a> <a href="/nodes">nodes as JSON</a></p>
</body>
</html>
"""


def render(model: str, rows: Iterable[Sequence[str]]) -> str:
    """HTML of the page; every value is escaped."""
    body = "\n".join(f"<tr>{_cells(row, 'td')}</tr>" for row in rows)
    empty = f'<tr><td colspan="{len(COLUMNS)}">no nodes yet</td></tr>'
    return PAGE.format(model=escape(model), head=_cells(COLUMNS, "th"), rows=body or empty)


def _cells(values: Iterable[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(value)}</{tag}>" for value in values)
