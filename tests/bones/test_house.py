"""The figures that `make house` prints for a tree, and the faults that it finds in modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.project.house import (
    Module,
    cycle,
    floors,
    folders,
    functions,
    graph,
    length,
    modules,
    parameters,
)
from tests.support.project.module_style import definitions, misplaced, unknown_names

FILES = {
    "text/baton_text/__init__.py": "",
    "text/baton_text/bytes.py": "import os\n",
    "text/baton_text/pieces/__init__.py": "",
    "text/baton_text/pieces/cut.py": """
from baton_text import bytes

def cut(a, *, b=1):
    pass
""",
    "text/baton_text/pieces/join.py": """
class Join:
    async def late(self, a, b, /):
        from baton_text.pieces.cut import cut
""",
    "text/setup.toml": "",
    "tests/text/test_cut.py": "",
}


@pytest.fixture
def room(tmp_path: Path) -> list[Module]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return modules(tmp_path, FILES)["text"]


def test_modules_are_counted_by_folder_without_init_files(room: list[Module]) -> None:
    assert folders(room) == {"text/baton_text": 1, "text/baton_text/pieces": 2}


def test_imports_inside_functions_are_in_the_graph(room: list[Module]) -> None:
    imports = graph(room)
    assert imports["baton_text.pieces.join"] == {"baton_text.pieces.cut"}
    assert imports["baton_text.pieces.cut"] == {"baton_text.bytes"}
    assert floors(imports) == 3
    assert cycle(imports) == []


def test_a_cycle_is_named(room: list[Module]) -> None:
    imports = graph(room)
    imports["baton_text.bytes"].add("baton_text.pieces.join")
    path = cycle(imports)
    assert path[0] == path[-1]
    assert {name.rpartition(".")[2] for name in path} == {"bytes", "cut", "join"}


def test_a_function_s_length_and_parameters_are_counted_without_self(room: list[Module]) -> None:
    sizes = {
        function.name: (length(function), parameters(function))
        for module in room
        for function in functions(module)
    }
    assert sizes == {"cut": (2, 2), "late": (2, 2)}


@pytest.mark.parametrize(
    ("late", "names"),
    [
        ("logger = 1", ["logger"]),
        ("A, B = 1, 2", ["A, B"]),
        ("LIMIT: int = 3", ["LIMIT"]),
        ('__all__ = ["Row"]', ["__all__"]),
        ("ROWS = [Row()]", []),
        ("ROWS: list[Row] = []", []),
        ("ROWS = [Row()]\nFIRST = ROWS[0]", []),
    ],
)
def test_constants_after_the_first_class_are_found_unless_they_need_it(
    late: str, names: list[str]
) -> None:
    tree = ast.parse(f"EARLY = 1\nclass Row:\n    inner = 2\n{late}\n")
    assert list(misplaced(tree)) == [
        f"4: {name} stands after the first class or function" for name in names
    ]


DOCUMENTED = '''"""Uses `other.Other`, `a word` and ``code``."""

def cut(length):
    """Cut at `{quoted}`."""
    key = "max_tokens in a text"
'''


@pytest.mark.parametrize(
    ("quoted", "exists"),
    [
        ("length", True),
        ("cut()", True),
        ("max_tokens", True),
        ("OTHER", True),
        ("someField", True),
        ("argument", False),
        ("other.missing", False),
    ],
)
def test_a_name_in_backticks_exists_in_its_module_or_is_defined_in_another(
    quoted: str, exists: bool
) -> None:
    other = ast.parse("OTHER = 1\nclass Other:\n    some_field: int\n    def f(argument): ...\n")
    tree = ast.parse(DOCUMENTED.format(quoted=quoted))
    faults = list(unknown_names(tree, {"other", *definitions([other])}))
    assert faults == ([] if exists else [f"4: `{quoted.removesuffix('()')}` does not exist"])
