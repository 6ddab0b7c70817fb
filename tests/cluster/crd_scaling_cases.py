"""Pools as users should not write them: how many nodes there shall be, and how they roll out.

In: nothing. Out: more of what `crd_cases` has.
"""

from __future__ import annotations

from typing import Any

from tests.cluster.crd_cases import SIM, Bad, Spec


def scaled(**autoscaling: Any) -> Spec:
    bounds = {"prefill": {"max": 4}, "decode": {"max": 4}}
    return SIM | {"autoscaling": {"mode": "auto", **bounds, **autoscaling}}


def scheduled(**schedule: Any) -> Spec:
    return scaled(schedules=[{"from": "08:00", "to": "18:00", **schedule}])


BAD_SCALING: tuple[Bad, ...] = (
    Bad("no such mode", scaled(mode="manual"), "autoscaling.mode", '"advise", "auto", "external"'),
    Bad("no mode", SIM | {"autoscaling": {}}, "autoscaling.mode", "Required value"),
    Bad("no such mode of a role", scaled(decode={"mode": "auto"}), "decode.mode", '"external"'),
    Bad("no most", scaled(decode={"min": 2}), "autoscaling.decode", "write decode.max, or decode"),
    Bad("no bounds", scaled(prefill=None), "autoscaling.prefill", "write prefill.max, or prefill"),
    Bad(
        "bounds that cross",
        scaled(prefill={"min": 5, "max": 4}),
        "autoscaling.prefill.min",
        "write a min that is at most max",
    ),
    Bad(
        "nobody to decode",
        scaled(decode={"min": 0, "max": 4}),
        "autoscaling.decode",
        "write at least 1",
    ),
    Bad(
        "no prefill nodes that requests wait for",
        scaled(prefill={"min": 0, "max": 4}) | {"missingRolePolicy": "queue"},
        "autoscaling.prefill",
        "write at least 1, or missingRolePolicy: aggregate",
    ),
    Bad("a wordy ratio", scaled(ratio={"max": "two"}), "ratio.max", "write a number as a text"),
    Bad("a ratio of none", scaled(ratio={"max": "0"}), "ratio.max", "write a number above it"),
    Bad("a ratio that crosses", scaled(ratio={"min": 3, "max": "2"}), "ratio.min", "at most max"),
    Bad("a step of none", scaled(scaleUp={"factor": "1"}), "scaleUp.factor", "above 1"),
    Bad(
        "a sleep that somebody else ends",
        scaled(decode={"mode": "external"}, scaleToZeroAfterSeconds=60),
        "autoscaling.scaleToZeroAfterSeconds",
        "leave it out, or write mode: auto",
    ),
    Bad("a short nap", scaled(scaleToZeroAfterSeconds=1), "scaleToZeroAfterSeconds", "equal to 10"),
    Bad("a fast store", scaled(storeReadPerSecond="fast"), "storeReadPerSecond", "quantity"),
    Bad("a time of day", scheduled(**{"from": "8am"}), "schedules[0].from", '"00:00" to "23:59"'),
    Bad("no such hour", scheduled(to="24:00"), "schedules[0].to", '"00:00" to "23:59"'),
    Bad("no such day", scheduled(days=["Monday"]), "schedules[0].days[0]", '"Mon"'),
    Bad(
        "an odd zone", scheduled(timeZone="here!"), "schedules[0].timeZone", "Europe/Berlin or UTC"
    ),
    Bad(
        "a schedule that crosses",
        scheduled(decode={"min": 3, "max": 2}),
        "schedules[0].decode.min",
        "write a min that is at most max",
    ),
    Bad("no surge", SIM | {"rollout": {"surge": 0}}, "spec.rollout.surge", "or equal to 1"),
    Bad(
        "no time to drain",
        SIM | {"rollout": {"maxDrainSeconds": 0}},
        "spec.rollout.maxDrainSeconds",
        "greater than or equal to 1",
    ),
    Bad("no GPUs", SIM | {"gpuBudget": 0}, "spec.gpuBudget", "greater than or equal to 1"),
    Bad("too many GPUs", SIM | {"gpuBudget": 100_001}, "spec.gpuBudget", "equal to 100000"),
)
