"""Autoscalers on the same simulated pool: the requests that meet their targets, and the cost.

    python -m benchmarks.operator.autoscaling [--quick] [--seed 1] [--drop 0.0] [--load day]

Claim: with Baton's planner more requests meet their targets at fewer GPU-hours than with
autoscalers that watch each role's queue, and than with the best fixed split; the table shows where
that is not so. Loads: a day, a shift of the mix, a burst of ten times the load, and noise around a
constant. Everything runs in simulated time and depends on the seed alone. The planner has its
defaults, with no tuning per load.

The nodes are those of an 8B model in bfloat16, each on about a quarter of an H200: 8,000 prompt
tokens/s and 1.2 TB/s, so loads of a few requests per second need 2 to 20 nodes. A start takes 90 s,
plus or minus a quarter. Targets: 2 s to the first token, 50 ms between tokens (each request's
mean).

    hpa, kpa      with the usual targets; "best" with those that are best per load in hindsight
                  (requests per prefill node / per decode node)
    static        the fewest nodes that reach what the most would, chosen in hindsight
    same cost     the best fixed split with Baton's GPU-hours, up to whole nodes

A share --drop of all metric scrapes fails. The quick form has shorter loads, and rivals with their
usual targets only: a minute instead of three.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from baton_operator.autoscaling.planner.inputs import AutoscalingPolicy, Capability, ReplicaRange
from baton_protocol.store import ROLES
from benchmarks.support.autoscaling.baton_planner import Planned
from benchmarks.support.autoscaling.closed_loop import Course, Outcome, Targets
from benchmarks.support.autoscaling.contenders import (
    EQUAL,
    USUAL,
    Rival,
    best_split,
    in_hindsight,
    split_of,
)
from benchmarks.support.autoscaling.load_profiles import HOUR_S, Load, loads
from benchmarks.support.autoscaling.pool_observer import Sight
from benchmarks.support.autoscaling.reference_autoscalers import Hpa, Kpa
from benchmarks.support.figures import Verdict, exit_code

TRUTH = Capability(
    prefill_tokens=8000.0,
    step_base_s=0.014,  # 16 GB of weights
    step_per_seq_s=0.0001,
    step_per_kv_token_s=1.1e-7,  # 128 KiB
    kv_capacity=300_000,
    start_s=90.0,
)
MOST = 12  # nodes per role
RIVALS: Mapping[str, Rival] = {"hpa": Hpa, "kpa": Kpa}
REVERSALS = 2  # under a constant load: each role may come back once from its first guess


@dataclass(frozen=True)
class Row:
    name: str
    outcome: Outcome
    rival: bool = True  # what the claim compares with


def ours(course: Course) -> tuple[Row, str]:
    """And how often it gave which reason."""
    bounds = ReplicaRange(min_replicas=1, max_replicas=MOST)
    targets = course.targets
    planned = Planned(
        AutoscalingPolicy(
            ranges=dict.fromkeys(ROLES, bounds), ttft_s=targets.ttft_s, itl_s=targets.itl_s
        )
    )
    outcome = course.run(planned)
    reasons = ", ".join(f"{name} {count}" for name, count in planned.reasons.most_common())
    return Row("baton", outcome, rival=False), reasons


def rivals(course: Course, *, quick: bool) -> list[Row]:
    rows = []
    for name, rival in RIVALS.items():
        rows.append(Row(name, course.run(rival(USUAL, (1, MOST)))))
        if not quick:
            targets, outcome = in_hindsight(course, rival, (1, MOST))
            words = f"{name} best {targets['prefill']:g}/{targets['decode']:g}"
            rows.append(Row(words, outcome))
    counts, outcome = best_split(course, MOST)
    rows.append(Row(f"static {counts['prefill']}P {counts['decode']}D", outcome))
    return rows


def same_cost(course: Course, hours: float) -> Row:
    nodes = min(2 * MOST, max(2, math.ceil(hours * HOUR_S / course.load.length_s)))
    counts, outcome = split_of(course, nodes, MOST)
    return Row(f"same cost {counts['prefill']}P {counts['decode']}D", outcome, rival=False)


def compare(mine: Outcome, row: Row) -> Verdict:
    """Better on both, or where not."""
    more, dearer = mine.both - row.outcome.both, mine.gpu_hours / row.outcome.gpu_hours - 1.0
    attains = "the same" if abs(more) <= EQUAL else f"{100 * more:+.1f} points"
    met = more >= -EQUAL and dearer < 0.0
    result = "better" if met and more > EQUAL else "as good and cheaper" if met else "NOT both"
    text = f"{row.name:18} attainment {attains}, GPU-hours {100 * dearer:+.0f} %: {result}"
    return Verdict(met, text)


def print_table(rows: list[Row]) -> None:
    heads = ("both", "TTFT", "ITL", "GPU-h", "prefill", "decode", "actions", "reversals", "worst")
    print(f"  {'':18} " + " ".join(f"{head:>9}" for head in heads) + "  most nodes")
    for row in rows:
        one = row.outcome
        shares = " ".join(f"{100 * share:8.2f}%" for share in (one.both, one.ttft, one.itl))
        hours = " ".join(f"{one:9.2f}" for one in (one.gpu_hours, *one.by_role.values()))
        counts = (
            f"{one.actions:9d} {one.reversals:9d} {one.worst_ttft_s:8.1f}s {one.most_nodes:11d}"
        )
        print(f"  {row.name:18} {shares} {hours} {counts}")


def run(load: Load, arguments: argparse.Namespace) -> list[Verdict]:
    requests = load.requests(arguments.seed)
    sight = Sight(dropped=arguments.drop)
    course = Course(
        load=load,
        seed=arguments.seed,
        requests=requests,
        truth=TRUTH,
        targets=Targets(),
        sight=sight,
    )
    print(f"{load.name}: {load.what}; {len(requests)} requests in {load.length_s / HOUR_S:.2f} h")
    mine, reasons = ours(course)
    against = rivals(course, quick=arguments.quick)
    rows = [mine, *against]
    if not arguments.quick:
        rows.append(same_cost(course, mine.outcome.gpu_hours))
    print_table(rows)
    print(f"  reasons: {reasons}")
    verdicts = [compare(mine.outcome, row) for row in against]
    if load.name == "steady":
        found = mine.outcome.reversals
        verdict_text = "met" if found <= REVERSALS else "MISSED"
        verdicts.append(
            Verdict(
                found <= REVERSALS, f"reversals {found}, goal at most {REVERSALS} {verdict_text}"
            )
        )
    for verdict in verdicts:
        print(f"  {verdict.text}")
    print(flush=True)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="shorter loads, usual targets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drop", type=float, default=0.0, help="share of metric scrapes that fail")
    parser.add_argument("--load", help="run only this load")
    arguments = parser.parse_args()
    every = loads(quick=arguments.quick)
    chosen = [load for load in every if arguments.load in (None, load.name)]
    if not chosen:
        names = ", ".join(load.name for load in every)
        parser.error(f"--load {arguments.load!r} is unknown; use one of {names}")
    print(f"autoscaling, seed {arguments.seed}, bounds 1 to {MOST} nodes per role")
    verdicts = [verdict for load in chosen for verdict in run(load, arguments)]
    return exit_code(verdicts, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
