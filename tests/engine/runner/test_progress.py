"""Progress lines on terminals and in logs, with a fake clock; and their texts."""

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
def messages(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "baton_engine")
    return lambda: [record.getMessage() for record in caplog.records]


def test_fast_work_shows_no_progress(clock: Clock, messages: Callable[[], list[str]]) -> None:
    for out in (Terminal(), io.StringIO()):
        with ProgressLine(out, clock) as line:
            line.show("first")
            clock.advance(0.1)
            line.show("second")
        assert out.getvalue() == ""
    assert messages() == []


def test_on_a_terminal_one_line_is_updated_and_erased_at_the_end(clock: Clock) -> None:
    out = Terminal()
    with ProgressLine(out, clock) as line:
        for number in range(3):
            clock.advance(1.0)
            line.show(f"{number} of 3")
            line.show("too soon after the last")
    lines = [f"{ERASE}0 of 3, 1.0 s", f"{ERASE}1 of 3, 2.0 s", f"{ERASE}2 of 3, 3.0 s"]
    assert out.getvalue() == "".join(lines) + ERASE


def test_the_line_is_erased_after_an_exception(clock: Clock) -> None:
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


def test_a_line_is_cut_to_the_width_of_the_terminal(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    out = Terminal()
    with ProgressLine(out, clock) as line:
        clock.advance(1.0)
        line.show("a long text of many words")
    assert out.getvalue() == f"{ERASE}a long text{ERASE}"


def test_without_a_terminal_progress_is_logged_every_few_seconds(
    clock: Clock, messages: Callable[[], list[str]]
) -> None:
    out = io.StringIO()
    with ProgressLine(out, clock) as line:
        for second in range(1, 12):
            clock.advance(1.0)
            line.show(f"{second} of 11")
    assert messages() == ["5 of 11, 5.0 s", "10 of 11, 10.0 s"]
    assert out.getvalue() == ""


class SlowWarmUp:
    """A runner whose warm-up takes one second per size."""

    def __init__(self, clock: Clock, buckets: Sequence[int]) -> None:
        self.buckets = buckets
        self.order: list[int | str] = []
        self._clock = clock

    def warm(self, bucket: int) -> None:
        self._clock.advance(1.0)
        self.order.append(bucket)

    def warm_eager(self) -> None:
        self.order.append("other steps")


def test_every_size_is_warmed_up_once_largest_first(
    clock: Clock, messages: Callable[[], list[str]]
) -> None:
    out, runner = Terminal(), SlowWarmUp(clock, (1, 2, 4, 8))
    with ProgressLine(out, clock) as line:
        warm_all(runner.buckets, runner.warm, runner.warm_eager, line)
    assert runner.order == [8, 4, 2, 1, "other steps"]
    assert f"{ERASE}capturing 3 of 4 batch sizes (8 ... 1), 2.0 s" in out.getvalue()
    assert messages() == ["captured 4 batch sizes (8 ... 1) in 4.0 s"]


def test_without_sizes_to_capture_there_is_no_message(
    clock: Clock, messages: Callable[[], list[str]]
) -> None:
    out = Terminal()
    runner = SlowWarmUp(clock, ())
    with ProgressLine(out, clock) as line:
        warm_all(runner.buckets, runner.warm, runner.warm_eager, line)
    assert (out.getvalue(), messages()) == ("", [])
    assert runner.order == ["other steps"]


def test_a_single_size_is_described_in_the_singular() -> None:
    assert describe((1,)) == "1 batch size (1)"
    assert describe((1, 2, 250)) == "3 batch sizes (250 ... 1)"


def test_the_progress_of_loading_shows_loaded_and_total_bytes(clock: Clock) -> None:
    out = Terminal()
    with ProgressLine(out, clock) as line:
        loaded = counting(line, 4 * GIB)
        clock.advance(1.0)
        loaded(GIB)
        clock.advance(1.0)
        loaded(2 * GIB)
    assert "loading weights, 1.0 of 4.0 GiB, 1.0 s" in out.getvalue()
    assert "loading weights, 3.0 of 4.0 GiB, 2.0 s" in out.getvalue()


def test_loading_reports_every_byte(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    totals: list[int] = []

    def count(line: ProgressLine, total: int) -> Callable[[int], None]:
        totals.append(total)
        return loaded.append

    monkeypatch.setattr("baton_engine.build.counting", count)
    small_engine(tiny_model("llama-gqa1"))
    [total] = totals
    assert 0.9 * total < sum(loaded) <= total  # files have headers
