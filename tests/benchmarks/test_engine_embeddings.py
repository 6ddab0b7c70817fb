"""The benchmark of embeddings: all sides give the same vectors, and a line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine.embeddings import Baton, Side, Transformers, compare
from benchmarks.support.engine.cpu_workloads import TINY, save_model


def test_all_sides_give_equal_vectors_and_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "model", TINY)
    ours = Baton(tmp_path / "model", "float32", 1, None)
    sides: list[Side] = [ours, Transformers(tmp_path / "model", "float32")]
    assert compare(sides, [[*range(20)], [*range(20, 40)]], 1) == []
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split(",")[0] for line in lines] == ["baton", "transformers"]
    assert "1.00000;" in lines[1]
