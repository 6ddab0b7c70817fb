"""README.md and docs/figures.md quote the newest committed results of a GPU, or say "not yet"."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.documents import FIGURES, README, pages
from benchmarks.gpu.findings import Finding
from benchmarks.gpu.names import ONE_BY_ONE, WORKLOAD
from benchmarks.gpu.processes import ENDED, Outcome
from benchmarks.gpu.results import Results, newest

COMMAND = "python -m benchmarks.gpu.documents"


@pytest.mark.parametrize("page", [README, FIGURES], ids=lambda page: page.name)
def test_a_page_quotes_the_newest_results(page: Path) -> None:
    assert page.read_text() == pages(newest())[page], f"stale; run: {COMMAND}"


def row_of(page: str, begin: str) -> str:
    [row] = [line for line in page.splitlines() if line.startswith(begin)]
    return row


def results_of(*findings: Finding) -> Results:
    speed = Outcome(name="speed", state=ENDED, seconds=90.0, findings=findings)
    return Results(card="NVIDIA H100", date="2026-12-01-1200", parts=[speed])


def test_without_results_both_pages_say_not_yet() -> None:
    written = pages(None)
    assert row_of(written[README], "| benchmarked on GPUs").count("**not yet**") == 1
    assert "`make gpu` | **not yet** | | | |" in row_of(written[README], "| [Qwen3-0.6B on a GPU]")
    assert "**Result:** not yet." in written[FIGURES]


def test_with_results_both_pages_state_them_and_the_card() -> None:
    results = results_of(
        Finding(name=WORKLOAD, value=41234.5, unit="tokens/s"),
        Finding(name=ONE_BY_ONE, value=15.25, unit="x"),
        Finding(name="a failed check", passed=False, note="ids differ"),
        Finding(name="a passed check", passed=True),
    )
    written = pages(results)
    row = row_of(written[README], "| [Qwen3-0.6B on a GPU]")
    assert row.endswith(
        "| `make gpu` | 41,234 tokens/s | transformers, one by one | 15.2x | NVIDIA H100 |"
    )
    assert "| [yes](docs/figures.md#on-gpus) | yes |" in row_of(
        written[README], "| benchmarked on GPUs"
    )
    figures = written[FIGURES]
    assert "**Result:** NVIDIA H100, 2026-12-01." in figures
    assert f"| {WORKLOAD} | 41,234 tokens/s |" in figures
    assert "| a failed check |  |  |  | **FAILED** | ids differ |" in figures
    assert "a passed check" not in figures


def test_results_without_the_workload_quote_no_speed() -> None:
    written = pages(results_of(Finding(name="step", value=1.0, unit="ms")))
    assert "**not yet**" in row_of(written[README], "| [Qwen3-0.6B on a GPU]")
