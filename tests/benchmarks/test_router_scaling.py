"""The table and the options of `router_overhead --routers`."""

from __future__ import annotations

import pytest

from benchmarks.router.overhead import options_of
from benchmarks.support.router.router_scaling import Load, ceiling, scaling_table

ONE = [Load(100.0, 4.0, 5.0, 1.0), Load(80.0, 5.0, 5.0, 1.0), Load(50.0, 4.0, 5.0, 1.0)]
TWO = [Load(150.0, 4.4, 6.0, 0.5), Load(160.0, 5.0, 6.0, 0.5), Load(90.0, 4.8, 6.0, 0.5)]


def test_router_counts_are_compared_pass_by_pass() -> None:
    head, one, two, *notes = scaling_table({1: ONE, 2: TWO}, cores=4)
    assert head.split()[:3] == ["routers", "requests/s", "x"]
    assert one == (
        "      1         80 [50-100]   1.00    4.00 [4.00-5.00]   1.00   5.00     1.00        400"
    )
    assert two == (
        "      2        150 [90-160]   1.80    4.80 [4.40-5.00]   1.10   6.00     0.50        354"
    )
    assert notes[0].startswith("4 cores for the routers, 4 nodes and 64 clients")


@pytest.mark.parametrize(("cores", "most"), [(1, 100.0), (5, 500.0), (100, 1000.0)])
def test_with_many_cores_the_ceiling_is_that_of_the_client_process(cores: int, most: float) -> None:
    assert ceiling(ONE, cores) == pytest.approx(most)


@pytest.mark.parametrize("value", ["0", "two", "65", "1,2"])
def test_the_error_for_an_invalid_router_count_gives_the_range(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options_of(["--routers", "1", value, "--rivals"])
    assert "give 1 to 64" in capsys.readouterr().err


def test_the_quick_form_is_one_pass_with_half_the_requests() -> None:
    options = options_of(["--routers", "1", "2", "--quick"])
    assert (options.routers, options.passes, options.less, options.rivals) == ([1, 2], 1, 2, [])
