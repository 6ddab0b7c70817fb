"""Rows of all kinds laid out for a step, and a step that is read when it is done."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from baton_engine.interface import Row, RowResult, Sample
from baton_engine.runner.batch_layout import Layout, launched, plain_results
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams

BLOCK = 4


def row(start: int, tokens: Sequence[int], samples: int = 0) -> Row:
    first = 10 * tokens[0]
    blocks = [BlockId(first + index) for index in range((start + len(tokens)) // BLOCK + 2)]
    asked = tuple(Sample(choice, 0, SamplingParams()) for choice in range(samples))
    return Row(tokens, start, blocks, asked)


def test_one_token_rows_come_first_the_longest_before_others_and_equals_in_order() -> None:
    rows = [row(9, [1, 2]), row(3, [3]), row(8, [4]), row(0, [5, 6, 7]), row(8, [8])]
    layout = Layout.of(rows)
    assert layout.order == [2, 4, 1, 0, 3]
    assert layout.rows == [rows[index] for index in layout.order]
    assert layout.tokens().tolist() == [4, 8, 3, 1, 2, 5, 6, 7]
    assert layout.positions().tolist() == [8, 8, 3, 9, 10, 0, 1, 2]
    assert layout.ends_R.tolist() == [1, 2, 3, 5, 8]


@pytest.mark.parametrize(
    ("start", "tokens", "begun"),
    [
        (0, 3, [10]),
        (0, 4, []),  # full at once
        (0, 6, [11]),
        (3, 1, []),
        (4, 1, [11]),
        (5, 1, []),  # begun by an earlier step
        (5, 2, []),
        (5, 4, [12]),
        (2, 10, []),
    ],
)
def test_a_block_is_begun_by_the_row_that_writes_its_first_token_and_not_its_last(
    start: int, tokens: int, begun: list[int]
) -> None:
    other = row(2, [7])
    assert Layout.of([other, row(start, [1] * tokens)]).begun(BLOCK) == begun


def test_samples_are_counted_in_the_order_of_the_call() -> None:
    """Laid out c, d, a, b; of a's two samples the first is behind c's and d's."""
    a, b, c, d = row(5, [1, 2], 2), row(0, [3] * 3), row(9, [4], 1), row(8, [5], 3)
    layout = Layout.of([a, b, c, d])
    assert layout.order == [2, 3, 0, 1]
    assert layout.sample_places().tolist() == [4, 5, 0, 1, 2, 3]
    assert Layout.of([b]).sample_places().tolist() == []


class Event:
    """One of a device that is done when somebody waits for it."""

    log: list[str]

    def record(self, stream: object) -> None:
        self.log.append(f"recorded on {stream}")

    def synchronize(self) -> None:
        self.log.append("waited")


def test_a_step_of_a_device_is_read_behind_all_that_was_launched_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Event.log = log = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")

    def finish() -> list[RowResult]:
        log.append("finished")
        return plain_results([7])

    step = launched(finish, torch.device("cuda:1"))
    assert log == ["recorded on the stream of cuda:1"]
    assert step.read() == plain_results([7])
    assert log[1:] == ["waited", "finished"]


def test_on_a_cpu_a_step_is_finished_when_it_is_launched() -> None:
    memory = [7]
    step = launched(lambda: plain_results(memory), torch.device("cpu"))
    memory[0] = 8  # the next step's
    assert step.read() == plain_results([7])
