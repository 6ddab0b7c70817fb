"""Invariants of a roll-out: they hold in whatever order pods become ready, end or die."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

from hypothesis import assume, given
from hypothesis import strategies as st

from baton_operator.rollout.role_nodes import OldNodes, RoleNodes
from baton_operator.rollout.targets import Targets, compute_targets
from baton_protocol.store import ROLES, Role

STEPS = 2_000


@dataclass
class Nodes:
    """One Deployment: its desired replicas, and its pods by state."""

    desired: int = 0
    starting: int = 0
    ready: int = 0
    ending: int = 0

    @property
    def alive(self) -> int:
        return self.starting + self.ready

    @property
    def pods(self) -> int:
        return self.alive + self.ending


@dataclass
class World:
    """A pool in a roll-out. Its pods are created, become ready and end one at a time, at random."""

    wanted: dict[Role, int]
    gpus: dict[Role, int]
    old_gpus: dict[Role, int]
    old: dict[tuple[Role, str], Nodes]
    surge: int
    budget: int | None
    rng: random.Random
    new: dict[Role, Nodes] = field(default_factory=lambda: {role: Nodes() for role in ROLES})

    def roles(self) -> list[RoleNodes]:
        return [
            RoleNodes(
                role=role,
                wanted=self.wanted[role],
                desired=self.new[role].desired,
                alive=self.new[role].alive,
                ending=self.new[role].ending,
                ready=self.new[role].ready,
                gpus=self.gpus[role],
                old=tuple(
                    OldNodes(
                        revision=revision,
                        desired=nodes.desired,
                        alive=nodes.alive,
                        ending=nodes.ending,
                        holding=nodes.ready,
                        gpus=self.old_gpus[role],
                    )
                    for (of, revision), nodes in self.old.items()
                    if of == role and (nodes.pods or nodes.desired)
                ),
            )
            for role in ROLES
        ]

    def decide(self) -> Targets:
        return compute_targets(self.roles(), self.surge, self.budget)

    def apply(self, found: Targets) -> None:
        for role in ROLES:
            self.new[role].desired = found.new[role]
        for place, count in found.old.items():
            assert count <= self.old[place].desired
            self.old[place].desired = count

    def move(self) -> None:
        """Let one possible event happen, chosen at random."""
        events = [
            (nodes, event)
            for nodes in (*self.new.values(), *self.old.values())
            for event in ("create", "ready", "end", "gone")
            if self._may(nodes, event)
        ]
        if events:
            self._do(*self.rng.choice(events))

    def _may(self, nodes: Nodes, event: str) -> bool:
        return {
            "create": nodes.alive < nodes.desired,
            "ready": nodes.starting > 0,
            "end": nodes.alive > nodes.desired,
            "gone": nodes.ending > 0,
        }[event]

    def _do(self, nodes: Nodes, event: str) -> None:
        match event:
            case "create":
                nodes.starting += 1
            case "ready":
                nodes.starting, nodes.ready = nodes.starting - 1, nodes.ready + 1
            case "end":
                if nodes.starting:
                    nodes.starting -= 1
                else:
                    nodes.ready -= 1
                nodes.ending += 1
            case "gone":
                nodes.ending -= 1

    def held_gpus(self) -> int:
        new = sum(self.new[role].pods * self.gpus[role] for role in ROLES)
        return new + sum(nodes.pods * self.old_gpus[role] for (role, _), nodes in self.old.items())

    def serving_pairs(self, roles: set[Role]) -> int:
        """Return the number of revisions that have a ready node of each of these roles."""
        revisions = {revision for _, revision in self.old}
        kinds = [{role: self.old[role, one].ready for role in roles} for one in revisions]
        kinds.append({role: self.new[role].ready for role in roles})
        return sum(all(counts.values()) for counts in kinds)

    def is_done(self) -> bool:
        fresh = all(self.new[role].ready == self.wanted[role] for role in ROLES)
        return fresh and not any(nodes.pods or nodes.desired for nodes in self.old.values())


COUNTS = st.integers(1, 5)
GPUS = st.integers(0, 3)


@st.composite
def worlds(draw: st.DrawFn, *, revisions: int = 1, budget: bool = False) -> World:
    wanted: dict[Role, int] = {role: draw(COUNTS) for role in ROLES}
    gpus: dict[Role, int] = {role: draw(GPUS) for role in ROLES}
    old_gpus: dict[Role, int] = {role: draw(GPUS) for role in ROLES}
    names = [f"old{number}" for number in range(revisions)]
    old = {}
    for role in ROLES:
        for name in names:
            count = draw(COUNTS)
            old[role, name] = Nodes(desired=count, ready=count)
    surge = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**32))
    world = World(wanted, gpus, old_gpus, old, surge, None, random.Random(seed))
    if budget:
        # At least the smallest budget that the operator accepts, and the GPUs held before.
        world.budget = 100_000
        found = world.decide()
        held = sum(nodes.pods * old_gpus[role] for (role, _), nodes in old.items())
        world.budget = max(1, found.needed_gpus, held) + draw(st.integers(0, 3))
    return world


@given(worlds(budget=True) | worlds(revisions=2) | worlds())
def test_a_roll_out_ends_and_a_pair_always_serves_within_surge_and_budget(world: World) -> None:
    most = {
        role: max(
            world.wanted[role] + world.surge,
            sum(nodes.pods for (of, _), nodes in world.old.items() if of == role),
        )
        for role in ROLES
    }
    for _ in range(STEPS):
        if world.is_done():
            break
        world.apply(world.decide())
        world.move()
        assert world.serving_pairs({*ROLES}) >= 1
        if world.budget is not None:
            assert world.held_gpus() <= world.budget
        for role in ROLES:
            pods = sum(nodes.pods for (of, _), nodes in world.old.items() if of == role)
            assert pods + world.new[role].pods <= most[role]
    assert world.is_done()


@given(worlds(), st.integers(0, 60))
def test_old_nodes_stay_when_new_nodes_die(world: World, at: int) -> None:
    moments = []  # copies of the pool in which both new and old nodes are ready
    for _ in range(61):
        if all(any(nodes.ready for nodes in some.values()) for some in (world.old, world.new)):
            moments.append(copy.deepcopy(world))
        world.apply(world.decide())
        world.move()
    assume(moments)
    world = moments[at % len(moments)]
    before = {place: nodes.desired for place, nodes in world.old.items()}
    for nodes in world.new.values():
        nodes.starting, nodes.ready = nodes.alive, 0
    found = world.decide()
    assume(found.rolling)
    kept = {place: min(before[place], nodes.ready) for place, nodes in world.old.items()}
    for place, count in found.old.items():
        least = min(kept[place], world.wanted[place[0]])
        assert count >= least


@given(worlds(), st.integers(0, 60))
def test_the_decision_is_stable_while_nothing_changes(world: World, at: int) -> None:
    for _ in range(at):
        world.apply(world.decide())
        world.move()
    world.apply(world.decide())
    found = world.decide()
    again = world.decide()
    assert (found.new, found.old) == (again.new, again.old)
    for role in ROLES:
        assert found.new[role] == world.new[role].desired


@given(worlds(), st.integers(0, 60))
def test_a_reverted_spec_ends_with_the_original_nodes(world: World, at: int) -> None:
    for _ in range(at):
        world.apply(world.decide())
        world.move()
    old = {role: world.old[role, "old0"] for role in ROLES}
    world.old = {(role, "failed"): world.new[role] for role in ROLES}
    world.new = old
    world.gpus, world.old_gpus = world.old_gpus, world.gpus
    for _ in range(STEPS):
        if world.is_done():
            break
        world.apply(world.decide())
        world.move()
        assert world.serving_pairs({*ROLES}) >= 1
    assert world.is_done()


@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.tuples(GPUS, GPUS),
    st.integers(1, 20),
)
def test_without_a_roll_out_all_nodes_within_the_budget_are_created_at_once(
    wanted: tuple[int, int], gpus: tuple[int, int], budget: int
) -> None:
    roles = [
        RoleNodes(role=role, wanted=count, gpus=each)
        for role, count, each in zip(ROLES, wanted, gpus, strict=True)
    ]
    free = compute_targets(roles, 1, None)
    assert [free.new[role] for role in ROLES] == [*wanted]
    bound = compute_targets(roles, 1, budget)
    held = sum(bound.new[one.role] * one.gpus for one in roles)
    assert held <= budget
    assert all(bound.new[one.role] <= one.wanted for one in roles)
    smallest = min((one.gpus for one in roles if bound.new[one.role] < one.wanted), default=budget)
    assert held + smallest > budget or bound.new == free.new


@given(worlds(budget=True), st.tuples(COUNTS, COUNTS), st.integers(0, 40), st.booleans())
def test_a_roll_out_ends_within_the_budget_when_the_wanted_numbers_change(
    world: World, later: tuple[int, int], at: int, same_size: bool
) -> None:
    wanted = dict(zip(ROLES, later, strict=True))
    if same_size:
        world.gpus = dict(world.old_gpus)
    pair = sum(world.gpus[role] + max(world.gpus[role], world.old_gpus[role]) for role in ROLES)
    last = sum(wanted[role] * world.gpus[role] for role in ROLES)
    world.budget = max(world.budget or 0, pair, last)
    for _ in range(at):
        world.apply(world.decide())
        world.move()
    begun = all(nodes.desired for nodes in world.new.values())
    assume(begun and world.held_gpus() <= world.budget)
    world.wanted = wanted
    for _ in range(STEPS):
        if world.is_done():
            break
        world.apply(world.decide())
        world.move()
        assert world.serving_pairs({*ROLES}) >= 1
        assert world.held_gpus() <= world.budget
    # New nodes of another size than the old ones may need more; `needed_gpus` then reports it.
    assert world.is_done() or (not same_size and world.decide().needed_gpus > world.budget)
