"""The layout of a step's rows of all kinds, and when a launched step is read."""

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
    requested = tuple(Sample(choice, 0, SamplingParams()) for choice in range(samples))
    return Row(tokens, start, blocks, requested)


def test_one_token_rows_come_first_sorted_by_length_in_a_stable_order() -> None:
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
        (0, 4, []),  # the row fills its block
        (0, 6, [11]),
        (3, 1, []),
        (4, 1, [11]),
        (5, 1, []),  # begun by an earlier step
        (5, 2, []),
        (5, 4, [12]),
        (2, 10, []),
    ],
)
def test_a_step_begins_a_block_if_it_writes_the_first_token_but_not_the_last(
    start: int, tokens: int, begun: list[int]
) -> None:
    other = row(2, [7])
    assert Layout.of([other, row(start, [1] * tokens)]).begun(BLOCK) == begun


def test_sample_places_are_in_the_order_of_the_call() -> None:
    """The layout is c, d, a, b, so a's two samples follow those of c and d."""
    a, b, c, d = row(5, [1, 2], 2), row(0, [3] * 3), row(9, [4], 1), row(8, [5], 3)
    layout = Layout.of([a, b, c, d])
    assert layout.order == [2, 3, 0, 1]
    assert layout.sample_places().tolist() == [4, 5, 0, 1, 2, 3]
    assert Layout.of([b]).sample_places().tolist() == []


class Event:
    """A fake CUDA event that logs its calls."""

    log: list[str]

    def record(self, stream: object) -> None:
        self.log.append(f"recorded on {stream}")

    def synchronize(self) -> None:
        self.log.append("waited")


def test_a_step_on_a_gpu_is_read_after_the_event_recorded_at_its_launch(
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


def test_on_a_cpu_a_step_is_read_when_it_is_launched() -> None:
    memory = [7]
    step = launched(lambda: plain_results(memory), torch.device("cpu"))
    memory[0] = 8  # the next step overwrites the memory
    assert step.read() == plain_results([7])
