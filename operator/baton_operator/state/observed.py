"""Records of a pool's children: the part of each object that reconciling and status need.

In: nothing; `readers` makes them from objects. Out: frozen records, small enough to keep for 100
pools.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from baton_operator.api.autoscaling import PlannedMode
from baton_operator.kube.kinds import ChildKey
from baton_operator.state.store_check import StoreProblem
from baton_protocol.store import FetchReport, NodeReport, Role

# "" if the pod fetches no model.
Fetch = Literal["", "waiting", "running", "done"]
# unplaced: not scheduled. pending: not all containers are created. over: it has ended, and its
# controller no longer counts it.
Stage = Literal["unplaced", "pending", "running", "over"]


class ObservedWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """A Deployment. `instance`: which data server of the store. `pods`: number of pods, of old
    templates too; `updated`: those of the newest template. `current`: the controller has observed
    the newest spec. `problem`: PodsRefused if the controller may not create pods, StartOverdue if
    none became ready within progressDeadlineSeconds; `message` holds the details. `gpus`: GPUs per
    pod. `holds`: routers of the newest template hold requests while there is no node."""

    name: str
    component: str
    revision: str
    desired: int
    pods: int
    ready: int
    updated: int
    current: bool
    instance: str = ""
    problem: str = ""
    message: str = ""
    gpus: int = 0
    holds: bool = False

    @property
    def rolled(self) -> bool:
        """Whether no pod of an older template is left, except terminating ones."""
        return self.current and self.pods == self.updated


class FirstSeen(msgspec.Struct, frozen=True, kw_only=True):
    """When this operator first saw the pod in its current state, on its own monotonic clock.

    The timestamps in a pod come from other machines' clocks: a kubelet's, the API server's, an
    earlier leader's. They are only shown and compared for equality; durations are measured with
    these fields instead. An operator that restarts measures from its own start.
    """

    created: float = 0.0
    readiness: float = 0.0  # since then it has been ready, or has not
    unprepared: float = 0.0
    drain: float = 0.0


class ObservedPod(msgspec.Struct, frozen=True, kw_only=True):
    """`problem`: why it does not become ready, "" if nothing is wrong; `message` holds the details.
    `unprepared_since`: when the kubelet began to set up volumes, secrets and network, without
    success so far; only events say what is missing. `drain_since`: when it was marked to go, "" if
    it was not; `drain_reason`: why this pod was chosen. In a roll-out `replaced_by` is the new
    revision and `drain_seconds` the time for its requests, else "". `unready_since` is "" while it
    is ready or its readiness is unknown; `ready_since` is "" while it is not ready."""

    name: str
    component: str
    revision: str
    ready: bool
    terminating: bool
    instance: str = ""
    problem: str = ""
    message: str = ""
    fetch: Fetch = ""
    unprepared_since: str = ""
    stage: Stage = "running"
    address: str = ""
    drain_since: str = ""
    drain_reason: str = ""
    drain_seconds: str = ""
    replaced_by: str = ""
    unready_since: str = ""
    ready_since: str = ""
    gpus: int = 0
    seen: FirstSeen = FirstSeen()

    @property
    def ends(self) -> bool:
        """Whether it terminates or was marked to go, so that it takes no new requests soon."""
        return self.terminating or bool(self.drain_since)


class ObservedScaler(msgspec.Struct, frozen=True, kw_only=True):
    """A PoolScaler. `wanted` is what an autoscaler wrote; we wrote the other fields."""

    wanted: int
    replicas: int
    selector: str


class ObservedRoute(msgspec.Struct, frozen=True, kw_only=True):
    """An Ingress or HTTPRoute. `accepted` is None while no controller has accepted or rejected
    it."""

    kind: Literal["Ingress", "HTTPRoute"]
    accepted: bool | None
    message: str = ""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A child that the API server refused; `message` is the server's. `own_words`: this operator
    refused it."""

    child: ChildKey
    code: int
    message: str
    own_words: bool = False


class SharedHost(msgspec.Struct, frozen=True, kw_only=True):
    """Another pool's route of the same host name. `field` is this pool's."""

    field: str
    host: str
    pool: str


class Departure(msgspec.Struct, frozen=True):
    """What keeps a role's surplus nodes from going, except their requests. `held`: it needs an
    intervention."""

    role: Role
    message: str
    held: bool


class Roll(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a pool's roll-out. `rolling`: nodes of older revisions serve. `no_room`: what
    the GPU budget lacks for it. `short`: roles that the budget gives fewer nodes than desired."""

    rolling: bool = False
    no_room: str = ""
    short: tuple[Role, ...] = ()


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's last decision."""

    mode: PlannedMode
    prefill: int
    decode: int
    reason: str
    message: str
    numbers: str = ""

    def like(self, other: Planned) -> bool:
        """Whether counts and reason are the same."""
        counts, others = (self.prefill, self.decode), (other.prefill, other.decode)
        return counts == others and self.reason == other.reason


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """One pool's children at one moment. `nodes` and `fetches` are None if the index was not read
    or did not answer; `silent` if several reads in a row failed. `store_problem`: of an external
    store, at the last read. `address` is that of the router's LoadBalancer, "" without one.
    `planned` is None without autoscaling, or while paused."""

    workloads: tuple[ObservedWorkload, ...] = ()
    pods: tuple[ObservedPod, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    nodes: tuple[NodeReport, ...] | None = None
    fetches: tuple[FetchReport, ...] | None = None
    routes: tuple[ObservedRoute, ...] = ()
    address: str = ""
    silent: bool = False
    store_problem: StoreProblem | None = None
    departures: tuple[Departure, ...] = ()
    roll: Roll = Roll()
    planned: Planned | None = None
    shared_hosts: tuple[SharedHost, ...] = ()

    @property
    def drains(self) -> bool:
        """Whether nodes must go, chosen or not yet."""
        return bool(self.departures) or any(pod.drain_since for pod in self.pods)

    @property
    def held(self) -> bool:
        """Whether nodes must go and cannot."""
        return any(departure.held for departure in self.departures)
