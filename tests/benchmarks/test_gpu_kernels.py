"""The rows of kernels of `make gpu`: right results pass, wrong ones fail, a lost row is skipped.

One row of the table runs here. The whole table runs in test_gpu_dry_run.py, in `make test-long`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.findings import Findings, read
from benchmarks.gpu.kernel_rows import DRY_KEYS, ROWS, KernelRow, Setup, Trial, seen_keys
from benchmarks.gpu.kernels import run, share_of_bound
from benchmarks.gpu.names import COPY, GEMM

ONES = torch.ones(4, 3)


def findings_in(folder: Path, *, seconds: float = 1000.0, **ceilings: float) -> Findings:
    return Findings(
        path=folder / "kernels.jsonl",
        device=torch.device("cpu"),
        dry=True,
        deadline=time.monotonic() + seconds,
        ceilings=ceilings,
    )


def row_of(name: str, work: Callable[[], torch.Tensor]) -> KernelRow:
    trial = Trial(run=lambda: (work(),), expected=(ONES,), tolerance=1e-3, bytes=ONES.nbytes)
    return KernelRow(name, lambda setup: trial)


def lost() -> torch.Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def checks(findings: Findings) -> dict[str, bool | None]:
    return {each.name: each.passed for each in read(findings.path) if each.passed is not None}


def test_a_row_of_the_table_passes_in_the_interpreter(tmp_path: Path) -> None:
    [row] = [row for row in ROWS if row.name == "store, Qwen3-0.6B, 256"]
    findings = findings_in(tmp_path, **{COPY: 3000.0, GEMM: 800.0})
    run(findings, [row])
    assert checks(findings) == {row.name: True}
    [measured] = [each for each in read(findings.path) if each.value is not None]
    assert (measured.name, measured.unit, measured.of) == (row.name, "us", COPY)


def test_wrong_unwritten_and_failing_results_fail_their_row_alone(tmp_path: Path) -> None:
    findings = findings_in(tmp_path)
    rows = [
        row_of("right", lambda: ONES + 1e-4),
        row_of("off by a little", lambda: ONES + 0.01),
        row_of("unwritten", lambda: torch.empty(4, 3)),
        row_of("lost", lost),
        row_of("right again", ONES.clone),
    ]
    run(findings, rows)
    assert checks(findings) == {
        "right": True,
        "off by a little": False,
        "unwritten": False,
        "lost": False,
        "right again": True,
    }


def test_another_process_goes_on_behind_the_rows_that_have_begun(tmp_path: Path) -> None:
    findings = findings_in(tmp_path)
    findings.first_try("killed")
    run(findings, [row_of("killed", lost), row_of("next", ONES.clone)])
    assert checks(findings) == {"next": True}


def test_rows_without_time_are_a_failed_check(tmp_path: Path) -> None:
    findings = findings_in(tmp_path, seconds=0.0)
    run(findings, [row_of("one", ONES.clone), row_of("two", ONES.clone)])
    assert checks(findings) == {"all rows": False}


def test_a_share_is_of_the_longer_bound_and_missing_without_a_measured_card(
    tmp_path: Path,
) -> None:
    trial = Trial(run=lambda: (), expected=(), tolerance=0.0, bytes=10**9, operations=10**9)
    by_bytes = findings_in(tmp_path, **{COPY: 1000.0, GEMM: 10.0})
    by_operations = findings_in(tmp_path, **{COPY: 1000.0, GEMM: 0.5})
    assert share_of_bound(trial, 2e-3, by_bytes) == (0.5, COPY)
    assert share_of_bound(trial, 4e-3, by_operations) == (0.5, GEMM)
    assert share_of_bound(trial, 2e-3, findings_in(tmp_path)) == (None, "")


def test_the_names_of_rows_are_unique() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("start", "count", "window", "read_keys", "pairs"),
    [
        (99, 1, None, 100, 100),
        (0, 4, None, 4, 1 + 2 + 3 + 4),
        (99, 1, 10, 10, 10),
        (8, 4, 10, 12, 9 + 10 + 10 + 10),
        (20, 3, 10, 12, 30),
    ],
)
def test_the_keys_that_a_row_reads_and_computes_are_counted(
    start: int, count: int, window: int | None, read_keys: int, pairs: int
) -> None:
    assert seen_keys(start, count, window) == (read_keys, pairs)


def test_in_a_dry_run_shapes_are_tiny_and_in_float32() -> None:
    dry, card = (Setup(torch.device("cpu"), dry) for dry in (True, False))
    assert dry.dtype == torch.float32
    assert card.dtype == torch.bfloat16
    assert dry.at_most(8192, DRY_KEYS) == DRY_KEYS
    assert card.at_most(8192, DRY_KEYS) == 8192
    assert card.sizes("Qwen3-0.6B").hidden == 1024
    assert dry.sizes("Qwen3-0.6B").hidden < 100
