"""Condition SoleOperator: does another operator serve the pool's namespace?"""

from __future__ import annotations

from baton_operator.status import conditions as c
from baton_operator.status.view import Finding, View


def sole_operator_finding(view: View) -> Finding:
    operator = view.before.operator
    if operator is None or not operator.other:
        return Finding(c.ONE_OPERATOR, f"managed by {operator.name}" if operator else "")
    return Finding(c.OTHER_OPERATOR, held_words(operator.name, operator.other))


def held_words(holder: str, other: str) -> str:
    return (
        f"operator {holder} manages the pool; operator {other} serves its namespace too and leaves "
        "the pool alone"
    )
