"""Progress lines on terminals and in logs, by a clock that the tests turn; and what they tell."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from baton_engine.progress import ERASE, ProgressLine
from baton_engine.runner.warm_up import counting, describe, warm_all
from tests.support.clock import Clock
from tests.support.engines.torch_engines import small_engine

GIB = 1 << 30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "baton_engine")
    return lambda: [record.getMessage() for record in caplog.records]


def test_what_is_done_at_once_is_shown_nowhere(clock: Clock, said: Callable[[], list[str]]) -> None:
    for out in (Terminal(), io.StringIO()):
        with ProgressLine(out, clock) as line:
            line.show("first")
            clock.advance(0.1)
            line.show("second")
        assert out.getvalue() == ""
    assert said() == []


def test_a_terminal_has_one_line_that_changes_and_is_gone_at_the_end(clock: Clock) -> None:
    out = Terminal()
    with ProgressLine(out, clock) as line:
        for number in range(3):
            clock.advance(1.0)
            line.show(f"{number} of 3")
            line.show("too soon after it")
    lines = [f"{ERASE}0 of 3, 1.0 s", f"{ERASE}1 of 3, 2.0 s", f"{ERASE}2 of 3, 3.0 s"]
    assert out.getvalue() == "".join(lines) + ERASE


def test_the_line_is_gone_also_where_it_failed(clock: Clock) -> None:
    out = Terminal()
    line = ProgressLine(out, clock)

    def fail() -> None:
        with line:
            clock.advance(1.0)
            line.show("0 of 3")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert out.getvalue().endswith(ERASE)


def test_a_line_is_no_wider_than_the_terminal(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    out = Terminal()
    with ProgressLine(out, clock) as line:
        clock.advance(1.0)
        line.show("a long text of many words")
    assert out.getvalue() == f"{ERASE}a long text{ERASE}"


def test_a_log_gets_a_line_every_few_seconds(clock: Clock, said: Callable[[], list[str]]) -> None:
    out = io.StringIO()
    with ProgressLine(out, clock) as line:
        for second in range(1, 12):
            clock.advance(1.0)
            line.show(f"{second} of 11")
    assert said() == ["5 of 11, 5.0 s", "10 of 11, 10.0 s"]
    assert out.getvalue() == ""


class Warmed:
    """A runner that takes a second for each size."""

    def __init__(self, clock: Clock, buckets: Sequence[int]) -> None:
        self.buckets = buckets
        self.order: list[int] = []
        self._clock = clock

    def warm(self, bucket: int) -> None:
        self._clock.advance(1.0)
        self.order.append(bucket)


def test_every_size_is_warmed_once_the_largest_first(
    clock: Clock, said: Callable[[], list[str]]
) -> None:
    out, runner = Terminal(), Warmed(clock, (1, 2, 4, 8))
    with ProgressLine(out, clock) as line:
        warm_all(runner, line)
    assert runner.order == [8, 4, 2, 1]
    assert f"{ERASE}capturing 3 of 4 batch sizes (8 ... 1), 2.0 s" in out.getvalue()
    assert said() == ["captured 4 batch sizes (8 ... 1) in 4.0 s"]


def test_nothing_is_said_where_nothing_is_captured(
    clock: Clock, said: Callable[[], list[str]]
) -> None:
    out = Terminal()
    with ProgressLine(out, clock) as line:
        warm_all(Warmed(clock, ()), line)
    assert (out.getvalue(), said()) == ("", [])


def test_one_size_is_not_called_many() -> None:
    assert describe((1,)) == "1 batch size (1)"
    assert describe((1, 2, 250)) == "3 batch sizes (250 ... 1)"


def test_loading_tells_how_much_of_how_much(clock: Clock) -> None:
    out = Terminal()
    with ProgressLine(out, clock) as line:
        loaded = counting(line, 4 * GIB)
        clock.advance(1.0)
        loaded(GIB)
        clock.advance(1.0)
        loaded(2 * GIB)
    assert "loading weights, 1.0 of 4.0 GiB, 1.0 s" in out.getvalue()
    assert "loading weights, 3.0 of 4.0 GiB, 2.0 s" in out.getvalue()


def test_a_loader_tells_of_every_byte(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    totals: list[int] = []

    def count(line: ProgressLine, total: int) -> Callable[[int], None]:
        totals.append(total)
        return told.append

    monkeypatch.setattr("baton_engine.build.counting", count)
    small_engine(tiny_model("llama-gqa1"))
    [total] = totals
    assert 0.9 * total < sum(told) <= total  # files have headers
