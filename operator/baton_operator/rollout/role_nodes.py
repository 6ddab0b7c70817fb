"""How many nodes of each revision a role has now."""

from __future__ import annotations

import msgspec

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
        """GPUs that pods hold or will hold soon."""
        return max(self.desired, self.alive) + self.ending

    @property
    def kept(self) -> int:
        """The nodes that may be kept; an ending node never comes back."""
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
        return new + sum(old_nodes.places * old_nodes.gpus for old_nodes in self.old)
