"""Searches the largest step limits with which an engine still meets its users' goals.

In: limits to try, and a function that measures a point. Out: the measured points, the best ones, a
table and a chart; a file of finished points, from which a sweep goes on.

A point is a pair of --max-num-seqs and --max-batched-tokens, loaded by as many requests at once as
sequences. It meets the goals if enough requests are good (see serve_metrics.is_good). With more
sequences each step is slower, so for each number of tokens the search halves the range of
sequences. It does not assume anything of the number of tokens: small ones delay first tokens, large
ones the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from baton_cli.bench.metrics import percentile
from baton_cli.bench.serve_metrics import is_good, samples
from baton_cli.bench.stream import RequestOutcome
from baton_cli.bench.svg_chart import Spot, line_chart
from baton_cli.errors import CommandError, UsageError

METRICS = ("ttft", "tpot", "itl", "e2el")
QUANTILE = 99
TOKEN_CHOICES = 4  # sizes of a step that are tried by default, each half of the one before


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A measured pair of limits. `p99_ms` has the METRICS that have samples."""

    seqs: int
    tokens: int
    requests: int
    good: int
    seconds: float
    output_tokens: int
    preemptions: int
    p99_ms: dict[str, float]

    def meets(self, share: float) -> bool:
        return self.good >= share * self.requests

    @property
    def speed(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def goodput(self) -> float:
        return self.good / self.seconds


class _Header(msgspec.Struct, frozen=True):
    setting: dict[str, Any]


Measure = Callable[[int, int], Point]


def point_of(
    seqs: int,
    tokens: int,
    outcomes: Sequence[RequestOutcome],
    seconds: float,
    *,
    goals: Mapping[str, float],
    preemptions: int,
) -> Point:
    values = {name: sorted(samples(outcomes, name)) for name in METRICS}
    return Point(
        seqs=seqs,
        tokens=tokens,
        requests=len(outcomes),
        good=sum(is_good(outcome, goals) for outcome in outcomes),
        seconds=seconds,
        output_tokens=sum(outcome.output_tokens for outcome in outcomes),
        preemptions=preemptions,
        p99_ms={name: percentile(each, QUANTILE) for name, each in values.items() if each},
    )


def limits(words: Sequence[str], flag: str, most: int) -> tuple[int, ...]:
    """The limits that a flag names, ascending; raise UsageError for one that the engine does not
    allow."""
    numbers = sorted({int(word) if word.isdecimal() else 0 for word in words})
    if numbers and not 1 <= numbers[0] <= numbers[-1] <= most:
        raise UsageError(f"{flag} {','.join(words)}: give numbers from 1 to {most}")
    return tuple(numbers)


def doubling(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most`."""
    return (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most)


def halving(most: int) -> tuple[int, ...]:
    """`most`, half of it, ..., ascending."""
    return tuple(sorted({max(1, most >> power) for power in range(TOKEN_CHOICES)}))


def search(
    seqs: Sequence[int], tokens: Sequence[int], measure: Measure, share: float
) -> list[Point]:
    """Measure the points that are needed to find, for each number of tokens, the largest number of
    sequences that meets the goals. A step has at least a token per sequence."""
    points = []
    for most_tokens in tokens:
        able = [each for each in seqs if each <= most_tokens]
        low, high = 0, len(able)  # able[:low] meet the goals, able[high:] do not
        while low < high:
            middle = (low + high) // 2
            point = measure(able[middle], most_tokens)
            points.append(point)
            low, high = (middle + 1, high) if point.meets(share) else (low, middle)
    return points


def largest(points: Sequence[Point], share: float) -> Point | None:
    """The point with the most sequences, and then tokens, among those that meet the goals."""
    good = [point for point in points if point.meets(share)]
    return max(good, key=lambda point: (point.seqs, point.tokens), default=None)


def fastest(points: Sequence[Point], share: float) -> Point | None:
    """The point with the most output tokens per second among those that meet the goals."""
    good = [point for point in points if point.meets(share)]
    return max(good, key=lambda point: point.speed, default=None)


class Results:
    """The file of finished points: a line with the sweep's setting, and a line per point. Without
    a path, it is empty and keeps nothing. Raises CommandError for a file of another setting."""

    def __init__(self, path: Path | None, setting: Mapping[str, Any]) -> None:
        self._path = path
        self._points: dict[tuple[int, int], Point] = {}
        try:
            if path is not None and path.exists() and path.stat().st_size:
                self._read(path, setting)
            elif path is not None:
                path.write_bytes(msgspec.json.encode(_Header(dict(setting))) + b"\n")
        except OSError as error:
            raise CommandError(f"--results {path}: {error}") from error

    def _read(self, path: Path, setting: Mapping[str, Any]) -> None:
        first, *lines = path.read_bytes().splitlines()
        try:
            header = msgspec.json.decode(first, type=_Header)
        except msgspec.DecodeError as error:
            raise CommandError(f"--results {path}: not a sweep's results ({error})") from error
        if header.setting != msgspec.to_builtins(dict(setting)):
            changed = [name for name in setting if header.setting.get(name) != setting[name]]
            raise CommandError(
                f"--results {path} is of another sweep ({', '.join(changed)} differ); name another"
                " file"
            )
        whole = []
        for line in lines:
            try:
                point = msgspec.json.decode(line, type=Point)
            except msgspec.DecodeError:  # the sweep ended while it wrote its last line
                continue
            self._points[point.seqs, point.tokens] = point
            whole.append(line)
        path.write_bytes(b"".join(line + b"\n" for line in (first, *whole)))

    def __len__(self) -> int:
        return len(self._points)

    def measured(self, measure: Measure) -> Measure:
        """`measure`, which asks the file first and adds what it does not have."""

        def found(seqs: int, tokens: int) -> Point:
            point = self._points.get((seqs, tokens))
            if point is None:
                point = self._points[seqs, tokens] = measure(seqs, tokens)
                if self._path is not None:
                    with self._path.open("ab") as file:
                        file.write(msgspec.json.encode(point) + b"\n")
            return point

        return found


def table(points: Sequence[Point], share: float) -> str:
    heads = ["sequences", "tokens", "good", "meets", "tokens/s", "good/s"]
    rows = [[*heads, *(f"{name} p{QUANTILE}" for name in METRICS), "preempted"]]
    for point in sorted(points, key=lambda point: (point.tokens, point.seqs)):
        times = [f"{point.p99_ms[name]:.1f}" if name in point.p99_ms else "-" for name in METRICS]
        rows.append(
            [
                *(str(point.seqs), str(point.tokens), f"{point.good / point.requests:.1%}"),
                *("yes" if point.meets(share) else "no", f"{point.speed:.1f}"),
                *(f"{point.goodput:.2f}", *times, str(point.preemptions)),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def verdict(points: Sequence[Point], share: float) -> str:
    best, quick = largest(points, share), fastest(points, share)
    if best is None or quick is None:
        return f"no limits meet the goals for {share:.0%} of the requests"
    text = f"largest that meets the goals: {_flags(best)} ({best.speed:.1f} output tokens/s)"
    if quick is not best:
        text += f"\nfastest that meets the goals: {_flags(quick)} ({quick.speed:.1f})"
    return text


def chart(points: Sequence[Point], share: float, title: str) -> str:
    lines = {
        f"{tokens} tokens per step": [
            Spot(point.seqs, point.speed, point.meets(share))
            for point in sorted(points, key=lambda point: point.seqs)
            if point.tokens == tokens
        ]
        for tokens in sorted({point.tokens for point in points})
    }
    note = "filled: meets the goals"
    return line_chart(title, "--max-num-seqs, requests at once", "output tokens/s", lines, note)


def _flags(point: Point) -> str:
    return f"--max-num-seqs {point.seqs} --max-batched-tokens {point.tokens}"
