"""Print size and structure of the code base, beside their goals."""

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
PROPERTIES = ("property", "cached_property")


class Source:
    """One source file.

    Attributes:
        path: Path of the file.
        name: Dotted name of its module.
        tree: Syntax tree.
        code: Number of lines without docstrings, comments and blanks.
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
        """Of modules, classes, functions, and of constants, whose docstrings stand below them."""
        lines: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                if isinstance(node.value.value, str):
                    lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return lines

    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions, at any depth."""
        return [node for node in ast.walk(self.tree) if isinstance(node, FUNCTION)]

    def named_once(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Private functions that the file names in one place besides their definition."""
        used = Counter(map(name_of, ast.walk(self.tree)))
        return [f for f in self.functions() if is_private(f.name) and used[f.name] == 1]

    def called_once(self, hooks: set[int]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Private functions with one caller, which could inline them.

        Uses without a call are left out: a thread, a callback, a table of handlers and a kernel
        launched on a grid (``_kernel[grid](...)``) need a function, however short. So are methods
        that subclasses override.

        Args:
            hooks: Line numbers of methods that a base class or subclass has, too.
        """
        called = {name_of(node.func) for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        return [
            f
            for f in self.named_once()
            if (f.name in called or any(name_of(d) in PROPERTIES for d in f.decorator_list))
            and f.lineno not in hooks
        ]

    def none_checks(self) -> int:
        """Number of ``is None`` and ``is not None`` in the file."""
        return sum(
            isinstance(operator, ast.Is | ast.IsNot)
            and isinstance(right, ast.Constant)
            and right.value is None
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Compare)
            for operator, right in zip(node.ops, node.comparators, strict=True)
        )

    def imports(self, modules: set[str]) -> set[str]:
        """Modules out of `modules` that the file imports, at any depth, lazily or not."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= names & modules or {node.module}
        return (found & modules) - {self.name}


def name_of(node: ast.AST) -> str | None:
    """Last part of a name; None if the node is not a name."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def hooks(files: list[Source]) -> dict[str, set[int]]:
    """Lines, by module, of methods that a base class or subclass in the package has, too.

    Classes are identified by their name, which is unique.
    """
    classes = {
        node.name: (file.name, node)
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
    }

    def above(name: str) -> set[str]:
        bases = {name_of(base) for base in classes[name][1].bases} & classes.keys()
        found = {base for base in bases if base is not None}
        return found.union(*map(above, found))

    methods = {
        name: {f.name: f.lineno for f in node.body if isinstance(f, FUNCTION)}
        for name, (_, node) in classes.items()
    }
    found: dict[str, set[int]] = {file.name: set() for file in files}
    for name in classes:
        for other in above(name):
            for method in methods[name].keys() & methods[other].keys():
                found[classes[name][0]].add(methods[name][method])
                found[classes[other][0]].add(methods[other][method])
    return found


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
    """Python files below a folder."""
    return [Source(path) for path in sorted(folder.rglob("*.py"))]


def rooms(files: list[Source]) -> Counter[str]:
    """Code lines per package."""
    lines: Counter[str] = Counter()
    for file in files:
        parts = file.path.relative_to(PACKAGE).parts
        lines[parts[0] if len(parts) > 1 else "(top)"] += file.code
    return lines


def details(once: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]) -> Iterator[str]:
    """Functions called once, by file; files with most of them come first."""
    for name, functions in sorted(once.items(), key=lambda item: -len(item[1])):
        lines = [(f.end_lineno or f.lineno) - f.lineno + 1 for f in functions]
        told = ", ".join(f"{f.name} {n}" for f, n in zip(functions, lines, strict=True))
        if told:
            yield f"called once, and their lines: {name} {len(functions)}: {told}"


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="also list what is counted")
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
    excused = hooks(files)
    once = {file.name: file.called_once(excused[file.name]) for file in files}
    num_once = sum(map(len, once.values()))
    values = sum(len(file.named_once()) for file in files) - num_once
    print(
        f"\n{len(functions)} functions, median {statistics.median(functions):g} lines, "
        f"{sum(length > 60 for length in functions)} over 60; {len(private)} private\n"
        f"{values} private functions are named once, as a value or a hook"
    )
    for file in sorted(files, key=lambda file: -file.code)[:3]:
        print(f"  {file.code:4} {file.path.relative_to(ROOT)}")
    now = {
        "code lines": sum(file.code for file in files),
        "files": len(files),
        "private functions with one caller": num_once,
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
        for line in details(once):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
