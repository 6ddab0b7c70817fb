"""Print statistics of the code: for each room its folders, its import graph and its sizes.

    python -m tests.support.project.house [ROOM...]

In: the files that git tracks. Out: a table on stdout, then each import cycle, each place of
`misplaced` and each name of `unknown_names`. Exit code 1 if there are any. `make house` runs it.
Which package may import which is in pyproject.toml; `lint-imports` checks it.

A module's floor is 1 if it imports nothing of its room, otherwise 1 more than the highest floor
that it imports. Imports inside functions and under TYPE_CHECKING count. Tests in tests/ROOM count
for the room.
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

from tests.support.project.module_style import definitions, misplaced, unknown_names

ROOMS = (
    *("protocol", "text", "kvstore", "engine", "node", "prefill_node", "decode_node", "router"),
    *("operator", "cli"),
)


class Module(NamedTuple):
    """`name` is the dotted name; that of an `__init__` is its folder's."""

    name: str
    path: PurePosixPath
    lines: int
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


Graph = dict[str, set[str]]


def modules(root: Path, files: Iterable[str]) -> dict[str, list[Module]]:
    """Return the modules of each room."""
    rooms: dict[str, list[Module]] = {room: [] for room in ROOMS}
    for file in files:
        path = PurePosixPath(file)
        if path.parts[0] in rooms and path.suffix == ".py":
            text = (root / path).read_text(encoding="utf-8")
            parts = path.with_suffix("").parts[1:]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            rooms[path.parts[0]].append(Module(name, path, text.count("\n"), ast.parse(text)))
    return rooms


def graph(room: Sequence[Module]) -> Graph:
    """Return for each module the modules of its room that it imports."""
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
    """Return the number of floors of a graph without cycles."""
    heights: dict[str, int] = {}
    for name in TopologicalSorter(imports).static_order():
        heights[name] = 1 + max((heights[below] for below in imports[name]), default=0)
    return max(heights.values(), default=0)


def cycle(imports: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one cycle, with the first one again at the end; [] without a cycle."""
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
    """Return the number of parameters without `self` and `cls`."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in arguments)


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def folders(room: Iterable[Module]) -> dict[str, int]:
    """Return the number of modules directly in each folder, without `__init__`."""
    counts: dict[str, int] = {}
    for module in room:
        folder = str(module.path.parent)
        counts[folder] = counts.get(folder, 0) + (not module.is_package)
    return counts


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


def main(root: Path, wanted: Sequence[str] = ()) -> int:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    files = [file for file in listed.stdout.splitlines() if (root / file).is_file()]
    rows: list[Sequence[object]] = [HEAD]
    problems: list[str] = []
    rooms = modules(root, files)
    names = {part for room in rooms.values() for module in room for part in module.name.split(".")}
    names |= definitions(module.tree for room in rooms.values() for module in room)
    for room, room_modules in rooms.items():
        if wanted and room not in wanted:
            continue
        imports, counts = graph(room_modules), folders(room_modules)
        import_cycle = cycle(imports)
        sizes = [module.lines for module in room_modules]
        all_functions = [function for module in room_modules for function in functions(module)]
        lengths = [length(function) for function in all_functions]
        if import_cycle:
            problems.append(f"{room}: a cycle: {' -> '.join(import_cycle)}")
        for module in room_modules:
            faults = [*misplaced(module.tree), *unknown_names(module.tree, names)]
            problems += [f"{module.path}:{fault}" for fault in faults]
        rows.append(
            (
                *(room, len(counts), max(counts.values())),
                "cycle" if import_cycle else floors(imports),
                *(median(sizes), max(sizes), median(lengths), max(lengths)),
                *(max(map(parameters, all_functions)), sum(sizes), test_lines(root, files, room)),
            )
        )
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        print("  ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)))
    print("\n".join(["", *problems]) if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[3], sys.argv[1:]))
