"""`kubectl baton why`: a pool's status in sentences."""

from __future__ import annotations

from typing import Any

import pytest

from baton_cli.errors import CommandError
from baton_cli.kubectl.why_text import why_lines

METADATA = {"name": "demo", "namespace": "models", "generation": 3}
SINCE = "2026-11-29T12:00:00Z"
UNSCHEDULABLE = {
    "type": "DecodeReady",
    "status": "False",
    "reason": "Unschedulable",
    "message": "1 of 2 decode nodes is ready: 0/3 nodes are available: Insufficient nvidia.com/gpu",
    "lastTransitionTime": SINCE,
}
PLANNED = {
    "mode": "advise",
    "desiredPrefill": 1,
    "desiredDecode": 4,
    "reason": "TargetUnreachable",
    "message": "decode: 4 nodes, ITL 80 ms at 1 request",
    "since": SINCE,
    "time": SINCE,
}


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, str]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message or reason,
        "lastTransitionTime": SINCE,
    }


def pool(*conditions: dict[str, str], **status: Any) -> dict[str, Any]:
    parts = {"observedGeneration": 3, "conditions": list(conditions), **status}
    return {"metadata": METADATA, "status": parts}


def test_a_pool_that_lacks_a_node_says_what_is_missing_and_what_to_do() -> None:
    body = pool(
        condition("Ready", "False", "Unschedulable"),
        condition("Valid", "True", "SpecValid"),
        UNSCHEDULABLE,
        condition("Scaled", "False", "Draining", "decode-1 drains"),
        prefill={"summary": "1/1"},
        decode={"summary": "1/2"},
        router={"summary": "1/1"},
        model={"name": "qwen"},
        autoscaling=PLANNED,
        operator={"name": "baton/baton-operator", "time": SINCE},
    )
    assert why_lines(body) == [
        "pool demo in namespace models is not ready",
        "  ready pods: prefill 1/1, decode 1/2, router 1/1",
        "  model: qwen",
        f"  problem: DecodeReady is False since {SINCE}: Unschedulable",
        f"    {UNSCHEDULABLE['message']}",
        "    meaning: no cluster node has room for a pod; the message is the scheduler's",
        "    what to do: add cluster nodes (GPUs), or request less in `resources`",
        f"  waits: Scaled is False since {SINCE}: Draining",
        "    decode-1 drains",
        "    meaning: surplus nodes drain: they take no new requests, finish or hand over those"
        " they have, and end; the message names them and the reason",
        "    what to do: wait",
        "  nothing to do: Valid",
        "  planner (advice only: nothing is scaled): 1 prefill and 4 decode nodes since"
        f" {SINCE}: TargetUnreachable",
        "    decode: 4 nodes, ITL 80 ms at 1 request",
        "    meaning: a single request on a node misses a target, so more nodes only shorten the"
        " queue",
        "    what to do: raise the target, use faster GPUs, or send shorter prompts",
        f"  operator: baton/baton-operator looked at {SINCE}",
    ]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (pool(condition("Ready", "True", "AllReady")), "pool demo in namespace models is ready"),
        (
            {"metadata": METADATA},
            "pool demo in namespace models: no operator has looked at it yet; check that Baton's"
            " operator runs",
        ),
        (
            pool(condition("Ready", "True", "AllReady"), observedGeneration=2),
            "  the operator has not seen the newest spec yet",
        ),
        # True, and yet a problem.
        (
            pool(condition("RolloutBlocked", "True", "GpuBudgetTooSmall")),
            f"  problem: RolloutBlocked is True since {SINCE}: GpuBudgetTooSmall",
        ),
        # Of a newer operator.
        (
            pool(condition("Cooled", "False", "TooHot", "the rack is at 90 degrees")),
            f"  problem: Cooled is False since {SINCE}: TooHot",
        ),
        (pool(condition("Cooled", "True", "Cool")), "  nothing to do: Cooled"),
        (
            pool(condition("Applied", "False", "ApplyRefused", "\x1b[2J")),
            r"    \x1b[2J",
        ),
    ],
)
def test_a_status_is_explained(body: dict[str, Any], line: str) -> None:
    assert line in why_lines(body)


def test_a_status_of_another_form_is_an_error() -> None:
    with pytest.raises(CommandError, match="the pool's status cannot be read"):
        why_lines(pool(prefill={"summary": 7}))
