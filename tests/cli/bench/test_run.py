"""A benchmark run and its figures: every token is counted, and KV cache use is exact."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import count

import pytest

from baton_cli.bench.metrics import Spread, latency_of, setting_of, spread, throughput_of, waste_of
from baton_cli.bench.options import LatencyOptions
from baton_cli.bench.report import ProgressBar, latency_text, throughput_text
from baton_cli.bench.run import LOOK_EVERY, CacheUse, RunRecord, drive
from baton_cli.bench.workload import Workload, WorkloadItem
from baton_engine.core.engine_core import EngineCore
from baton_engine.sim.build import SimSettings, build_sim
from baton_protocol.errors import PromptTooLong
from tests.support.engines.engine_core import scripted


def ticks() -> Callable[[], float]:
    """A clock that advances by one second at each read."""
    numbers = count()
    return lambda: float(next(numbers))


def workload_of(*sizes: tuple[int, int]) -> Workload:
    """One request per (prompt length, new tokens); prompts share no prefix."""
    items = [
        WorkloadItem(tuple((7 * index + at) % 90 for at in range(length)), new)
        for index, (length, new) in enumerate(sizes)
    ]
    return Workload("test", tuple(items))


def run(engine: EngineCore, workload: Workload, salt: str = "") -> RunRecord:
    record = drive(engine, workload.requests(0, salt), clock=ticks())
    engine.check_integrity()
    assert not engine.has_work()
    return record


def test_each_request_gets_all_its_tokens_and_step_counts_add_up() -> None:
    engine = build_sim(SimSettings(num_blocks=64, max_batched_tokens=32))
    workload = workload_of((40, 5), (3, 9), (17, 1))
    record = run(engine, workload)
    assert [len(live.times) for live in record.lives.values()] == [5, 9, 1]
    assert sum(step.new_tokens for step in record.steps) == record.output_tokens == 15
    assert sum(step.prompt_tokens for step in record.steps) == workload.prompt_tokens
    assert record.elapsed == record.steps[-1].end == float(len(record.steps))


def test_a_cache_sample_counts_the_empty_slots_after_each_request_s_last_token() -> None:
    engine, _ = scripted()  # blocks of 4
    record = run(engine, workload_of((5, 4), (8, 4)))
    assert record.looks == [CacheUse(allocated=16, empty=3, steady=False)]


def test_a_cache_sample_counts_blocks_of_a_prompt_that_is_not_computed_yet() -> None:
    engine, _ = scripted(max_batched_tokens=4)
    record = run(engine, workload_of((10, 2)))
    assert record.looks[0] == CacheUse(allocated=12, empty=8, steady=False)


def test_a_cache_sample_counts_requests_that_end_in_its_step() -> None:
    engine, _ = scripted()
    record = run(engine, workload_of((5, 1)))
    assert record.looks == [CacheUse(allocated=8, empty=3, steady=False)]


def test_shared_blocks_count_once() -> None:
    engine, _ = scripted()
    same = WorkloadItem(tuple(range(9)), LOOK_EVERY)
    record = run(engine, Workload("test", (same, WorkloadItem((*same.prompt, 50), 2))))
    assert record.cached_tokens == 0  # both were submitted together
    again = run(engine, Workload("test", (same,)))
    assert again.cached_tokens == 8
    assert again.looks[0] == CacheUse(allocated=12, empty=3, steady=False)


def test_a_later_cache_sample_counts_generated_tokens() -> None:
    engine, _ = scripted()
    record = run(engine, workload_of((5, LOOK_EVERY + 1)))
    stored = 5 + LOOK_EVERY  # the last token has no KV
    assert record.looks[1] == CacheUse(allocated=20, empty=20 - stored, steady=True)


def test_preemptions_of_earlier_runs_are_not_counted() -> None:
    engine, _ = scripted(num_blocks=6)
    record = run(engine, workload_of((8, 12), (8, 12)))
    assert record.preemptions == engine.load().preemptions_total > 0
    assert run(engine, workload_of((4, 2)), salt="again-").preemptions == 0


def test_tokens_from_the_host_tier_are_counted_apart_from_cached_tokens() -> None:
    engine = build_sim(SimSettings(num_blocks=4, host_kv_memory=1 << 20))
    workload, other = workload_of((40, 3)), workload_of((3, 3), (60, 3))
    run(engine, workload)
    run(engine, other, salt="other-")  # evicts every block
    again = run(engine, workload)
    assert (again.cached_tokens, again.host_tokens) == (0, 32)


def test_a_run_with_another_salt_finds_the_prefix_cache_cold() -> None:
    engine = build_sim(SimSettings(num_blocks=64))
    workload = workload_of((40, 3))
    assert run(engine, workload).cached_tokens == 0
    assert run(engine, workload).cached_tokens == 32
    assert run(engine, workload, salt="other-").cached_tokens == 0


def test_after_a_refused_request_nothing_is_running() -> None:
    engine, _ = scripted()
    with pytest.raises(PromptTooLong):
        drive(engine, workload_of((5, 4), (90, 4)).requests(0), clock=ticks())
    engine.check_integrity()
    assert engine.load().running == engine.load().waiting == 0


def test_percentiles_are_interpolated_between_the_nearest_values() -> None:
    report = spread([4.0, 1.0, 3.0, 2.0])
    assert report.mean == 2.5
    assert report.percentiles["50"] == 2.5
    assert report.percentiles["99"] == pytest.approx(3.97)
    assert spread([]).percentiles["50"] == 0.0
    assert spread([7.0]) == Spread(7.0, dict.fromkeys(report.percentiles, 7.0))


def test_waste_is_weighted_by_allocated_tokens() -> None:
    samples = [CacheUse(100, 10, steady=True), CacheUse(300, 0, steady=True)]
    assert waste_of(samples) == 0.025
    assert waste_of([]) is None


def test_throughput_figures_follow_from_the_record() -> None:
    engine, _ = scripted()
    workload = workload_of((5, 3), (6, 5))
    record = run(engine, workload)  # one prefill step and four decode steps, one second each
    setting = setting_of(engine, workload, LatencyOptions())
    report = throughput_of(record, workload, setting)
    assert (report.num_requests, report.prompt_tokens, report.output_tokens) == (2, 11, 8)
    assert (report.elapsed_time, report.steps, report.sampling_steps) == (5.0, 5, 5)
    assert report.tokens_per_second == 19 / 5
    assert report.output_tokens_per_second == 8 / 5
    assert report.ttft_ms.mean == report.itl_ms.mean == report.prompt_step_ms.mean == 1000.0
    assert report.latency_ms.mean == 4000.0
    assert report.kv_waste.run == 5 / 16
    text = throughput_text(report)
    assert "Throughput: 0.40 requests/s, 3.80 total tokens/s, 1.60 output tokens/s" in text
    assert "KV waste - while only generating, 31.25% over the run" in text


def test_latency_figures_follow_from_the_batches() -> None:
    engine, _ = scripted()
    workload = workload_of((5, 3), (6, 3))
    records = [run(engine, workload, salt=f"{number}-") for number in range(2)]
    setting = setting_of(engine, workload, LatencyOptions())
    report = latency_of(records, workload, setting)
    assert (report.avg_latency, report.latencies, report.batch_size) == (3.0, (3.0, 3.0), 2)
    assert report.output_tokens_per_second == 2.0
    assert "Avg latency: 3.0 seconds" in latency_text(report)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_erases_itself_on_a_terminal() -> None:
    screen = Terminal()
    with ProgressBar(screen, 200, ticks()) as bar:
        bar.add(50)
    assert screen.getvalue() == (
        "\r[#######.......................]  25%  50 output tokens/s  3 s left\x1b[K\r\x1b[K"
    )


def test_the_progress_bar_writes_nothing_to_a_pipe() -> None:
    pipe = io.StringIO()
    with ProgressBar(pipe, 200, ticks()) as bar:
        bar.add(50)
    assert pipe.getvalue() == ""
