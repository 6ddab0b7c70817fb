"""A bench's output: a progress bar while it runs, and its figures at the end.

In: counts of tokens, and the figures. Out: one line that is redrawn on a terminal, and text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from baton_cli.bench.metrics import PERCENTILES, Latency, Setting, Spread, Throughput
from baton_cli.bench.roofline import DecodeFloor

REDRAW_S = 0.2
BAR_WIDTH = 30


class ProgressBar:
    """Redraws one line on `out` and erases it at the end; silent unless `out` is a terminal.
    `total` is in tokens."""

    def __init__(self, out: TextIO, total: int, clock: Callable[[], float]) -> None:
        self._out = out
        self._total = total
        self._clock = clock
        self._live = out.isatty()
        self._began = self._drawn = clock()
        self._done = 0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def add(self, tokens: int) -> None:
        self._done += tokens
        now = self._clock()
        if self._live and now - self._drawn >= REDRAW_S:
            self._drawn = now
            self._out.write("\r" + self.line(now) + "\x1b[K")
            self._out.flush()

    def line(self, now: float) -> str:
        share = self._done / self._total
        speed = self._done / max(1e-9, now - self._began)
        left = (self._total - self._done) / speed if speed else 0.0
        bar = ("#" * int(share * BAR_WIDTH)).ljust(BAR_WIDTH, ".")
        return f"[{bar}] {share:4.0%}  {speed:,.0f} output tokens/s  {left:.0f} s left"


def throughput_text(figures: Throughput) -> str:
    waste = figures.kv_waste
    return "\n".join(
        [
            *_setting_lines(figures.setting),
            f"{figures.num_requests:,} requests, {figures.prompt_tokens:,} prompt tokens"
            f" ({figures.cached_prompt_tokens:,} cached, {figures.host_prompt_tokens:,} from the"
            f" host tier), {figures.output_tokens:,} output tokens in {figures.elapsed_time:.2f} s",
            f"Throughput: {figures.requests_per_second:.2f} requests/s,"
            f" {figures.tokens_per_second:.2f} total tokens/s,"
            f" {figures.output_tokens_per_second:.2f} output tokens/s",
            f"{figures.steps:,} steps, {figures.preemptions:,} preemptions; KV waste"
            f" {_percent(waste.steady)} while only generating, {_percent(waste.run)} over the run",
            *_static_lines(figures),
            *_draft_lines(figures),
            *_floor_lines(figures.floor),
            _heading(),
            _row("first token", figures.ttft_ms),
            _row("between tokens", figures.itl_ms),
            _row("whole request", figures.latency_ms),
            _row("step with prompts", figures.prompt_step_ms),
            _row("step without", figures.decode_step_ms),
        ]
    )


def _draft_lines(figures: Throughput) -> list[str]:
    """Nothing if no step had drafts."""
    tokens = figures.tokens_per_drafted_row
    if tokens is None:
        return []
    accepted, drafted = figures.accepted_drafts, figures.drafted_tokens
    return [
        f"{accepted:,} of {drafted:,} drafts right ({accepted / drafted:.0%}); a sequence got"
        f" {tokens:.2f} tokens of a step with drafts"
    ]


def _static_lines(figures: Throughput) -> list[str]:
    """Nothing if static batches would do as well."""
    static = figures.static
    if static.useful_share == 1:
        return []
    return [
        f"Static batches of {static.size} would sample in {static.sampling_steps:,} steps instead"
        f" of {figures.sampling_steps:,}, with {static.useful_share:.1%} of their slots in use"
    ]


def _floor_lines(floor: DecodeFloor | None) -> list[str]:
    if floor is None:
        return []
    balance = ""
    if floor.balance_rows is not None and floor.operations_per_s is not None:
        balance = (
            f" and computes {floor.operations_per_s / 1e9:,.0f} GFLOP/s: products bound steps of"
            f" {floor.balance_rows:,.0f} sequences or more"
        )
    return [
        f"Roofline: this machine reads {floor.read_bytes_per_s / 1e9:,.1f} GB/s{balance}",
        f"A step of {floor.rows:.1f} sequences reads {floor.weight_bytes / 1e9:.3f} GB of weights"
        f" and {floor.kv_bytes / 1e9:.3f} GB of KV, in {floor.floor_ms:.2f} ms or more; it took"
        f" {floor.step_ms:.2f} ms: {floor.share:.0%} of the byte floor's speed",
    ]


def latency_text(figures: Latency) -> str:
    count = len(figures.latencies)
    batches = Spread(
        1e3 * figures.avg_latency,
        {percent: 1e3 * value for percent, value in figures.percentiles.items()},
    )
    return "\n".join(
        [
            *_setting_lines(figures.setting),
            f"{count} batches of {figures.batch_size},"
            f" {figures.output_tokens_per_second:,.1f} output tokens/s",
            f"Avg latency: {figures.avg_latency} seconds",
            *_floor_lines(figures.floor),
            _heading(),
            _row("batch", batches),
            _row("first token", figures.ttft_ms),
            _row("between tokens", figures.itl_ms),
        ]
    )


def _setting_lines(setting: Setting) -> list[str]:
    notes = {
        ", random weights": setting.load_format == "dummy",
        ", steps overlap": setting.overlap,
        ", no graphs": setting.enforce_eager,
    }
    noted = "".join(note for note, holds in notes.items() if holds)
    return [
        f"{setting.workload} on {setting.model} ({setting.engine}, {setting.dtype},"
        f" {setting.device}{noted})",
        f"{setting.kv_blocks:,} KV blocks of {setting.block_size} tokens; a step computes at most"
        f" {setting.max_batched_tokens:,} tokens of {setting.max_num_seqs} sequences",
    ]


def _heading() -> str:
    return f"{'ms':18}{'mean':>10}" + "".join(f"{f'p{percent}':>10}" for percent in PERCENTILES)


def _row(name: str, values: Spread) -> str:
    cells = (values.mean, *values.percentiles.values())
    return f"{name:18}" + "".join(f"{cell:10.2f}" for cell in cells)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"
