"""One browser, and pools of simulated nodes whose routers serve the page."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.support.browser.visits import Visit, browser_running, visiting
from tests.support.needs import needs
from tests.support.pools.processes import Cluster

# Slow enough that a person, or a test, sees a request in each of its phases.
SLOW = ("--sim-prefill-ms-per-token=1", "--max-batched-tokens=32")
SLOW_DECODE = ("--sim-decode-ms=20",)
# Where the tests write screenshots; "" for a folder of pytest's.
PICTURES = os.environ.get("BATON_TEST_PICTURES", "")

Open = Callable[..., Visit]


@pytest.fixture(scope="session", autouse=True)
def machine() -> None:
    needs("browser")


@pytest.fixture(scope="session")
def browser(machine: None) -> Iterator[Browser]:
    with browser_running() as browser:
        yield browser


@pytest.fixture(scope="session")
def pool() -> Iterator[Cluster]:
    """Every request is handed off from one of 2 prefill nodes to one of 2 decode nodes."""
    cluster = Cluster(
        *(2, 2),
        prefill_flags=SLOW,
        decode_flags=SLOW_DECODE,
        router_flags=["--handoff=always"],
    )
    with cluster:
        yield cluster


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens pages; `visiting` has the arguments. At the end no page may have a problem."""
    with ExitStack() as stack:
        visits: list[Visit] = []

        def open_page(url: str, *arguments: Any, **options: Any) -> Visit:
            visits.append(stack.enter_context(visiting(browser, url, *arguments, **options)))
            return visits[-1]

        yield open_page
        assert [problem for visit in visits for problem in visit.problems] == []


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of screenshots: BATON_TEST_PICTURES, or one of pytest's."""
    folder = Path(PICTURES) if PICTURES else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
