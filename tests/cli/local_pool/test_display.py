"""The node table: redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

from baton_cli.local_pool.display import Display, TableRow, table

READY = TableRow("decode-0", "decode", 7, "ready", 2, "http://h:1", "bitwise")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_columns_are_aligned() -> None:
    assert table([("A", "BB"), ("CCC", "D")]) == ["A    BB", "CCC  D"]


def test_plain_output_has_one_line_per_state_change_and_none_for_load() -> None:
    out = io.StringIO()
    display = Display(out, io.StringIO())
    display.rows([TableRow("decode-0", "decode", 7, "starting", None, "")])
    display.rows([READY])
    display.rows([TableRow("decode-0", "decode", 7, "ready", 5, "http://h:1")])
    assert out.getvalue().splitlines() == [
        "decode-0: starting pid 7",
        "decode-0: ready pid 7 http://h:1",
    ]


def test_a_terminal_s_table_is_redrawn_in_place() -> None:
    out = Terminal()
    display = Display(out, io.StringIO())
    display.rows([READY])
    display.rows([READY])
    first, second = out.getvalue().split("\x1b[2A\x1b[J")
    assert first == second
    cells = ["decode-0", "decode", "7", "ready", "bitwise", "2", "http://h:1"]
    assert first.splitlines()[1].split() == cells


def test_on_a_terminal_a_log_line_stays_above_the_table() -> None:
    out = Terminal()
    display = Display(out, out)
    display.rows([READY])
    display.log("a log line")
    erased = out.getvalue().split("\x1b[2A\x1b[J")[1]
    assert erased.startswith("a log line\nNODE")


def test_logs_and_notes_go_to_different_streams() -> None:
    out, err = io.StringIO(), io.StringIO()
    display = Display(out, err)
    display.note("note")
    display.log("log")
    assert (out.getvalue(), err.getvalue()) == ("note\n", "log\n")
