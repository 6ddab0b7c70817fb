"""Text of others on a terminal: nothing in it can be an escape code."""

from __future__ import annotations

import pytest

from baton_cli.terminal.text import align, visible, visible_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Hello, wörld! 你好 👩‍💻", "Hello, wörld! 你好 👩‍💻"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b2J", r"\x9b2J"),  # the one character that is an escape and a bracket
        ("a\rb\x00\x7f", r"a\rb\x00\x7f"),
        ("user \u202etxt.exe", r"user \u202etxt.exe"),
        ("\ud800", r"\ud800"),
    ],
)
def test_control_characters_are_shown_escaped_and_other_text_as_it_is(
    text: str, shown: str
) -> None:
    assert visible(text) == shown


def test_every_control_character_but_newline_and_tab_is_escaped() -> None:
    controls = {chr(code) for code in (*range(32), *range(127, 160))} - {"\n", "\t"}
    assert {control for control in controls if control in visible(control)} == set()


def test_a_cell_of_a_table_has_no_line_break() -> None:
    assert visible_line("a\nb\tc\x1b") == r"a\nb\tc\x1b"


def test_names_stand_left_and_figures_right() -> None:
    assert align([("NODE", "RUN"), ("a", "12"), ("long-name", "3")], names=1) == [
        "NODE       RUN",
        "a           12",
        "long-name    3",
    ]
