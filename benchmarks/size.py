"""Print the size of the house: lines per room, the longest files and functions."""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lines_of(path: Path) -> int:
    """Lines that are neither blank nor pure comment."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def functions_of(path: Path) -> list[tuple[int, str]]:
    """Length and name of each function."""
    return [
        (
            (node.end_lineno or node.lineno) - node.lineno + 1,
            f"{path.relative_to(ROOT)}:{node.name}",
        )
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def main() -> int:
    """Print the table."""
    files = sorted((ROOT / "kvbaton").rglob("*.py"))
    rooms: Counter[str] = Counter()
    for path in files:
        parts = path.relative_to(ROOT / "kvbaton").parts
        rooms[parts[0] if len(parts) > 1 else "(top)"] += lines_of(path)
    for room, lines in sorted(rooms.items()):
        print(f"{room:12} {lines:6}")
    print(f"{'kvbaton':12} {sum(rooms.values()):6}")
    tests = sum(lines_of(path) for path in (ROOT / "tests").rglob("*.py"))
    print(f"{'tests':12} {tests:6}")
    functions = sorted((f for path in files for f in functions_of(path)), reverse=True)
    median = statistics.median(length for length, _ in functions)
    long = sum(length > 60 for length, _ in functions)
    print(f"functions: {len(functions)}, median {median:g} lines, {long} over 60")
    for length, name in functions[:3]:
        print(f"  {length:4} {name}")
    for length, path in sorted(((lines_of(path), path) for path in files), reverse=True)[:3]:
        print(f"  {length:4} {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
