"""`make gpu`: everything that needs a card, within a budget of time.

In: the table of parts and the options. Out: a Markdown line per part as soon as it ends, the whole
table at the end, and the results as files, which are written after each part. The exit status is 1
if a check failed or a part did not end.

The parts run one after the other. Each gets its share of the time that is left, in proportion to
what it needs, so a part that ends early leaves time to those behind it.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from benchmarks.gpu.parts import CARD, Part
from benchmarks.gpu.processes import INTERRUPTED, LEAST_S, Conditions, Outcome, run_part
from benchmarks.gpu.results import COMMITTED, HEAD, Results, now, part_row

BUDGET_S = 540.0
# Of each part, if there is no budget.
DRY_LIMIT_S = 900.0
UNKNOWN = "unknown card"
NOT_STARTED = "not started: no time was left"


def main(arguments: Sequence[str], parts: Sequence[Part]) -> int:
    options = parse_options(arguments, parts)
    if options.list:
        for part in parts:
            print(f"{part.name:12}{part.seconds:5.0f} s  {part.tells}")
        return 0
    budget = options.budget
    if budget is None:
        budget = math.inf if options.dry else BUDGET_S
    chosen = [part for part in parts if part.name in (options.parts or [part.name])]
    with _folder(options) as folder, tempfile.TemporaryDirectory() as work, _stopping():
        results = Results(card="dry" if options.dry else _card(), date=now())
        print(HEAD, flush=True)
        for outcome in run_all(chosen, Path(work), budget=budget, dry=options.dry):
            results = results.with_part(outcome)
            results.write(folder)
            _keep_log(Path(work) / f"{outcome.name}.log", folder / f"{results.file_name}.log")
            print(part_row(outcome), flush=True)
            if outcome.state == INTERRUPTED:
                break
        print(f"\n{results.table()}", flush=True)
        if not options.dry:
            print(f"written: {folder / results.file_name}.json, .md, .log")
    return 0 if results.passed else 1


def run_all(parts: Sequence[Part], folder: Path, *, budget: float, dry: bool) -> Iterator[Outcome]:
    """Run the parts; `folder` is for their files."""
    end = time.monotonic() + budget
    ceilings: dict[str, float] = {}
    for index, part in enumerate(parts):
        left = end - time.monotonic()
        if left < LEAST_S:
            yield Outcome(name=part.name, state=NOT_STARTED, seconds=0.0, findings=[])
            continue
        due = sum(each.seconds for each in parts[index:])
        given = Conditions(
            folder=folder,
            limit=DRY_LIMIT_S if left == math.inf else left * part.seconds / due,
            end=end,
            dry=dry,
            ceilings=ceilings,
        )
        outcome = run_part(part, given)
        if part.name == CARD:
            measured = [each for each in outcome.findings if each.value is not None]
            ceilings = {each.name: each.value for each in measured if each.value is not None}
        yield outcome


def _card() -> str:
    """The name of the first card, until the part `card` says which one is used."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return UNKNOWN
    return (done.stdout.splitlines() or [UNKNOWN])[0].strip()


@contextmanager
def _folder(options: argparse.Namespace) -> Iterator[Path]:
    """Where results go; those of a dry run tell nothing, and are removed."""
    if options.out is not None or not options.dry:
        yield options.out or COMMITTED
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _keep_log(log: Path, into: Path) -> None:
    """Append what a part printed to the log of the run."""
    if log.exists():
        with log.open("rb") as source, into.open("ab") as target:
            target.write(f"== {log.stem}\n".encode())
            shutil.copyfileobj(source, target)


@contextmanager
def _stopping() -> Iterator[None]:
    """Let SIGTERM do what ctrl-C does: end the running part, and write what was found."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def parse_options(arguments: Sequence[str], parts: Sequence[Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help=f"default {BUDGET_S:.0f}; of a dry run none",
    )
    parser.add_argument(
        "--dry", action="store_true", help="the same code without a card, with tiny shapes"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"default {COMMITTED}")
    parser.add_argument(
        "--parts", nargs="+", choices=[part.name for part in parts], help="default: all"
    )
    parser.add_argument("--list", action="store_true", help="list the parts")
    return parser.parse_args(arguments)
