"""What a user may write in `spec`; every field has an effect.

Keys are camelCase in YAML, snake_case here. `crd` generates the CRD from these records, including
defaults and descriptions. A check beyond the type is a `CelRule` of a value or of a record, and the
API server enforces it. `__post_init__` repeats only the checks without which the builders would
fail, because a pool may have been stored before its rule existed.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from baton_operator.api.autoscaling import AutoscalingSpec
from baton_operator.api.cel import CelRule, given
from baton_operator.api.fields import MOST_NODES
from baton_operator.api.model import ModelSpec
from baton_operator.api.network_policy import NetworkPolicySpec
from baton_operator.api.nodes import EngineSpec, RoleSpec
from baton_operator.api.record import Record
from baton_operator.api.router import RouterSpec
from baton_operator.api.store import KVStoreSpec
from baton_protocol.model_source import name_of_path
from baton_protocol.policies import Handoff, MissingRole
from baton_protocol.store import Role


class RolloutSpec(Record, frozen=True, kw_only=True):
    """How nodes of a new revision replace those of an old one."""

    max_drain_seconds: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Seconds for which an old node's requests may continue if no new"
                " node can take them over because their KV is not interchangeable. Default: the"
                " routers' --request-timeout, 600.",
            ),
        ]
        | None
    ) = None
    surge: Annotated[
        int,
        Meta(
            ge=1,
            le=MOST_NODES,
            description="Number of nodes by which a role may exceed its number in a roll-out.",
        ),
    ] = 1


class PoolSpec(Record, frozen=True, kw_only=True):
    """A pool: model, nodes, routers and KV store."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            f"self.engine.kind != 'torch' || {given('model.path')} || {given('model.uri')}",
            "names no model; write path or uri, or engine.kind: sim",
            field=".model",
        ),
        CelRule(
            # Each number's own bounds refuse a negative one.
            "self.prefill.replicas != 0 || self.decode.replicas != 0",
            "decode.replicas and prefill.replicas are 0, so no node can answer; write "
            "at least 1 in one of them",
            field=".decode.replicas",
        ),
        CelRule(
            "self.missingRolePolicy == 'aggregate' || (self.decode.replicas != 0"
            " && (self.handoff == 'never' || self.prefill.replicas != 0))",
            "a role that requests need has 0 replicas, so they would wait or fail forever; "
            "write aggregate, or at least 1 in decode.replicas and, without handoff: never, in "
            "prefill.replicas",
            field=".missingRolePolicy",
        ),
        CelRule(
            "self.missingRolePolicy == 'aggregate' || self.handoff == 'never'"
            " || !has(self.autoscaling) || !has(self.autoscaling.prefill)"
            " || self.autoscaling.prefill.min != 0",
            "0 prefill nodes could let requests wait or fail forever under this "
            "missingRolePolicy; write at least 1, or missingRolePolicy: aggregate",
            field=".autoscaling.prefill",
        ),
        CelRule(
            "self.kvStore.sharing == 'pool' || has(self.router.apiKeysSecret)",
            "needs API keys to tell tenants apart; write router.apiKeysSecret, or sharing: pool",
            field=".kvStore.sharing",
        ),
    )

    model: ModelSpec = ModelSpec()
    engine: EngineSpec = EngineSpec()
    prefill: Annotated[
        RoleSpec, Meta(description="Nodes that compute prompts for decode nodes.")
    ] = RoleSpec()
    decode: Annotated[RoleSpec, Meta(description="Nodes that generate answers.")] = RoleSpec()
    router: RouterSpec = RouterSpec()
    kv_store: KVStoreSpec = KVStoreSpec()
    autoscaling: Annotated[
        AutoscalingSpec | None,
        Meta(description="Who sets the number of nodes. Default: the roles' `replicas`."),
    ] = None
    handoff: Annotated[
        Handoff,
        Meta(
            description="When a prefill node computes a decode node's prompt. auto: if the "
            "hand-off costs little time. always, never: regardless of the time."
        ),
    ] = "auto"
    missing_role_policy: Annotated[
        MissingRole,
        Meta(
            description="What happens to new requests while a role has no ready node."
            " aggregate: the other role does its work. queue: they wait for a node. fail: they"
            " fail."
        ),
    ] = "aggregate"
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    rollout: RolloutSpec = RolloutSpec()
    gpu_budget: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=100_000,
                description="Maximum number of GPUs that all nodes hold together, also in"
                " roll-outs: the GPUs among a node's limits, times the number of nodes. Default:"
                " no maximum.",
            ),
        ]
        | None
    ) = None
    paused: Annotated[
        bool, Meta(description="While true, the operator changes none of the pool's objects.")
    ] = False

    def __post_init__(self) -> None:
        if self.engine.kind == "torch" and not self.model.path and not self.model.uri:
            raise ValueError("model: names no model; write path or uri, or engine.kind: sim")

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        source = self.model.source
        last = source.name if source else name_of_path(self.model.path)
        return self.model.name or last or self.engine.kind

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's name in the API, and its aliases."""
        return tuple(dict.fromkeys((self.model_name, *self.model.aliases)))

    def role(self, role: Role) -> RoleSpec:
        return {"prefill": self.prefill, "decode": self.decode}[role]
