"""A browser, and visits of the live page with it.

In: the address of a router. Out: pages of a real Chromium. A visit collects what the browser's
console reports: errors, exceptions and violations of the Content-Security-Policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from playwright.sync_api import Browser, ConsoleMessage, Page, Route, sync_playwright

from tests.support.project.browser_tools import axe_script, browser_environment, browser_program

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Some ten times what an action takes on a busy machine of two cores.
PATIENCE_MS = 30_000
WIDE, NARROW = (1280, 900), (390, 844)

Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")


@dataclass(frozen=True)
class Visit:
    """A page, and what went wrong on it so far."""

    page: Page
    problems: list[str] = field(default_factory=list)

    def note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def accessibility(self) -> list[str]:
        """Serious and critical findings of axe: rule, meaning and the first element."""
        self.page.evaluate(axe_script())
        found: dict[str, Any] = self.page.evaluate(
            "axe.run(document, {resultTypes: ['violations']})"
        )
        return [
            f"{rule['id']}: {rule['help']}: {rule['nodes'][0]['html'][:200]}"
            for rule in found["violations"]
            if rule["impact"] in ("serious", "critical")
        ]

    def is_scrolled_sideways(self) -> bool:
        """Whether the page is wider than its window."""
        wider = "document.documentElement.scrollWidth > window.innerWidth"
        return bool(self.page.evaluate(wider))


@contextmanager
def browser_running() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_program(), args=FLAGS, env={**browser_environment()}
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visiting(
    browser: Browser,
    url: str,
    size: tuple[int, int] = WIDE,
    scheme: Scheme = "light",
    *,
    go: bool = True,
    calm: bool = False,
) -> Iterator[Visit]:
    """A visit with a window of this size. Without `go` the page is not opened yet; `calm`: the
    user prefers reduced motion."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=scheme,
        reduced_motion="reduce" if calm else "no-preference",
    )
    context.set_default_timeout(PATIENCE_MS)
    try:
        visit = Visit(context.new_page())
        visit.page.on("console", lambda message: visit.note(message))
        visit.page.on("pageerror", lambda error: visit.problems.append(f"exception: {error}"))
        if go:
            visit.page.goto(url + "/")
        yield visit
    finally:
        context.close()


def ask_greedily(route: Route) -> None:
    """Add to the page's question what makes its answer the same each time."""
    body = json.loads(route.request.post_data or "")
    route.continue_(post_data=json.dumps(body | {"temperature": 0}))
