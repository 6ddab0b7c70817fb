"""Keys on the live page: it asks for one, keeps it in the tab, and shows a tenant only its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser.load import Load
from tests.support.browser.visits import PATIENCE_MS, Visit
from tests.support.pools.processes import Cluster

Open = Callable[..., Visit]

KEYS = {"ant": "key-of-ant", "bee": "key-of-bee", "chief": "key-of-the-chief"}

expect.set_options(timeout=PATIENCE_MS)


def bearer(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[tenant]}"}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A pool with two tenants and an admin."""
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    lines = [f"{name} {key}{' admin' * (name == 'chief')}" for name, key in KEYS.items()]
    file.write_text("\n".join(lines))
    flags = [f"--api-keys={file}", "--handoff=always"]
    slow = ("--sim-decode-ms=20",)
    with Cluster(1, 1, decode_flags=slow, router_flags=flags, asking=bearer("chief")) as cluster:
        yield cluster


def enter(page: Page, key: str) -> None:
    page.get_by_role("textbox", name="API key").fill(key)
    page.get_by_role("button", name="Use this key").click()


@pytest.fixture
def open_with_key(pool: Cluster, visit: Open) -> Iterator[Callable[[str], Page]]:
    """Opens the page and enters a key. The browser's console reports each 401 and 404."""
    visits = []

    def open_page(key: str) -> Page:
        visits.append(visit(pool.url))
        enter(visits[-1].page, key)
        return visits[-1].page

    yield open_page
    for seen in visits:
        expected = ("status of 401", "status of 404")
        seen.problems[:] = [
            text for text in seen.problems if not any(part in text for part in expected)
        ]


def test_a_wrong_key_is_refused_and_the_right_one_opens_the_page(
    open_with_key: Callable[[str], Page],
) -> None:
    page = open_with_key("nonsense")
    expect(page.locator("#access-problem")).to_have_text("The router does not know this key.")
    enter(page, KEYS["ant"])
    expect(page.locator("#viewer-name")).to_have_text("tenant ant")
    expect(page.locator("#access")).to_be_hidden()
    page.reload()
    expect(page.locator("#viewer-name")).to_have_text("tenant ant")
    assert page.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0
    page.get_by_role("button", name="Forget the key").click()
    expect(page.locator("#access")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_tenant_sees_its_own_requests_and_no_figures_of_the_pool(
    pool: Cluster, open_with_key: Callable[[str], Page]
) -> None:
    with (
        Load(pool.url, 2, headers=bearer("ant")),
        Load(pool.url, 2, headers=bearer("bee")),
    ):
        admin = open_with_key(KEYS["chief"])
        ended = admin.locator("#ended tbody tr")
        expect(ended.filter(has_text="ant").first).to_be_visible()
        expect(ended.filter(has_text="bee").first).to_be_visible()
        expect(admin.locator("#tenants")).to_contain_text("bee")
        expect(admin.locator("#charts")).to_be_visible()
        foreign = ended.filter(has_text="bee").first.locator("button").get_attribute("data-request")
        page = open_with_key(KEYS["ant"])
        expect(page.locator("#ended tbody tr").first).to_be_visible()
        seen = page.locator("[data-request]").evaluate_all("all => all.map(b => b.dataset.request)")
        assert page.locator("main").get_by_text("bee").count() == 0
    expect(page.locator("#charts")).to_be_hidden()
    expect(page.locator("#tenants")).to_be_hidden()
    expect(page.locator("#picture g.node")).to_have_count(2)
    assert page.locator("#picture").get_by_text("KV").count() == 0
    status = "key => fetch('requests/' + key.id, {headers: {Authorization: 'Bearer ' + key.key}})"
    answers = {
        wanted: page.evaluate(
            f"{status}.then(answer => answer.status)", {"id": wanted, "key": KEYS["ant"]}
        )
        for wanted in [*seen[:3], foreign]
    }
    assert answers == {**dict.fromkeys(seen[:3], 200), foreign: 404}


def test_a_tenant_s_chat_is_answered_and_explained(open_with_key: Callable[[str], Page]) -> None:
    page = open_with_key(KEYS["bee"])
    page.locator("#question").fill("Hello")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Why there?")).to_be_visible()
    expect(page.locator(".answer .meta")).to_contain_text("decode-0")
