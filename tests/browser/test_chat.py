"""The chat of the live page: answers, stops, remembers, and says what the loss of a node did."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Request, expect

from tests.support.browser.load import CHATS
from tests.support.browser.visits import NARROW, PATIENCE_MS, WIDE, Visit, ask_greedily
from tests.support.clients.http import exchange
from tests.support.pools.processes import Cluster

Open = Callable[..., Visit]

PLACED = re.compile(r"prefill-\d → decode-\d")
LONG = 200  # tokens: 4 s of decoding
STORY = [{"role": "user", "content": "Tell me a long story"}]

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(autouse=True)
def repaired(pool: Cluster) -> Iterator[None]:
    yield
    pool.repair()


def text_of(body: Any) -> str:
    content: str = body["choices"][0]["message"]["content"]
    return content


def say(page: Page, text: str, tokens: int = 24) -> None:
    if not page.locator("#length").is_visible():
        page.get_by_text("System prompt and length").click()
    page.locator("#length").fill(str(tokens))
    page.locator("#question").fill(text)
    page.keyboard.press("Enter")


def test_an_answer_streams_and_names_the_nodes_that_served_it(pool: Cluster, visit: Open) -> None:
    page = visit(pool.url).page
    say(page, "What is a baton?")
    answer = page.locator(".answer")
    expect(page.locator(".message.user")).to_have_text("What is a baton?")
    expect(answer.locator(".meta")).to_contain_text(PLACED)
    expect(answer.locator(".meta")).to_contain_text("24 tokens")
    assert answer.locator(".text").last.inner_text() != ""
    answer.get_by_text("Why there?").click()
    expect(page.locator("#explanation")).to_contain_text("Attempt 1")
    page.keyboard.press("Escape")
    expect(answer.get_by_text("Why there?")).to_be_focused()


def test_the_chat_sends_the_system_prompt_and_what_was_said_before(
    pool: Cluster, visit: Open
) -> None:
    page = visit(pool.url).page
    bodies: list[Any] = []

    def note(request: Request) -> None:
        if request.method == "POST":
            bodies.append(json.loads(request.post_data or ""))

    page.on("request", note)
    page.get_by_text("System prompt and length").click()
    page.locator("#system").fill("Be brief.")
    say(page, "One")
    expect(page.get_by_text("Why there?")).to_have_count(1)
    first = page.locator(".answer > .text").last.text_content()
    say(page, "Two")
    expect(page.get_by_text("Why there?")).to_have_count(2)
    assert bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Two"},
    ]
    page.get_by_text("New chat").click()
    expect(page.locator(".message")).to_have_count(0)


def test_stop_ends_the_answer_and_the_request(pool: Cluster, visit: Open) -> None:
    page = visit(pool.url).page
    say(page, "Never end", tokens=1500)
    expect(page.locator(".answer .meta")).to_contain_text("first token")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".answer .meta")).to_contain_text("stopped")
    expect(page.locator("#ended tbody")).to_contain_text("client left")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
def test_a_node_killed_during_the_chat_costs_a_pause_and_no_token(
    pool: Cluster, visit: Open, pictures: Path, size: tuple[int, int]
) -> None:
    page = visit(pool.url, size).page
    page.route(f"**{CHATS}", ask_greedily)
    say(page, STORY[0]["content"], tokens=LONG)
    meta = page.locator(".answer .meta")
    expect(meta).to_contain_text("first token")
    match = re.search(r"decode-\d", meta.inner_text())
    assert match is not None
    killed = match[0]
    pool.nodes[killed].kill()
    other = "decode-1" if killed == "decode-0" else "decode-0"
    expect(page.locator(".takeover")).to_have_text(
        re.compile(rf"^Continued on {other} after {killed} was lost: no token lost\.$")
    )
    expect(meta).to_contain_text(f"{LONG} tokens")
    expect(meta).to_contain_text("longest pause")
    expect(page.locator("#picture g.node[data-state=lost]")).to_contain_text(killed)
    page.screenshot(path=pictures / f"failover-{size[0]}.png")
    body = {"messages": STORY, "max_tokens": LONG, "temperature": 0}
    whole = exchange(pool.url, CHATS, body)
    assert page.locator(".answer > .text").last.text_content() == text_of(whole.body)


def test_a_refused_question_shows_the_reason_and_can_be_sent_again(
    pool: Cluster, visit: Open
) -> None:
    seen = visit(pool.url)
    page = seen.page
    say(page, "Too long", tokens=90000)
    expect(page.locator(".answer .problem")).to_contain_text("90000")
    page.locator("#length").fill("8")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".answer .meta")).to_contain_text("8 tokens")
    expect(page.locator(".problem")).to_have_count(0)
    seen.problems[:] = [text for text in seen.problems if "400" not in text]
