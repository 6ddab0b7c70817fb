"""Invalid pools with errors in autoscaling or roll-outs.

In: nothing. Out: `BAD_SCALING`, in the form of `BAD` in `crd_cases`.
"""

from __future__ import annotations

from typing import Any

from tests.cluster.crd_cases import SIM, Bad, Spec


def autoscaled_spec(**autoscaling: Any) -> Spec:
    bounds = {"prefill": {"max": 4}, "decode": {"max": 4}}
    return SIM | {"autoscaling": {"mode": "auto", **bounds, **autoscaling}}


def scheduled_spec(**schedule: Any) -> Spec:
    return autoscaled_spec(schedules=[{"from": "08:00", "to": "18:00", **schedule}])


BAD_SCALING: tuple[Bad, ...] = (
    Bad(
        "an unknown mode",
        autoscaled_spec(mode="manual"),
        "autoscaling.mode",
        '"advise", "auto", "external"',
    ),
    Bad("no mode", SIM | {"autoscaling": {}}, "autoscaling.mode", "Required value"),
    Bad(
        "an unknown mode of a role",
        autoscaled_spec(decode={"mode": "auto"}),
        "decode.mode",
        '"external"',
    ),
    Bad(
        "a role without a max",
        autoscaled_spec(decode={"min": 2}),
        "autoscaling.decode",
        "write decode.max, or decode",
    ),
    Bad(
        "a role without bounds",
        autoscaled_spec(prefill=None),
        "autoscaling.prefill",
        "write prefill.max, or prefill",
    ),
    Bad(
        "a min above its max",
        autoscaled_spec(prefill={"min": 5, "max": 4}),
        "autoscaling.prefill.min",
        "write a min that is at most max",
    ),
    Bad(
        "a decode min of 0",
        autoscaled_spec(decode={"min": 0, "max": 4}),
        "autoscaling.decode",
        "write at least 1",
    ),
    Bad(
        "policy queue with a prefill min of 0",
        autoscaled_spec(prefill={"min": 0, "max": 4}) | {"missingRolePolicy": "queue"},
        "autoscaling.prefill",
        "write at least 1, or missingRolePolicy: aggregate",
    ),
    Bad(
        "a ratio that is no number",
        autoscaled_spec(ratio={"max": "two"}),
        "ratio.max",
        "write a number as a text",
    ),
    Bad("a ratio of 0", autoscaled_spec(ratio={"max": "0"}), "ratio.max", "write a number above 0"),
    Bad(
        "a min ratio above the max",
        autoscaled_spec(ratio={"min": 3, "max": "2"}),
        "ratio.min",
        "at most max",
    ),
    Bad(
        "a scale-up factor of 1",
        autoscaled_spec(scaleUp={"factor": "1"}),
        "scaleUp.factor",
        "above 1",
    ),
    Bad(
        "scale to zero with an external role",
        autoscaled_spec(decode={"mode": "external"}, scaleToZeroAfterSeconds=60),
        "autoscaling.scaleToZeroAfterSeconds",
        "leave this field out, or write mode: auto",
    ),
    Bad(
        "sleep after the pool has no nodes any more",
        autoscaled_spec(sleepAfterSeconds=600, scaleToZeroAfterSeconds=600),
        "autoscaling.sleepAfterSeconds",
        "fewer seconds than scaleToZeroAfterSeconds",
    ),
    Bad("sleep at level 3", autoscaled_spec(sleepLevel=3), "sleepLevel", "equal to 2"),
    Bad(
        "scale to zero after 1 second",
        autoscaled_spec(scaleToZeroAfterSeconds=1),
        "scaleToZeroAfterSeconds",
        "equal to 10",
    ),
    Bad(
        "a store bandwidth that is no quantity",
        autoscaled_spec(storeReadPerSecond="fast"),
        "storeReadPerSecond",
        "quantity",
    ),
    Bad(
        "a 12-hour time",
        scheduled_spec(**{"from": "8am"}),
        "schedules[0].from",
        '"00:00" to "23:59"',
    ),
    Bad("hour 24", scheduled_spec(to="24:00"), "schedules[0].to", '"00:00" to "23:59"'),
    Bad("a long day name", scheduled_spec(days=["Monday"]), "schedules[0].days[0]", '"Mon"'),
    Bad(
        "an invalid time zone",
        scheduled_spec(timeZone="here!"),
        "schedules[0].timeZone",
        "Europe/Berlin or UTC",
    ),
    Bad(
        "a schedule's min above its max",
        scheduled_spec(decode={"min": 3, "max": 2}),
        "schedules[0].decode.min",
        "write a min that is at most max",
    ),
    Bad("a surge of 0", SIM | {"rollout": {"surge": 0}}, "spec.rollout.surge", "or equal to 1"),
    Bad(
        "a drain time of 0",
        SIM | {"rollout": {"maxDrainSeconds": 0}},
        "spec.rollout.maxDrainSeconds",
        "greater than or equal to 1",
    ),
    Bad(
        "a GPU budget of 0", SIM | {"gpuBudget": 0}, "spec.gpuBudget", "greater than or equal to 1"
    ),
    Bad(
        "a GPU budget above the limit",
        SIM | {"gpuBudget": 100_001},
        "spec.gpuBudget",
        "equal to 100000",
    ),
    Bad(
        "a min ratio that prefill.max cannot reach",
        autoscaled_spec(ratio={"min": "4"}, prefill={"max": 2}),
        "autoscaling.ratio.min",
        "prefill.max allows fewer prefill nodes than ratio.min times decode.min",
    ),
    Bad(
        "a min ratio that prefill.max cannot reach with decode.min nodes",
        autoscaled_spec(ratio={"min": "0.5"}, prefill={"max": 2}, decode={"min": 5, "max": 8}),
        "autoscaling.ratio.min",
        "write a smaller ratio.min or a larger prefill.max",
    ),
    Bad(
        "a max ratio that prefill.min exceeds",
        autoscaled_spec(ratio={"max": "0.5"}, prefill={"min": 3, "max": 8}),
        "autoscaling.ratio.max",
        "prefill.min is more than ratio.max times decode.max",
    ),
    Bad(
        "a max ratio that the default of prefill.min exceeds",
        autoscaled_spec(ratio={"max": "0.2"}, prefill={"max": 8}),
        "autoscaling.ratio.max",
        "write a smaller prefill.min",
    ),
    Bad(
        "a min ratio that prefill.max cannot reach in a window",
        autoscaled_spec(
            ratio={"min": 1},
            prefill={"max": 2},
            schedules=[{"from": "08:00", "to": "18:00", "decode": {"min": 3}}],
        ),
        "autoscaling.ratio.min",
        "decode.min of a window in schedules",
    ),
    Bad(
        "a max ratio that a window's prefill.min exceeds",
        autoscaled_spec(
            ratio={"max": "0.5"},
            schedules=[{"from": "08:00", "to": "18:00", "prefill": {"min": 3}}],
        ),
        "autoscaling.ratio.max",
        "write a smaller prefill.min of a window in schedules",
    ),
    *(
        Bad(
            f"a window's {role} {side} beyond the role's own bounds",
            autoscaled_spec(
                **{role: {"min": 3, "max": 4}},
                schedules=[
                    {"from": "08:00", "to": "18:00"},
                    {"from": "08:00", "to": "18:00", role: {side: count}},
                ],
            ),
            "autoscaling.schedules",
            f"a window's {role}.{side} is {words}",
        )
        for role in ("prefill", "decode")
        for side, count, words in (("min", 5, f"above {role}.max"), ("max", 2, f"below {role}.min"))
    ),
    *(
        Bad(f"a million: {field}", spec, field, "less than or equal to 10000")
        for field, spec in (
            ("spec.decode.replicas", SIM | {"decode": {"replicas": 1_000_000}}),
            ("spec.prefill.replicas", SIM | {"prefill": {"replicas": 10_001}}),
            ("autoscaling.decode.max", autoscaled_spec(decode={"max": 1_000_000})),
            ("autoscaling.prefill.max", autoscaled_spec(prefill={"max": 1_000_000})),
            ("spec.rollout.surge", SIM | {"rollout": {"surge": 1_000_000}}),
        )
    ),
    Bad(
        "a million routers",
        SIM | {"router": {"replicas": 1_000_000}},
        "spec.router.replicas",
        "less than or equal to 1000",
    ),
)
