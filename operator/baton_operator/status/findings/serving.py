"""Condition Serving: do clients get answers?"""

from __future__ import annotations

from baton_operator.status import conditions as c
from baton_operator.status.view import Finding, View
from baton_protocol.store import ROLES


def serving_finding(view: View) -> Finding:
    """With an invalid spec the policy is unknown; then a ready router and node suffice."""
    spec = view.pool.spec if view.pool else None
    ready = {name: view.ready(name) for name in ROLES}
    if not any(ready.values()):
        return _without_nodes(view)
    if spec is not None and spec.missing_role_policy != "aggregate":
        effects = {"queue": "new requests wait", "fail": "new requests fail"}
        effect = effects[spec.missing_role_policy]
        if not ready["decode"]:
            return Finding(c.NO_DECODE_NODE, effect)
        if not ready["prefill"] and spec.handoff != "never":
            return Finding(c.NO_PREFILL_NODE, f"{effect} if their prompts need a hand-off")
    if not view.ready("router"):
        return Finding(c.NO_ROUTER)
    return Finding(c.NODES_ASLEEP if view.nodes_sleep else c.ANSWERING)


def _without_nodes(view: View) -> Finding:
    if not view.scales_to_zero:
        return Finding(c.NO_NODE)
    if not view.ready("router"):
        return Finding(c.NO_ROUTER)
    return Finding(c.ASLEEP if view.is_at_zero else c.WAKING)
