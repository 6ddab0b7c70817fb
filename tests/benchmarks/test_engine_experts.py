"""The benchmark of experts: all sides compute the same, and only what decodes is held to memory."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine.experts import OURS, RIVALS, TINY, compare, make_sides, report


@pytest.mark.parametrize(("tokens", "goals"), [(3, 2), (40, 1)])
def test_all_sides_give_equal_outputs_and_a_line_each(
    tokens: int, goals: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = make_sides(TINY, torch.float32)
    with torch.inference_mode():
        timed = compare(sides, TINY, torch.float32, tokens, 2, torch.ones(1000))
    assert list(timed.seconds) == [OURS, *RIVALS]
    assert {len(each) for each in timed.seconds.values()} == {2}
    assert max(timed.weight_bytes) <= TINY.experts * TINY.expert_weights * 4
    assert len(report(timed, TINY, tokens)) == goals
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(timed.seconds)
