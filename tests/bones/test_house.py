"""The figures that `make house` prints for a tree."""

from __future__ import annotations

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
    assert {one.rpartition(".")[2] for one in path} == {"bytes", "cut", "join"}


def test_a_function_s_length_and_parameters_are_counted_without_self(room: list[Module]) -> None:
    by_name = {one.name: one for module in room for one in functions(module)}
    sizes = {name: (length(one), parameters(one)) for name, one in by_name.items()}
    assert sizes == {"cut": (2, 2), "late": (2, 2)}
