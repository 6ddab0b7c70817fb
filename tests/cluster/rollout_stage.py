"""A pool whose nodes are made up, for an operator that rolls it out.

In: what a test says of pods and nodes, revision by revision, as kubelets and nodes would. Out: what
the operator made of it. See `drain_stage`, of whose parts it is made.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from baton_kvstore.endpoint import with_login
from baton_kvstore.registry import LONGEST_TTL_S, Registry
from baton_protocol.ids import Fingerprint
from baton_protocol.store import NodeLoad, NodeState, Role
from tests.cluster.drain_stage import Stage
from tests.cluster.operators import Body, until
from tests.operator.test_operator_index import PASSWORD
from tests.support.nodes.fake_node import make_report

ROLES: tuple[Role, ...] = ("prefill", "decode")
SAME, OTHER = Fingerprint("5" * 32), Fingerprint("0" * 32)


class RolloutStage(Stage):
    """One prefill node and some decode nodes, all ready and without requests."""

    def start(self, nodes: int = 1, **spec: Any) -> str:
        """With so many decode nodes; returns the first revision."""
        self._more = spec
        self.begin(nodes)
        first = self.revision()
        self.serve(first)
        return first

    def spec(self, decode: int) -> Body:
        own = super().spec(decode)
        roles = {role: own.get(role, {}) | self._more.get(role, {}) for role in ROLES}
        return own | self._more | roles

    def revision(self) -> str:
        found: str = self.pool.body()["status"]["revision"]
        return found

    def roll(self, **spec: Any) -> str:
        """Edit the spec such that other pods are wanted; returns the new revision, once it is
        made."""
        old = self.revision()
        self.pool.patch(spec or {"engine": {"blockSize": 32}})
        until(lambda: self.revision() != old, "another revision")
        new = self.revision()
        until(lambda: len(self.deployments(new)) == 2, "its Deployments")
        return new

    def deployments(self, revision: str) -> dict[str, int]:
        """Replicas by role."""
        return {
            one["metadata"]["labels"]["baton.dev/component"]: one["spec"]["replicas"]
            for one in self.pool.children().values()
            if one["kind"] == "Deployment"
            and one["metadata"]["labels"].get("baton.dev/revision") == revision
        }

    def made(self, revision: str, role: Role, count: int = 1) -> list[str]:
        """Its pods, when there are as many."""
        until(lambda: len(self.of(revision, role)) == count, f"{count} {role} pods of {revision}")
        return self.of(revision, role)

    def of(self, revision: str, *roles: Role) -> list[str]:
        """Names of these pods, without those that end."""
        words = ("-l", f"baton.dev/revision={revision}", "-o", "json")
        listed = json.loads(self.pool.kubectl("get", "pods", *words))["items"]
        return sorted(
            one["metadata"]["name"]
            for one in listed
            if "deletionTimestamp" not in one["metadata"]
            and one["metadata"]["labels"]["baton.dev/component"] in (roles or ROLES)
        )

    def serve(self, revision: str, *roles: Role, fingerprint: Fingerprint = SAME) -> None:
        """All pods that there are of these roles get ready, and their nodes report."""
        for pod in self.of(revision, *roles):
            self.say(pod, fingerprint=fingerprint)
            self.kubelet(pod)

    def say(
        self,
        node: str,
        requests: int = 0,
        state: NodeState = "ready",
        fingerprint: Fingerprint = SAME,
    ) -> None:
        """What the node reports from now on, of whatever role and revision it is."""
        labels = json.loads(self.pool.kubectl("get", "pod", node, "-o", "json"))["metadata"][
            "labels"
        ]
        report = make_report(
            node,
            labels["baton.dev/component"],
            revision=labels["baton.dev/revision"],
            fingerprint=fingerprint,
            load=NodeLoad(requests=requests),
            state=state,
        )

        async def register() -> None:
            url = with_login(self._index_url, "", PASSWORD)
            async with Registry(url, f"{self.pool.namespace}.{self.pool.name}") as registry:
                await registry.register(report, LONGEST_TTL_S)

        asyncio.run(register())

    def words(self, node: str) -> Body:
        """With which it was told last to drain."""
        found = [one.words for one in self.router.told if (one.act, one.node) == ("drain", node)]
        return found[-1] if found else {}

    def drained(self, *nodes: str) -> None:
        """Wait until these are told to drain, and let them have done so."""
        until(lambda: all(self.words(node) for node in nodes), "the drains")
        for node in nodes:
            self.say(node, state="draining")

    def blocked(self) -> tuple[str, str]:
        found = self.pool.condition("RolloutBlocked")
        return found.get("status", ""), found.get("reason", "")

    def is_over(self, old: str) -> bool:
        return not self.deployments(old) and self.blocked() == ("False", "NotRolling")
