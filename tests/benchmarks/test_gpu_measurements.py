"""The bounds that `make gpu` compares times with, and the order of a part's measurements."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton_cli.bench.workload import nano_vllm
from benchmarks.gpu.findings import Findings, read
from benchmarks.gpu.in_order import Task, reach, run_in_order, stay_below
from benchmarks.gpu.names import COPY, GEMM
from benchmarks.gpu.shapes import Shape


@pytest.fixture
def findings_on(tmp_path: Path) -> Callable[..., Findings]:
    """(device, deadline) -> findings of a part that is not dry, in the same file each time."""

    def make(device: str = "cpu", deadline: float = math.inf) -> Findings:
        ceilings = {COPY: 4300.0, GEMM: 780.0}
        return Findings(
            path=tmp_path / "found.jsonl",
            device=torch.device(device),
            dry=False,
            deadline=deadline,
            ceilings=ceilings,
        )

    return make


@pytest.mark.parametrize(
    ("name", "weights_s", "kv_s", "prompts_s"),
    [("qwen3-0.6b", 0.28, 3.23, 0.18), ("qwen3-8b", 3.60, 4.15, 2.58)],
)
def test_the_bound_of_the_reference_workload_is_that_of_its_bytes_and_products(
    name: str, weights_s: float, kv_s: float, prompts_s: float, findings_on: Callable[..., Findings]
) -> None:
    # Computed by hand for an H200: 121.07 million keys read, 1,024 steps, 4.3 TB/s, 780 TFLOP/s.
    shape = Shape(findings_on(), name)
    found = shape.workload_floor_ms(nano_vllm(shape.vocab))
    assert found == pytest.approx(1e3 * (weights_s + kv_s + prompts_s), rel=0.03)


def test_a_decode_step_moves_the_weights_and_the_kv_of_its_rows(
    findings_on: Callable[..., Findings],
) -> None:
    shape = Shape(findings_on(), "qwen3-0.6b")
    size = 596_049_920 * 2 + 256 * 1024 * 112 * 1024
    assert shape.decode_floor_ms(256, 1024) == pytest.approx(size / 4.3e12 * 1e3)


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_a_wrong_answer_is_a_failed_check_and_the_next_task_runs(
    findings_on: Callable[..., Findings],
) -> None:
    findings = findings_on("cuda")
    wrong = Task("answers", 1, raising(AssertionError("ids differ")))
    run_in_order(findings, [wrong, Task("next", 1, lambda: findings.checked("next", True))])
    assert [(each.name, each.passed) for each in read(findings.path)] == [
        ("answers", False),
        ("next", True),
    ]


def test_after_an_error_on_a_card_another_process_goes_on_behind_the_task(
    findings_on: Callable[..., Findings],
) -> None:
    findings = findings_on("cuda")
    fails = Task("fails", 1, raising(RuntimeError("device-side assert")))
    goes_on = Task("goes on", 1, lambda: findings.checked("goes on", True))
    group = Task("group", 1, lambda: run_in_order(findings, [fails, goes_on]), group=True)
    with pytest.raises(SystemExit):
        run_in_order(findings, [group])
    assert [each.name for each in read(findings.path)] == ["fails"]
    run_in_order(findings, [group])
    assert [each.name for each in read(findings.path)] == ["fails", "goes on"]


def test_a_task_without_time_is_a_finding(findings_on: Callable[..., Findings]) -> None:
    findings = findings_on(deadline=0.0)
    run_in_order(findings, [Task("late", 5, raising(AssertionError()))])
    [found] = read(findings.path)
    assert (found.name, found.passed) == ("late", None)
    assert found.note.startswith("not measured: ")


def test_a_goal_is_reached_at_a_share_of_one(findings_on: Callable[..., Findings]) -> None:
    findings = findings_on()
    reach(findings, "bandwidth", 0.4, "", 0.8)
    stay_below(findings, "idle", 0.06, "", 0.03)
    stay_below(findings, "none", 0.0, "", 0.0)
    assert [each.share for each in read(findings.path)] == [0.5, 0.5, 1.0]
