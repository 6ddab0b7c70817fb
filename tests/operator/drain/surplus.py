"""Nodes of a role that has too many, and their reports."""

from __future__ import annotations

from typing import Any

from baton_operator.state.observed import ObservedPod
from baton_protocol.store import NodeLoad, NodeReport
from tests.support.nodes.fake_node import make_report


def node(name: str, **changes: Any) -> ObservedPod:
    facts: dict[str, Any] = {"component": "decode", "revision": "1", "ready": True}
    return ObservedPod(name=name, terminating=False, **(facts | changes))


def load(name: str, running: int = 0, cached: int = 0, **changes: Any) -> NodeReport:
    facts: dict[str, Any] = {"load": NodeLoad(running=running, cached_blocks=cached)}
    return make_report(name, "decode", **(facts | changes))
