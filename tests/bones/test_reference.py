"""The generated reference pages, of flags and fields, match the code."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from baton_cli.main import COMMANDS
from baton_cli.options.flag import flags_of

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python docs/_site/reference.py"
PAGES: dict[Path, str] = runpy.run_path(str(ROOT / "docs/_site/reference.py"))["pages"]()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_generated_page_is_up_to_date(page: Path) -> None:
    assert page.read_text() == PAGES[page], f"stale; run: {COMMAND}"


def test_every_visible_flag_of_every_command_has_a_row() -> None:
    text = (ROOT / "docs" / "reference" / "flags.md").read_text()
    for command in COMMANDS:
        section = text.split(f"\n## baton {command.words}\n")[1].split("\n## ")[0]
        visible = {flag.option for flag in flags_of(command.options) if not flag.hidden}
        assert {option for option in visible if f"| `{option}` |" not in section} == set()
