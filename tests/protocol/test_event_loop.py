"""Which event loop a serving process runs on."""

from __future__ import annotations

import asyncio
import sys

import pytest

from baton_protocol.event_loop import run


async def room_of_loop() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def test_a_serving_process_runs_on_uvloop_where_it_is_installed() -> None:
    assert run(room_of_loop()) == "uvloop"


def test_without_uvloop_a_serving_process_runs_on_asyncio_s_own_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert run(room_of_loop()) == "asyncio"
