"""Condition Applied: did the API server accept all objects of the pool?"""

from __future__ import annotations

from baton_operator.state.observed import Refusal
from baton_operator.status import conditions as c
from baton_operator.status.view import Finding, View

_REFUSED = {403: c.APPLY_FORBIDDEN, 404: c.KIND_MISSING}


def applied_finding(view: View) -> Finding:
    if view.pool is None:
        return Finding(c.NOTHING_APPLIED)
    if view.pool.spec.paused:
        return Finding(
            c.PAUSED, "spec.paused is true: the operator applies nothing until it is false"
        )
    if not view.observed.refusals:
        return Finding(c.AS_SPECIFIED)
    refusals = sorted(view.observed.refusals, key=lambda refusal: refusal.child)
    more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    reason = _REFUSED.get(refusals[0].code, c.APPLY_REFUSED)
    return Finding(reason, refusal_words(refusals[0]) + more)


def refusal_words(refusal: Refusal) -> str:
    """The refusal for people. A Secret's message is hidden: it may quote the Secret."""
    child = f"{refusal.child.kind} {refusal.child.name}"
    message = (
        "message hidden because it may contain secret data"
        if refusal.child.kind == "Secret" and not refusal.own_words
        else refusal.message
    )
    return f"{child}: {refusal.code}: {message}"
