"""CEL rules of `autoscaling` that compare several of its fields: bounds, ratio and schedules."""

from __future__ import annotations

from collections.abc import Iterator

from baton_operator.api.cel import CelRule
from baton_operator.api.decimals import number_cel
from baton_protocol.store import ROLES

# Ratios have three digits, so their products with counts differ by at least 0.001.
ROUNDING = "0.0001"
# CEL: the planner sets the counts of both roles, so their bounds and the ratio apply together.
_BOTH = " && ".join(
    ["self.mode != 'external'"]
    + [f"has(self.{role}) && !has(self.{role}.mode) && has(self.{role}.max)" for role in ROLES]
)


def _unless_both(claim: str, part: str) -> str:
    return f"!({_BOTH} && has(self.{part})) || ({claim})"


def _each_schedule(claim: str) -> str:
    return f"self.schedules.all(one, {claim})"


def ratio_rules() -> tuple[CelRule, ...]:
    """A ratio that no allowed numbers of nodes can have: it is the smallest with the most decode
    and the fewest prefill nodes. A role without prefill nodes has no ratio."""
    too_low = f"double(self.prefill.max) + {ROUNDING} >= {number_cel('ratio.min')} * double({{}})"
    too_high = f"double({{}}) <= {number_cel('ratio.max')} * double(self.decode.max) + {ROUNDING}"
    none = "self.prefill.max <= 0"
    least = (
        "prefill.max allows fewer prefill nodes than ratio.min times {}; "
        "write a smaller ratio.min or a larger prefill.max"
    )
    most = (
        "{0} is more than ratio.max times decode.max; write a smaller {0}, or a larger "
        "ratio.max or decode.max"
    )
    rows = (
        ("min", too_low, "self.decode.min", "decode.min", least),
        ("max", too_high, "self.prefill.min", "prefill.min", most),
    )
    rules = []
    for side, claim, own, name, message in rows:
        role = name.partition(".")[0]
        at = f".ratio.{side}"
        guard = f"!has(self.ratio.{side}) || {none} || "
        in_window = f"!has(one.{role}) || !has(one.{role}.min) || {claim.format(f'one.{role}.min')}"
        rules += [
            CelRule(
                _unless_both(guard + claim.format(own), "ratio"),
                message.format(name),
                field=at,
            ),
            CelRule(
                _unless_both(
                    f"{guard}!has(self.schedules) || {_each_schedule(in_window)}", "ratio"
                ),
                message.format(f"{name} of a window in schedules"),
                field=at,
            ),
        ]
    return tuple(rules)


def window_rules() -> Iterator[CelRule]:
    """A window's bound beyond the role's own one would have no effect."""
    rows = (
        (
            "min",
            "max",
            "<=",
            "is above {role}.max, so it cannot apply; write a smaller one, or a larger {role}.max",
        ),
        (
            "max",
            "min",
            ">=",
            "is below {role}.min, so it cannot apply; write a larger one, or a smaller {role}.min",
        ),
    )
    for role in ROLES:
        for side, other, relation, remedy in rows:
            bound = f"one.{role}.{side}"
            known = f"!has(one.{role}) || !has({bound})"
            claim = _each_schedule(f"{known} || {bound} {relation} self.{role}.{other}")
            applies = (
                f"self.mode != 'external' && has(self.schedules) && has(self.{role})"
                f" && !has(self.{role}.mode) && has(self.{role}.{other})"
            )
            yield CelRule(
                f"!({applies}) || {claim}",
                f"a window's {role}.{side} {remedy.format(role=role)}",
                field=".schedules",
            )
