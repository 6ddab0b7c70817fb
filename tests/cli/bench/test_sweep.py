"""`baton bench sweep`: which points are measured, which are best, and how a sweep goes on."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from baton_cli.bench.closed_loop import drive_closed
from baton_cli.bench.svg_chart import Spot, line_chart
from baton_cli.bench.sweep import Point, Results, doubling, fastest, halving, largest, search, table
from baton_cli.errors import CommandError
from baton_engine.sim.build import SimSettings, build_sim
from tests.support.engines.engine_core import make_request
from tests.support.project.command import baton

SIM = ("--engine", "sim", "--kv-blocks", "400", "--input-len", "16", "--output-len", "4")


def point(seqs: int, tokens: int, *, good: int = 10, seconds: float = 1.0) -> Point:
    return Point(
        seqs=seqs,
        tokens=tokens,
        requests=10,
        good=good,
        seconds=seconds,
        output_tokens=100 * seqs,
        preemptions=0,
        p99_ms={"ttft": 1.0},
    )


def measure_up_to(best: dict[int, int], asked: list[tuple[int, int]]) -> Callable[..., Point]:
    """Of each number of tokens, up to `best` sequences meet the goals."""

    def measure(seqs: int, tokens: int) -> Point:
        asked.append((seqs, tokens))
        return point(seqs, tokens, good=10 if seqs <= best[tokens] else 0)

    return measure


@pytest.mark.parametrize("best", [{64: 0, 128: 1}, {64: 16, 128: 8}, {64: 256, 128: 64}])
def test_the_search_finds_the_most_sequences_of_each_number_of_tokens(best: dict[int, int]) -> None:
    asked: list[tuple[int, int]] = []
    points = search(doubling(256), (64, 128), measure_up_to(best, asked), 0.99)
    for tokens, most in best.items():
        good = [each.seqs for each in points if each.tokens == tokens and each.meets(0.99)]
        assert max(good, default=0) == min(most, tokens)  # a step has a token per sequence
    assert len(asked) <= 8 < 2 * len(doubling(256))


def test_the_largest_point_need_not_be_the_fastest() -> None:
    points = [point(8, 64, seconds=0.5), point(9, 64), point(9, 128), point(10, 64, good=9)]
    assert largest(points, 0.99) == points[2]
    assert fastest(points, 0.99) == points[0]
    assert largest(points, 0.9) == points[3]
    assert largest(points[3:], 0.99) is fastest([], 0.5) is None
    lines = table(points, 0.99).splitlines()
    assert [line.split()[3] for line in lines[1:]] == ["yes", "yes", "no", "yes"]


def test_limits_to_try_are_powers_of_two_and_the_largest() -> None:
    assert (doubling(1), doubling(8), doubling(12)) == ((1,), (1, 2, 4, 8), (1, 2, 4, 8, 12))
    assert (halving(256), halving(3)) == ((32, 64, 128, 256), (1, 3))


def test_a_sweep_goes_on_from_its_file_and_drops_a_broken_last_line(tmp_path: Path) -> None:
    path, asked, setting = tmp_path / "r", list[tuple[int, int]](), {"seed": 1, "model": "m"}
    first = Results(path, setting).measured(measure_up_to({64: 8}, asked))
    assert first(4, 64) == first(4, 64)
    first(8, 64)
    with path.open("ab") as file:
        file.write(b'{"seqs": 16, "to')
    for _ in range(2):
        again = Results(path, setting)
        assert len(again) == 2
        assert again.measured(measure_up_to({64: 0}, asked))(8, 64).good == 10
    again.measured(measure_up_to({64: 0}, asked))(16, 64)
    assert asked == [(4, 64), (8, 64), (16, 64)]
    assert len(Results(path, setting)) == 3
    with pytest.raises(CommandError, match=r"is of another sweep \(seed differ\)"):
        Results(path, setting | {"seed": 2})
    path.write_text("no json\n")
    with pytest.raises(CommandError, match="not a sweep's results"):
        Results(path, setting)


def test_a_closed_loop_has_as_many_requests_at_once_as_asked() -> None:
    engine, ticks = build_sim(SimSettings()), count()
    requests = [make_request(f"r{number}", 5, max_tokens=3 + number) for number in range(7)]
    outcomes, seconds = drive_closed(engine, requests, 2, lambda: float(next(ticks)))
    assert [each.output_tokens for each in outcomes] == [*range(3, 10)]
    assert all(
        each.latency == pytest.approx(each.ttft + sum(each.gaps)) and each.ttft > 0
        for each in outcomes
    )
    ends = [each.start + each.latency for each in outcomes]
    assert all(sum(a.start < end for a in outcomes) <= 2 + place for place, end in enumerate(ends))
    assert (engine.has_work(), seconds > max(ends)) == (False, True)


def test_a_sweep_prints_a_table_writes_a_chart_and_measures_nothing_twice(tmp_path: Path) -> None:
    files = ("--results", str(tmp_path / "r"), "--plot", str(tmp_path / "p.svg"))
    flags = (*SIM, "--max-num-seqs", "2", "--try-tokens", "32,64", "--goodput", "e2el:60000")
    done = baton("bench", "sweep", *flags, *files)
    assert done.returncode == 0, done.stderr
    assert "largest that meets the goals: --max-num-seqs 2 --max-batched-tokens 64" in done.stdout
    header, *lines = (tmp_path / "r").read_text().splitlines()
    assert json.loads(header)["setting"]["goals"] == {"e2el": 60000.0}
    assert {json.loads(line)["requests"] for line in lines} == {8}
    assert ElementTree.parse(tmp_path / "p.svg").getroot().tag.endswith("svg")
    again = baton("bench", "sweep", *flags, *files)
    assert again.stdout == done.stdout
    assert again.stderr == f"{len(lines)} points are in {tmp_path / 'r'} already\n"
    other = baton("bench", "sweep", *flags, *files, "--seed", "3")
    assert other.stderr.endswith("is of another sweep (seed differ); name another file\n")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((), "--goodput is missing: give NAME:MS"),
        (("--goodput", "ttft"), "--goodput ttft: "),
        (("--goodput", "itl:0.001", "--max-num-seqs", "1"), ""),
        (("--goodput", "itl:1", "--try-seqs", "0,4"), "--try-seqs 0,4: give numbers from 1 to 256"),
        (("--goodput", "itl:1", "--plot", "/no/such/f"), "--plot /no/such/f: the folder does not"),
    ],
)
def test_a_sweep_that_cannot_succeed_says_why(flags: tuple[str, ...], problem: str) -> None:
    done = baton("bench", "sweep", *SIM, "--try-tokens", "64", *flags)
    assert done.returncode in (1, 2)
    if problem:
        assert done.stderr.startswith(f"baton: {problem}")
    else:
        assert done.stdout.endswith("no limits meet the goals for 99% of the requests\n")


def test_a_chart_has_a_line_and_dots_per_series() -> None:
    lines = {"a & b": [Spot(1, 2, True), Spot(3, 70, False)], "c": [Spot(0, 0), Spot(2, 5)]}
    root = ElementTree.fromstring(line_chart("t", "x", "y", lines))
    tags = [each.tag.rpartition("}")[2] for each in root.iter()]
    assert (tags.count("polyline"), tags.count("circle")) == (2, 2)
    assert "a & b" in [each.text for each in root.iter()]
    ElementTree.fromstring(line_chart("t", "x", "y", {}))
