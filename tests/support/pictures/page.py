"""Writes the pictures of the live page in docs/pictures, with the digest of the page's files.

    python -m tests.support.pictures.page        a part of `make pictures`

Starts a pool of the demo model, chats with it, and kills a node.

In: the page, and the demo model on this machine's CPUs. Out: PNG files, and `page.sha256`, which
tests/bones/test_pictures.py compares with the page.
"""

from __future__ import annotations

import re
import sys

from playwright.sync_api import Browser, Page, expect

from baton_cli.models.demo_model import fetch_demo
from tests.support.browser.load import CHATS, Load
from tests.support.browser.visits import SCHEMES, ask_greedily, browser_running, visiting
from tests.support.pictures.digests import PICTURES, write_digest
from tests.support.pools.processes import Cluster

QUESTION = "Tell me about the history of relay races and of the baton that runners hand over."
TOKENS = 90
KILL_MS = 2000.0  # after the first token
SIZE, LOW = (1280, 840), (1280, 720)
WATCH_MS = 30_000  # what the charts show
PATIENCE_MS = 240_000.0


def write_picture(page: Page, name: str) -> None:
    page.screenshot(path=PICTURES / name)


def _page_pictures(browser: Browser, pool: Cluster) -> None:
    """The page of a busy pool, light and dark."""
    with (
        Load(pool.url, 3, tokens=40),
        visiting(browser, pool.url, SIZE, SCHEMES[0]) as light,
        visiting(browser, pool.url, SIZE, SCHEMES[1]) as dark,
    ):
        light.page.wait_for_timeout(WATCH_MS)
        for scheme, visit in zip(SCHEMES, (light, dark), strict=True):
            expect(visit.page.locator(".edge[data-lit=yes]").first).to_be_attached()
            write_picture(visit.page, f"page-{scheme}.png")


def _failover_picture(browser: Browser, pool: Cluster) -> None:
    """A chat whose decode node is killed in the middle of the answer."""
    with visiting(browser, pool.url, LOW) as visit:
        page = visit.page
        page.route(f"**{CHATS}", ask_greedily)
        page.locator("#length").evaluate("(field, tokens) => { field.value = tokens; }", TOKENS)
        page.locator("#question").fill(QUESTION)
        page.keyboard.press("Enter")
        meta = page.locator(".answer .meta")
        expect(meta).to_contain_text("first token", timeout=PATIENCE_MS)
        found = re.search(r"decode-\d", meta.inner_text())
        assert found is not None, meta.inner_text()
        page.wait_for_timeout(KILL_MS)
        pool.nodes[found[0]].kill()
        expect(page.locator(".takeover")).to_be_visible(timeout=PATIENCE_MS)
        page.locator("#messages").evaluate("list => { list.scrollTop = list.scrollHeight; }")
        write_picture(page, "failover.png")


def main() -> None:
    model = fetch_demo(None, lambda line: print(line, file=sys.stderr))
    PICTURES.mkdir(exist_ok=True)
    flags = ["--model", str(model), "--dtype=float32", "--threads=1", "--kv-blocks=400"]
    with (
        Cluster(1, 2, flags=flags, router_flags=["--handoff=always"]) as pool,
        browser_running() as browser,
    ):
        _page_pictures(browser, pool)
        _failover_picture(browser, pool)
    write_digest("page")


if __name__ == "__main__":
    main()
