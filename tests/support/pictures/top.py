"""Writes docs/pictures/top.svg: the screen of `baton top` before a busy pool.

    python -m tests.support.pictures.top        a part of `make pictures`

In: a pool of simulated nodes, `baton top` on a pseudo terminal. Out: its screen as SVG, and a
digest, which tests/bones/test_pictures.py compares with the sources of the screen.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from html import escape
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import pyte

from tests.support.browser.load import Load
from tests.support.pictures.digests import PICTURES, write_digest
from tests.support.pools.baton_up import Pool
from tests.support.terminal import Terminal

FLAGS = ("--engine=sim", "--prefill=2", "--decode=3", "--handoff=always", "--sim-decode-ms=25")
ADMIN = "admin-of-the-picture"
KEYS = {"search": "key-of-search", "support": "key-of-support"}
# Of each tenant: chats at a time, and tokens of an answer.
CHATS, TOKENS = {"search": 4, "support": 2}, {"search": 150, "support": 400}
COLUMNS, ROWS = 118, 25
WATCH_S = 12.0  # rates and latencies are known then
# Of a cell, and of the margin around all of them.
WIDE, HIGH, MARGIN = 8, 18, 14
STYLE = """\
.back { fill: #161b22 }
.bar { fill: #c9d1d9 }
text { font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #c9d1d9;
  white-space: pre }
.bold { font-weight: bold; fill: #ffffff }
.on-bar { fill: #161b22 }
"""


def screen_picture(screen: pyte.Screen, title: str) -> str:
    """Runs of cells with one look are one text each. It is as wide as its cells in any font."""
    width, height = screen.columns * WIDE + 2 * MARGIN, screen.lines * HIGH + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style>\n"
        f'<rect class="back" width="{width}" height="{height}" rx="8"/>\n'
        + "".join(f"{part}\n" for row in range(screen.lines) for part in _row(screen, row))
        + "</svg>\n"
    )


def _row(screen: pyte.Screen, row: int) -> Iterator[str]:
    cells = [screen.buffer[row][column] for column in range(screen.columns)]
    y, column = MARGIN + row * HIGH, 0
    for (bold, reverse), run in groupby(cells, lambda cell: (cell.bold, cell.reverse)):
        text = "".join(cell.data for cell in run)
        x = MARGIN + column * WIDE
        column += len(text)
        if reverse:
            yield (
                f'<rect class="bar" x="{x}" y="{y}" width="{len(text) * WIDE}" height="{HIGH}"/>'
            )
        if shown := text.rstrip():
            look = ' class="on-bar"' if reverse else ' class="bold"' if bold else ""
            yield (
                f'<text{look} x="{x}" y="{y + 13}" textLength="{len(shown) * WIDE}" '
                f'xml:space="preserve">{escape(shown)}</text>'
            )


@contextmanager
def busy_pool() -> Iterator[str]:
    """The URL of a pool with two tenants, whose chats run."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        keys = folder / "keys"
        keys.write_text("".join(f"{tenant} {key}\n" for tenant, key in KEYS.items()))
        keys.chmod(0o600)
        flags = (*FLAGS, f"--api-keys={keys}")
        pool = stack.enter_context(Pool(flags, environment={"BATON_ADMIN_KEY": ADMIN}))
        for tenant, chats in CHATS.items():
            login = {"Authorization": f"Bearer {KEYS[tenant]}"}
            stack.enter_context(Load(pool.url, chats, TOKENS[tenant], login))
        yield pool.url


def main() -> None:
    chats = sum(CHATS.values())
    with (
        busy_pool() as url,
        Terminal(
            [sys.executable, "-m", "baton_cli", "top", "--url", url],
            variables={"BATON_API_KEY": ADMIN},
            columns=COLUMNS,
            rows=ROWS,
        ) as terminal,
    ):
        terminal.wait_for("decode-2")
        until = time.monotonic() + WATCH_S
        terminal.wait_until(
            lambda: time.monotonic() > until and terminal.text.count("running  prefill") == chats,
            f"show {chats} running chats",
        )
        picture = screen_picture(terminal.screen, "baton top: nodes, requests and tenants")
    (PICTURES / "top.svg").write_text(picture)
    write_digest("top")


if __name__ == "__main__":
    main()
