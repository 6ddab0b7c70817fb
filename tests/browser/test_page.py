"""The live page shows a running pool: nodes, requests, charts, explanations; to everybody, on every
screen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser.load import Load
from tests.support.browser.visits import NARROW, PATIENCE_MS, SCHEMES, WIDE, Scheme, Visit
from tests.support.pools.processes import Cluster

Open = Callable[..., Visit]

PAINT_VISITS = 3
PAUSED_MS = 2500.0  # more than two snapshots
FIRST_PAINT = """() => new Promise(resolve => new PerformanceObserver(list => {
  for (const entry of list.getEntries())
    if (entry.name === 'first-contentful-paint') resolve(entry.startTime);
}).observe({type: 'paint', buffered: true}))"""

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture
def load(pool: Cluster) -> Iterator[None]:
    with Load(pool.url, 5):
        yield


def is_live(page: Page) -> None:
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")


def test_the_page_shows_each_node_with_its_role_and_state(pool: Cluster, visit: Open) -> None:
    page = visit(pool.url).page
    is_live(page)
    for name, node in pool.nodes.items():
        card = page.locator(f"#picture g.node.{node.role}", has_text=name)
        expect(card).to_have_attribute("data-state", "ready")
    expect(page.locator("#figures")).to_contain_text("4 of 4")
    page.get_by_text("Nodes as a table").click()
    expect(page.locator("#nodes tbody tr")).to_have_count(4)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
def test_a_busy_pool_is_accessible_and_fits_the_screen(
    pool: Cluster,
    load: None,
    visit: Open,
    pictures: Path,
    size: tuple[int, int],
    scheme: Scheme,
) -> None:
    seen = visit(pool.url, size, scheme)
    page = seen.page
    expect(page.locator("#running tbody tr").first).to_be_visible()
    expect(page.locator("#ended tbody tr").first).to_be_visible()
    expect(page.locator("#picture .edge[data-lit=yes]").first).to_be_attached()
    expect(page.locator("#charts path.series").first).to_have_attribute("d", re.compile("^M"))
    assert not seen.is_scrolled_sideways()
    page.screenshot(path=pictures / f"page-{size[0]}-{scheme}.png", full_page=True)
    assert seen.accessibility() == []
    page.locator("#ended tbody button").first.click()
    expect(page.locator("#explanation section.attempt").first).to_be_visible()
    assert seen.accessibility() == []
    assert not seen.is_scrolled_sideways()
    page.screenshot(path=pictures / f"explanation-{size[0]}-{scheme}.png")


def test_a_request_is_explained_by_keyboard_and_the_focus_returns(
    pool: Cluster, load: None, visit: Open
) -> None:
    page = visit(pool.url).page
    button = page.locator("#ended tbody button").first
    expect(button).to_be_visible()
    wanted = button.get_attribute("data-request")
    opener = page.locator(f"[data-request='{wanted}']")
    opener.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("#explanation")
    expect(dialog).to_contain_text(f"Request {wanted}")
    expect(dialog.locator("section.attempt")).to_contain_text("A prefill node computes the prompt")
    expect(dialog.locator("section.attempt tbody tr").first).to_be_visible()
    for _ in range(8):
        page.keyboard.press("Tab")
        inside = page.evaluate("document.activeElement.closest('dialog') !== null")
        outside_page = page.evaluate("document.activeElement === document.body")
        assert inside or outside_page  # the browser's own buttons come after the last element
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(opener).to_be_focused()


def test_ended_requests_do_not_move_under_the_pointer(
    pool: Cluster, load: None, visit: Open
) -> None:
    page = visit(pool.url).page
    rows = page.locator("#ended tbody button")
    rows.first.hover()
    expect(page.locator("#ended-paused")).to_be_visible()
    shown = rows.evaluate_all("all => all.map(button => button.dataset.request)")
    page.wait_for_timeout(PAUSED_MS)
    assert rows.evaluate_all("all => all.map(button => button.dataset.request)") == shown
    page.locator("#title").hover()
    expect(rows.first).not_to_have_attribute("data-request", shown[0])
    expect(page.locator("#ended-paused")).to_be_hidden()


def test_the_first_tab_stops_skip_to_the_pool_and_to_the_chat(pool: Cluster, visit: Open) -> None:
    page = visit(pool.url).page
    page.keyboard.press("Tab")
    expect(page.locator(".skip").first).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_focused()


def test_the_page_says_that_it_reconnects_and_does(pool: Cluster, visit: Open) -> None:
    seen = visit(pool.url, go=False)
    page = seen.page
    page.route("**/pool/events", lambda route: route.abort())
    page.goto(pool.url + "/")
    expect(page.locator("#connection-text")).to_have_text(
        "Reconnecting. The router does not answer."
    )
    expect(page.locator("#countdown")).to_contain_text("in ")
    page.unroute("**/pool/events")
    is_live(page)
    seen.problems[:] = [text for text in seen.problems if "ERR_FAILED" not in text]


def test_a_hidden_tab_pauses_and_a_shown_one_continues(pool: Cluster, visit: Open) -> None:
    page = visit(pool.url).page
    is_live(page)
    turn = """state => {
      Object.defineProperty(document, 'visibilityState', {value: state, configurable: true});
      document.dispatchEvent(new Event('visibilitychange'));
    }"""
    page.evaluate(turn, "hidden")
    expect(page.locator("#connection-text")).to_have_text("Paused")
    page.evaluate(turn, "visible")
    is_live(page)


@pytest.mark.parametrize(("calm", "moves"), [(True, "none"), (False, "moving")])
def test_edges_move_unless_the_user_prefers_reduced_motion(
    pool: Cluster, load: None, visit: Open, calm: bool, moves: str
) -> None:
    page = visit(pool.url, calm=calm).page
    expect(page.locator("#picture .edge[data-lit=yes]").first).to_be_attached()
    moving = page.locator("#picture .edge[data-lit=yes] .moving").first
    expect(moving).to_have_css("animation-name", moves)


def test_the_charts_have_a_table_of_the_same_figures(
    pool: Cluster, load: None, visit: Open
) -> None:
    page = visit(pool.url).page
    page.get_by_text("Charts as a table").click()
    expect(page.locator("#history tbody tr").first).to_contain_text("ms")
    expect(page.locator("#plots svg[role=img]")).to_have_count(6)


def test_the_time_to_the_first_paint_is_printed(
    pool: Cluster, visit: Open, record_property: Callable[[str, object], None]
) -> None:
    times = []
    for _ in range(PAINT_VISITS):
        times.append(visit(pool.url).page.evaluate(FIRST_PAINT))
    record_property("page", f"first paint after {min(times):.0f} to {max(times):.0f} ms")
