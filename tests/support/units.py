"""Fails unit tests that use processes or sockets.

A test without the marks `integration` and `long` must not start a process, bind a socket or
connect: `make test-quick` stays quick and needs nothing from outside. This plugin fails a test that
does, and names the calls.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator

import pytest

OUTSIDE = frozenset(
    {"os.fork", "os.posix_spawn", "socket.bind", "socket.connect", "subprocess.Popen"}
)
# Libraries run it once per process to find shared objects, so it may appear in any test.
LOADER = "/sbin/ldconfig"


class UnitGuard:
    """A pytest plugin that watches a test's setup and call in the main thread.

    It ignores session fixtures, which the first test to need them sets up; teardown, in which
    module fixtures end; and other threads, which may belong to an earlier test.
    """

    def __init__(self) -> None:
        self._watching = False
        self._used: list[str] = []
        self._process = os.getpid()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._watching or event not in OUTSIDE or arguments[0] == LOADER:
            return
        if self._is_the_test():
            self._used.append(f"{event}{arguments[:2]}"[:200])

    def _is_the_test(self) -> bool:
        return (
            threading.current_thread() is threading.main_thread() and os.getpid() == self._process
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        self._used.clear()
        marks = {mark.name for mark in item.iter_markers()}
        self._watching = not marks & {"integration", "long"}
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, object, object]:
        watching = self._watching
        self._watching = watching and fixturedef.scope != "session"
        try:
            return (yield)
        finally:
            self._watching = watching

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        self._watching = False
        yield
        if self._used:
            pytest.fail(
                f"this test is not marked `integration`, and used {self._used[0]}", pytrace=False
            )
