"""The profile of a decode step: it has every part once, and no time counts in two parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton_protocol.policies import DType
from benchmarks.engine.cpu_step import (
    HOST,
    PARTS,
    Load,
    make_engine,
    product_shapes,
    profile,
    report,
)
from benchmarks.support.engine.cpu_workloads import MID, TINY, Shape
from benchmarks.support.engine.part_timer import PartTimer, noted

STEPS, PASSES = 2, 2
LOAD = Load(rows=3, keys=40, shared=32)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Broken(Exception):
    pass


class Work:
    """Parts that call each other and advance a fake clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def outer(self) -> None:
        self.now += 1
        self.inner(2)
        self.now += 4
        self.inner(3, broken=True)

    def inner(self, seconds: float, *, broken: bool = False) -> None:
        self.now += seconds
        if broken:
            raise Broken


def test_the_time_of_a_part_excludes_the_parts_that_it_calls_even_if_they_raise() -> None:
    work = Work()
    timer = PartTimer(work.clock)
    with noted(timer, [(Work, "outer", "outer"), (Work, "inner", lambda one: type(one).__name__)]):
        with pytest.raises(Broken):
            work.outer()
        work.inner(7)
    assert timer.take() == {"outer": 5.0, "Work": 12.0}
    assert timer.take() == {}
    work.inner(1)
    assert timer.take() == {}, "a call after the end was measured"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_the_parts_of_a_step_add_up_to_its_whole_time(
    dtype: DType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, generated = make_engine(tmp_path, TINY, LOAD, dtype, STEPS * (PASSES + 2))
    assert generated == 3 + 2 + 1
    assert engine.load().cached_prompt_tokens_total == 2 * LOAD.shared
    profiles = profile(engine, generated, TINY, LOAD, STEPS, PASSES)
    assert len(profiles) == PASSES
    for each in profiles:
        assert tuple(each.parts_ms) == PARTS
        assert all(map(math.isfinite, each.parts_ms.values()))
        assert min(each.parts_ms.values()) >= 0
        assert sum(each.parts_ms.values()) == pytest.approx(each.whole_ms)
    assert profiles[1].keys - profiles[0].keys == STEPS
    report(profiles[0], TINY, LOAD, dtype)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PARTS) + 1
    for part, line in zip(PARTS, lines, strict=False):
        assert line.strip().startswith(part)
    assert sum("GFLOP/s" in line for line in lines) == len(product_shapes(TINY))
    assert sum("GB/s" in line for line in lines) == 1


@pytest.mark.parametrize("shape", [MID, TINY])
def test_no_two_matrix_products_have_the_same_shape(shape: Shape) -> None:
    shapes = product_shapes(shape)
    assert len({sizes[:2] for sizes in shapes.values()}) == len(shapes)
    assert set(shapes) | set(HOST) < set(PARTS)
    weights = sum(outputs * inputs * count for outputs, inputs, count in shapes.values())
    assert weights == shape.layer_weights + shape.hidden * 8192
