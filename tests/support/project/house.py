"""Print the shape of the code: for each room its folders, its import graph and its sizes.

In: the files that git tracks. Out: a table on stdout, then each folder with more than SIDE_BY_SIDE
modules, each import cycle, and each room that is deeper than FLOORS. `make house` runs it; it
judges nothing beyond these three, for which it exits with 1.

A module's floor is 1 where it imports nothing of its room, else 1 more than the highest that it
imports; imports inside functions and under TYPE_CHECKING count. Tests count for the room whose name
their folder has.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath
from statistics import median
from typing import NamedTuple

ROOMS = (
    *("protocol", "text", "kvstore", "engine", "node", "prefill_node", "decode_node", "router"),
    *("operator", "cli"),
)
SIDE_BY_SIDE = 16
FLOORS = 12


class Module(NamedTuple):
    """`name` is dotted; a package's is that of its folder."""

    name: str
    path: PurePosixPath
    lines: int
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


Graph = dict[str, set[str]]


def modules(root: Path, files: Iterable[str]) -> dict[str, list[Module]]:
    """Those of each room."""
    found: dict[str, list[Module]] = {room: [] for room in ROOMS}
    for file in files:
        path = PurePosixPath(file)
        if path.parts[0] in found and path.suffix == ".py":
            text = (root / path).read_text(encoding="utf-8")
            parts = path.with_suffix("").parts[1:]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[path.parts[0]].append(Module(name, path, text.count("\n"), ast.parse(text)))
    return found


def graph(room: Sequence[Module]) -> Graph:
    """Which modules of the room each of them imports."""
    names = {module.name for module in room}
    return {
        module.name: {name for name in _imported(module.tree, names) if name != module.name}
        for module in room
    }


def _imported(tree: ast.Module, names: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in names or node.module in names:
                    yield inner if inner in names else node.module


def floors(imports: Mapping[str, set[str]]) -> int:
    """Of a graph without cycles: how many lie on each other at most."""
    heights: dict[str, int] = {}
    for name in TopologicalSorter(imports).static_order():
        heights[name] = 1 + max((heights[below] for below in imports[name]), default=0)
    return max(heights.values(), default=0)


def cycle(imports: Mapping[str, set[str]]) -> list[str]:
    """The modules of one cycle, the first one again at its end; none where there is no cycle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without `self` and `cls`."""
    words = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(word.arg not in ("self", "cls") for word in words)


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def folders(room: Iterable[Module]) -> dict[str, int]:
    """Each folder, and how many modules lie in it side by side; `__init__` is none of them."""
    found: dict[str, int] = {}
    for module in room:
        folder = str(module.path.parent)
        found[folder] = found.get(folder, 0) + (not module.is_package)
    return found


def test_lines(root: Path, files: Iterable[str], room: str) -> int:
    return sum(
        (root / file).read_text(encoding="utf-8").count("\n")
        for file in files
        if file.startswith(f"tests/{room}/") and file.endswith(".py")
    )


HEAD = (
    *("room", "folders", "side by side", "floors", "file median", "largest"),
    *("function median", "largest", "parameters", "lines", "tests"),
)


def main(root: Path) -> int:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    files = [file for file in listed.stdout.splitlines() if (root / file).is_file()]
    rows: list[Sequence[object]] = [HEAD]
    problems: list[str] = []
    for room, found in modules(root, files).items():
        imports, inside = graph(found), folders(found)
        circle = cycle(imports)
        deep = 0 if circle else floors(imports)
        sizes = [module.lines for module in found]
        every = [function for module in found for function in functions(module)]
        lengths = [length(function) for function in every]
        problems += [f"{folder}: {n} modules" for folder, n in inside.items() if n > SIDE_BY_SIDE]
        if circle:
            problems.append(f"{room}: a cycle: {' -> '.join(circle)}")
        if deep > FLOORS:
            problems.append(f"{room}: {deep} floors")
        rows.append(
            (
                *(room, len(inside), max(inside.values()), deep or "cycle"),
                *(median(sizes), max(sizes), median(lengths), max(lengths)),
                *(max(map(parameters, every)), sum(sizes), test_lines(root, files, room)),
            )
        )
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        print("  ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)))
    print("\n".join(["", *problems]) if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[3]))
