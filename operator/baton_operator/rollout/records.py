"""What a roll-out is decided from, and what is decided: numbers of nodes by role and revision."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from baton_operator.kube.kinds import ChildKey
from baton_protocol.store import Role


class OldNodes(msgspec.Struct, frozen=True, kw_only=True):
    """One role's nodes of an older revision. `desired` is what their Deployment asks for; pods are
    `alive`, or `ending`. `holding`: those alive that serve, or have just ceased to. `gpus` of each.
    """

    revision: str
    desired: int = 0
    alive: int = 0
    ending: int = 0
    holding: int = 0
    gpus: int = 0

    @property
    def places(self) -> int:
        """Taken by pods, or about to be."""
        return max(self.desired, self.alive) + self.ending

    @property
    def kept(self) -> int:
        """Those that are worth to be kept: what ends never comes back."""
        return min(self.desired, self.holding)


class RoleNodes(msgspec.Struct, frozen=True, kw_only=True):
    """One role: its nodes of the current revision, of which `wanted` shall serve, and older ones.
    `ready` ones take requests. `gpus` of each new one."""

    role: Role
    wanted: int
    desired: int = 0
    alive: int = 0
    ending: int = 0
    ready: int = 0
    gpus: int = 0
    old: tuple[OldNodes, ...] = ()

    @property
    def held_gpus(self) -> int:
        new = (max(self.desired, self.alive) + self.ending) * self.gpus
        return new + sum(one.places * one.gpus for one in self.old)


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes each Deployment shall have now: `new` by role, `old` by role and revision.
    `rolling`: nodes of older revisions serve. `needed_gpus` is what the roll-out holds at its peak,
    `held_gpus` what is held now. `allowed` is as many as are wanted and within the budget."""

    new: Mapping[Role, int]
    old: Mapping[tuple[Role, str], int]
    allowed: Mapping[Role, int]
    rolling: bool
    needed_gpus: int
    held_gpus: int


class Lower(msgspec.Struct, frozen=True, kw_only=True):
    """A Deployment of an older revision gets fewer replicas, if it is the one of `version`."""

    key: ChildKey
    uid: str
    version: int
    replicas: int
