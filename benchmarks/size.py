"""Print the size and the grain of the house, and what both shall become."""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvbaton"

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
CORE = ("engine/core.py", "engine/scheduler.py")
GOALS = {
    "code lines": 26_500,
    "files": 235,
    "private functions with one caller": 350,
    "class names used twice": 0,
    "None-checks in core + scheduler": 15,
    "file cycles": 0,
}

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """One file.

    Attributes:
        path: where it is.
        name: its module's dotted name.
        tree: parsed.
        code: lines without docstrings, comments and blanks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        parts = path.relative_to(ROOT).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        self.tree = ast.parse(text)
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        self.code = len(lines - self._docstring_lines())

    def _docstring_lines(self) -> set[int]:
        lines: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | ast.ClassDef | FUNCTION) and node.body:
                first = node.body[0]
                if (
                    isinstance(first, ast.Expr)
                    and isinstance(first.value, ast.Constant)
                    and isinstance(first.value.value, str)
                ):
                    lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        return lines

    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All, at any depth."""
        return [node for node in ast.walk(self.tree) if isinstance(node, FUNCTION)]

    def called_once(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Private functions that the file names in one place but their definition."""
        used = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        return [f for f in self.functions() if is_private(f.name) and used[f.name] == 1]

    def none_checks(self) -> int:
        """How often ``is None`` or ``is not None`` stands in it."""
        return sum(
            isinstance(operator, ast.Is | ast.IsNot)
            and isinstance(right, ast.Constant)
            and right.value is None
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Compare)
            for operator, right in zip(node.ops, node.comparators, strict=True)
        )

    def imports(self, modules: set[str]) -> set[str]:
        """Which modules of ours it imports, at any depth, lazily or not."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= names & modules or {node.module}
        return (found & modules) - {self.name}


def is_private(name: str) -> bool:
    """Whether a name is private, and not one of Python's own."""
    return name.startswith("_") and not name.startswith("__")


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in sorted(edges[module]):
            if other not in number:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == number[module]:
            cut = stack.index(module)
            group = stack[cut:]
            del stack[cut:]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(edges):
        if module not in number:
            visit(module)
    return found


def sources(folder: Path) -> list[Source]:
    """The Python files below a folder."""
    return [Source(path) for path in sorted(folder.rglob("*.py"))]


def rooms(files: list[Source]) -> Counter[str]:
    """Code lines per room."""
    lines: Counter[str] = Counter()
    for file in files:
        parts = file.path.relative_to(PACKAGE).parts
        lines[parts[0] if len(parts) > 1 else "(top)"] += file.code
    return lines


def details(files: list[Source]) -> Iterator[str]:
    """What stands behind the figures: the files with most functions that are called once first."""
    once = {file.name: file.called_once() for file in files}
    for name, functions in sorted(once.items(), key=lambda item: -len(item[1])):
        lines = [(f.end_lineno or f.lineno) - f.lineno + 1 for f in functions]
        told = ", ".join(f"{f.name} {n}" for f, n in zip(functions, lines, strict=True))
        if told:
            yield f"called once, and their lines: {name} {len(functions)}: {told}"


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="also name what is counted")
    args = parser.parse_args()
    files = sources(PACKAGE)
    for room, lines in sorted(rooms(files).items()):
        print(f"{room:12} {lines:6}")
    print(f"{'tests':12} {sum(file.code for file in sources(ROOT / 'tests')):6}")

    functions = [(f.end_lineno or f.lineno) - f.lineno + 1 for x in files for f in x.functions()]
    private = [f for x in files for f in x.functions() if is_private(f.name)]
    names = Counter(
        node.name
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
    )
    twice = sorted(name for name, uses in names.items() if uses > 1)
    modules = {file.name for file in files}
    cycles = circles({file.name: file.imports(modules) for file in files})
    print(
        f"\n{len(functions)} functions, median {statistics.median(functions):g} lines, "
        f"{sum(length > 60 for length in functions)} over 60; {len(private)} private"
    )
    for file in sorted(files, key=lambda file: -file.code)[:3]:
        print(f"  {file.code:4} {file.path.relative_to(ROOT)}")
    now = {
        "code lines": sum(file.code for file in files),
        "files": len(files),
        "private functions with one caller": sum(len(file.called_once()) for file in files),
        "class names used twice": len(twice),
        "None-checks in core + scheduler": sum(
            file.none_checks() for file in files if str(file.path.relative_to(PACKAGE)) in CORE
        ),
        "file cycles": len(cycles),
    }
    print(f"\n{'measure':36} {'now':>7} {'goal':>7}")
    for measure, value in now.items():
        print(f"{measure:36} {value:7,} {GOALS[measure]:7,}")
    if args.names:
        print(f"\nclass names used twice: {', '.join(twice)}")
        for group in cycles:
            print(f"cycle: {', '.join(group)}")
        for line in details(files):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
