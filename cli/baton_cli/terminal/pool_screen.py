"""A pool on a whole screen, like top: drawn again as snapshots come, as keys are pressed, and as
the window changes.

In: a PoolFeed, keys. Out: a screen of curses, which the terminal leaves as it was before.
"""

from __future__ import annotations

import curses
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from baton_cli.errors import CommandError
from baton_cli.terminal.pool_feed import PoolFeed
from baton_cli.terminal.pool_lines import ORDERS, Line, pool_lines
from baton_cli.terminal.text import visible_line

LOOK_MS = 200  # a key is noticed at once, a snapshot within this time
KEYS = "  ".join(f"{key} {order.name}" for key, order in ORDERS.items()) + "  r reverse  q quit"


def show_pool(feed: PoolFeed) -> None:
    """Show the pool until q. Raise CommandError if the terminal is unknown."""
    try:
        curses.setupterm()
    except curses.error as error:
        raise CommandError(
            f"the terminal cannot show a screen ({error}); set TERM, or use --once"
        ) from error
    with _whole_screen() as window:
        _Screen(feed).run(window)


@contextmanager
def _whole_screen() -> Iterator[curses.window]:
    """As curses.wrapper, which would also set colours: those of the terminal stay."""
    window = curses.initscr()
    try:
        curses.noecho()
        curses.cbreak()
        window.keypad(True)
        with suppress(curses.error):  # a terminal that cannot hide its cursor
            curses.curs_set(0)
        yield window
    finally:
        curses.endwin()


class _Screen:
    def __init__(self, feed: PoolFeed) -> None:
        self._feed = feed
        self._order = "a"
        self._reverse = False

    def run(self, window: curses.window) -> None:
        window.timeout(LOOK_MS)
        while self._obey(window.getch()):
            self._draw(window)

    def _obey(self, key: int) -> bool:
        """False ends the screen. Of a new size curses reports KEY_RESIZE: the next drawing uses
        it."""
        letter = chr(key) if 0 <= key < 128 else ""
        if letter in ORDERS:
            self._order, self._reverse = letter, False
        elif letter == "r":
            self._reverse = not self._reverse
        return letter != "q"

    def _draw(self, window: curses.window) -> None:
        height, width = window.getmaxyx()
        assert self._feed.newest is not None, "the feed waits for the first snapshot"
        lines = pool_lines(self._feed.newest, ORDERS[self._order], self._reverse)
        room = max(0, height - 1)
        if len(lines) > room > 0:
            left_out = len(lines) - room + 1
            lines = [*lines[: room - 1], Line(f"{left_out} more lines; enlarge the window")]
        window.erase()
        for row, line in enumerate(lines[:room]):
            _put(window, row, line.text, width, curses.A_BOLD if line.heading else 0)
        footer = visible_line(self._feed.problem) or f"requests by {self._order_text()}; {KEYS}"
        _put(window, height - 1, footer, width, curses.A_REVERSE)
        window.refresh()

    def _order_text(self) -> str:
        name = ORDERS[self._order].name
        return f"{name}, reversed" if self._reverse else name


def _put(window: curses.window, row: int, text: str, width: int, look: int) -> None:
    """Write a line, cut at the window's width. The last cell stays empty: writing it would move the
    cursor beyond the window, which curses reports as an error."""
    try:
        window.addnstr(row, 0, text, max(0, width - 1), look)
    except curses.error:
        return  # the window became smaller meanwhile, or has a wide character at its edge
